"""Each drafter of ``numden train``: it trains, its gradient is exact however a window is cut."""

import json
import runpy
from itertools import islice
from pathlib import Path

import pytest
import torch
from job_cases import tiny
from torch import Tensor
from typer.testing import CliRunner

from numden.models import job
from numden.models.cli import app
from numden.models.drafters import DRAFTERS
from numden.models.job_rows import read_corpus
from numden.models.receipt import receipt
from numden.pure import optim, tree, window_grad


def setting(name, *overrides):
    """A drafter in double precision, with an untrained target."""
    config = tiny(f"drafter.model={name}", *overrides)
    corpus = read_corpus(config)
    shape = job.target_config(config, corpus.tokenizer.vocab_size)
    drafter = job.drafter_config(config, shape, corpus.tokenizer.special_ids["mask"])
    target = tree.map(Tensor.double, job.target_init(config, shape))
    frozen = job.drafter_target(config, drafter, target)
    params = tree.map(Tensor.double, job.drafter_init(config, drafter, frozen))
    return config, corpus, shape, drafter, target, frozen, params


@pytest.mark.parametrize("name", DRAFTERS)
def test_gradient_is_that_of_the_whole_batch_and_training_lowers_the_loss(name):
    config, corpus, shape, drafter, target, frozen, params = setting(name, "drafter.num_windows=6")
    loss_fn = job.drafter_loss(config, drafter, frozen)
    windows = list(islice(job.drafter_windows(config, corpus, shape, drafter, target), 6))
    objective = job.drafter_objective(config, drafter, 6)
    found = receipt(loss_fn, objective, params, windows[0], {})
    assert found["1 rank x 5"]["gradient"] < 1e-12
    assert found["mean of means"]["gradient"] > 1e-3
    adam = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state, before = (
        adam.init(params),
        float(window_grad(loss_fn, objective)(params, windows[0]).loss),
    )
    for step, window in enumerate(windows):
        grad = window_grad(loss_fn, job.drafter_objective(config, drafter, step))
        params, state = adam.update(grad(params, window).grads, state, params)
    assert float(window_grad(loss_fn, objective)(params, windows[0]).loss) < before


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculative_decoding_gives_the_targets_tokens(name):
    config, corpus, shape, drafter, target, frozen, params = setting(name)
    prompts = [row.tokens[:8] for row in corpus.held_out[:2]]
    kind = job.drafter_kind(config)
    decoded = job.decode(
        kind, prompts, target, shape, {name: params}, drafter, frozen, new_tokens=10
    )
    for plain, drafted in zip(decoded.plain, decoded.by_drafter[name], strict=True):
        assert torch.equal(plain, drafted.tokens)
        assert all(0 <= kept <= config.drafter.block_size for kept in drafted.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_command_trains_it_on_two_ranks(name, tmp_path):
    sizes = {"target.num_windows": 3, "target.hidden_size": 16, "drafter.num_windows": 2}
    sizes |= {"data.max_bytes": 30_000, "run.prompts": 1, "run.new_tokens": 8}
    options = [option for key, value in sizes.items() for option in ("--set", f"{key}={value}")]
    arguments = ["train", "--model", name, "--out", str(tmp_path), *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "report.json").read_text())
    assert figures["receipt"]["2 ranks x ragged"]["gradient"] < 1e-12
    assert figures["equal_to_target"]["2 ranks"] == figures["decoded_tokens"]


@pytest.mark.slow
def test_all_side_by_side(tmp_path, monkeypatch, capsys):
    sizes = {"target.num_windows": 3, "target.hidden_size": 16, "drafter.num_windows": 2}
    sizes |= {"data.max_bytes": 30_000, "run.prompts": 1, "run.new_tokens": 8}
    options = [option for key, value in sizes.items() for option in ("--set", f"{key}={value}")]
    script = str(Path(__file__).parents[2] / "examples/drafters/compare.py")
    monkeypatch.setattr("sys.argv", [script, "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(script, run_name="__main__")
    rows = json.loads((tmp_path / "drafters.json").read_text())
    assert [row["drafter"] for row in rows] == [drafter.title for drafter in DRAFTERS.values()]
    assert all(row["equal"] and row["trained"] >= 1 for row in rows)
    assert (tmp_path / "drafters.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "Tokens for each target step" in capsys.readouterr().out
