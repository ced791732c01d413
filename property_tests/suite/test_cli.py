"""``numden`` on the command line: help that reads well, errors in one line, and one whole run."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d
from job_cases import TINY, written
from typer.testing import CliRunner

from numden.models import job
from numden.models.cli import app
from numden.models.commands.saved import checkpoints_of
from numden.models.drafters import DRAFTERS
from numden.models.train_config import with_overrides

RUNNER = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
OPTIONS = ("--config", "--out", "--model", "--ranks", "--seed", "--set", "--help")


def invoke(*args):
    return RUNNER.invoke(app, [str(arg) for arg in args])


def words(text):
    """Without the frames and line ends of a terminal."""
    return " ".join(text.translate({ord(c): " " for c in "│╭╮╰╯─"}).split())


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--help"], []])
def test_help_says_what_there_is(args):
    result = invoke(*args)
    assert result.exit_code == (0 if args else 2)  # 2 is click's code for no command
    said = words(result.output)
    assert "Training losses as ratios of sums: sums first, one division, SUM-reduced" in said
    assert "Commands train Train a target decoder and a drafter, decode with both" in said


def test_help_of_train_names_each_option_and_what_it_is():
    result = invoke("train", "--help")
    assert result.exit_code == 0
    said = words(result.output)
    places = [said.index(f" {option} ") for option in OPTIONS]
    assert places == sorted(places)
    assert "A YAML or TOML file; its keys are strict." in said
    assert "[default: runs/demo]" in said
    assert "--set KEY=VALUE A key of the file, such as drafter.num_windows=20." in said
    assert "--ranks <int> Ranks on this machine (run.ranks of the file)." in said
    assert "numden.models.train_config" in said
    assert max(len(line) for line in result.output.splitlines()) <= 100


def run_python(*args, **env):
    """A fresh Python; ``-P`` keeps the folder that it is started in off the path."""
    environ = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **env}
    return subprocess.run(
        [sys.executable, "-P", *map(str, args)], capture_output=True, text=True, env=environ
    )


def test_python_m_numden():
    done = run_python("-m", "numden", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert words(done.stdout).startswith(
        "Usage: python -m numden [OPTIONS] COMMAND [ARGS]... Training"
    )


def test_without_typer_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import numden.__main__ as m; m.main()"
    done = run_python("-c", code)
    assert done.returncode == 1
    assert done.stderr == (
        "numden: the command line needs typer. Install it: pip install 'numden[train]'\n"
    )


# --- errors --------------------------------------------------------------------------------------


def assert_one_line_error(result, said):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"numden train: {said}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--set", "run.sed=3"], "config: there is no key 'run.sed'. Did you mean 'run.seed'?"),
        (["--set", "seed=3"], "config: an override is section.key=value, got 'seed=3'."),
        (
            ["--model", "eagle9"],
            f"config: drafter.model must be one of {', '.join(DRAFTERS)}, got eagle9.",
        ),
        (["--ranks", "0"], "config: run.ranks must be at least 1, got 0."),
        (
            ["--set", "data.files=nothing.txt"],
            "read_texts: a path must name a file, 'nothing.txt' matches none.",
        ),
    ],
)
def test_a_bad_value_is_one_line_and_code_2(tmp_path, args, said):
    config = written(tmp_path, TINY)
    result = invoke("train", "-c", config, "--out", tmp_path / "out", *args)
    assert_one_line_error(result, said)
    assert not (tmp_path / "out").exists()


def test_a_bad_key_of_a_file_is_one_line_and_code_2(tmp_path):
    (tmp_path / "c.toml").write_text("[drafter]\nnum_anchor = 1\n")
    result = invoke("train", "-c", tmp_path / "c.toml")
    expected = "config: there is no key 'drafter.num_anchor'. Did you mean 'drafter.num_anchors'?"
    assert_one_line_error(result, expected)


def test_bad_shapes_are_found_before_anything_is_trained(tmp_path):
    config = written(tmp_path, TINY)
    result = invoke("train", "-c", config, "--set", "target.num_kv_heads=3")
    assert result.exit_code == 2
    assert result.stderr.startswith("numden train: Config: num_")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_missing_package_is_found_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    expected = (
        "numden train: needs the package matplotlib, which is not installed. "
        "Run: pip install 'numden[train]'"
    )
    assert_one_line_error(invoke("train", "-c", written(tmp_path, TINY)), expected)


def test_paths_are_checked(tmp_path):
    missing = invoke("train", "--config", tmp_path / "c.toml")
    assert missing.exit_code == 2
    assert "does not exist" in words(missing.stderr)
    (tmp_path / "file").write_text("")
    result = invoke("train", "--out", tmp_path / "file", "-c", written(tmp_path, TINY))
    assert result.exit_code == 2
    assert "is a file" in words(result.stderr)
    below = invoke("train", "--out", tmp_path / "file/out", "-c", written(tmp_path, TINY))
    assert below.exit_code == 2
    assert below.stderr.startswith("numden train: ")
    assert below.stderr.count("\n") == 1


# --- one whole run -------------------------------------------------------------------------------

RECORD = {"step", "loss", "grad_norm", "tokens_per_second", "metrics"}
METRICS = {
    "accepted_length",
    "accuracy",
    "ce_loss",
    "confidence_abs_error",
    "confidence_loss",
    "draft_top1_prob",
    "l1_loss",
    "tau_probabilistic",
    "teacher_agreement",
    "teacher_top1_prob",
}
RUNS = ["2 ranks", "1 rank"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run printed, its figures, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    out = folder / "some" / "out"
    result = invoke("train", "-c", written(folder, TINY), "--out", out, "--seed", 5)
    assert result.exit_code == 0, result.output
    return result.output, json.loads((out / "report.json").read_text()), out


def test_a_run_leaves_figures_and_a_plot(run):
    output, figures, out = run
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "report.png"]
    png = (out / "report.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(png) > 20_000
    assert list(figures) == [
        "config",
        "target",
        "drafter",
        "final_loss",
        "accepted_length",
        "accepted_counts",
        "decoded_tokens",
        "equal_to_target",
        "receipt",
        "sample",
    ]
    assert str(out) in output.replace("\n", "")


def test_the_figures_are_those_of_the_configuration(run):
    _, figures, _ = run
    config = dataclasses.asdict(TINY)
    config["run"]["seed"] = 5
    assert figures["config"] == json.loads(json.dumps(config))
    assert [record["step"] for record in figures["target"]] == [2, 3]
    assert all(set(record) == RECORD and record["metrics"] == {} for record in figures["target"])
    assert list(figures["drafter"]) == list(figures["final_loss"]) == RUNS
    for run_name, records in figures["drafter"].items():
        assert [record["step"] for record in records] == [2, 3]
        assert all(set(record) == RECORD for record in records)
        assert all(set(record["metrics"]) == METRICS for record in records)
        assert figures["final_loss"][run_name] == records[-1]["loss"]


def test_one_rank_and_two_train_the_same_drafter(run):
    first, second = run[1]["drafter"].values()
    for a, b in zip(first, second, strict=True):
        # Sums of float32 in another order, some units of 6e-8 in each of a few steps.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["metrics"] == pytest.approx(b["metrics"], rel=1e-4)


def test_the_receipt_tells_exact_from_wrong(run):
    output, figures, _ = run
    receipt = figures["receipt"]
    names = ["1 rank x 1", "1 rank x 5", "2 ranks x ragged"]
    assert list(receipt) == [*names, "mean of means"]
    assert receipt["1 rank x 1"]["gradient"] == 0
    assert max(receipt[name]["gradient"] for name in names) < 1e-12
    assert receipt["mean of means"]["gradient"] > 1e-3
    losses = [receipt[name]["loss"] for name in names]
    assert max(losses) - min(losses) < 1e-12
    assert f"{receipt['mean of means']['gradient']:.1e}" in output


def test_speculative_decoding_gives_the_targets_tokens(run):
    output, figures, _ = run
    names = ["untrained", "1 rank", "2 ranks"]
    num_tokens = TINY.run.prompts * TINY.run.new_tokens
    assert figures["decoded_tokens"] == num_tokens
    assert figures["equal_to_target"] == dict.fromkeys(names, num_tokens)
    assert f"{num_tokens} of {num_tokens}" in output
    for name in names:
        counts = figures["accepted_counts"][name]
        assert len(counts) <= TINY.drafter.block_size + 1
        mean = sum(i * count for i, count in enumerate(counts)) / sum(counts)
        assert figures["accepted_length"][name] == pytest.approx(1 + mean, rel=1e-12)
        assert sum(counts) + sum(i * count for i, count in enumerate(counts)) >= (
            num_tokens - TINY.run.prompts
        )
    assert isinstance(figures["sample"], str)


def test_the_command_leaves_no_ranks_behind(run):
    assert not c10d.is_initialized()
    assert torch.get_num_threads() == 1


@pytest.fixture
def watched(monkeypatch):
    """States are computed on ranks alone, to be saved; each rank takes its own share of windows."""
    states = job.states

    def on_ranks(*args, **kwargs):
        assert c10d.is_initialized()
        return states(*args, **kwargs)

    def own_share(windows):
        def checked(*args, **kwargs):
            if c10d.is_initialized():
                assert args[-2:] == (c10d.get_rank(), c10d.get_world_size())
            return windows(*args, **kwargs)

        return checked

    monkeypatch.setattr(job, "states", on_ranks)
    for name in ("target_windows", "drafter_windows"):
        monkeypatch.setattr(job, name, own_share(getattr(job, name)))


@pytest.mark.usefixtures("watched")
def test_a_run_with_states_in_files_is_the_same(run, tmp_path):
    options = ["--set", f"drafter.features={tmp_path}/states", "--set", "run.prompts=1"]
    config = written(tmp_path, TINY)
    result = invoke("train", "-c", config, "--out", tmp_path / "out", "--seed", 5, *options)
    assert result.exit_code == 0, result.output
    assert f"hidden states to {tmp_path}/states" in result.output.replace("\n", "")
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["states-00000.safetensors"]
    figures = json.loads((tmp_path / "out/report.json").read_text())
    for name, loss in run[1]["final_loss"].items():
        # The states were rounded to float32 in batches of other shapes.
        assert figures["final_loss"][name] == pytest.approx(loss, rel=1e-5)
    assert max(r["gradient"] for n, r in figures["receipt"].items() if n != "mean of means") < 1e-12


def test_a_run_on_one_rank_and_conversations(tmp_path):
    talks = [{"prompt": "?" * (1 + i % 5), "response": "!" * (1 + i % 11)} for i in range(30)]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    options = ["--ranks", 1, "--set", "run.prompts=1", "--set", "run.new_tokens=1"]
    options += ["--set", f"data.files={tmp_path}/*.jsonl", "--set", "drafter.num_windows=9"]
    config = written(tmp_path, TINY)
    result = invoke("train", "-c", config, "--out", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "out/report.json").read_text())
    assert list(figures["final_loss"]) == ["1 rank with FSDP2", "1 rank"]
    assert figures["accepted_length"]["untrained"] == 1  # one token needs no round
    assert figures["receipt"]["1 rank with FSDP2 x ragged"]["gradient"] < 1e-12
    assert figures["config"]["data"]["files"] == [f"{tmp_path}/*.jsonl"]
    # The first is too short: bos, two roles, two eos, and a letter from each.
    assert result.output.startswith("25 rows with ")
    assert "and 4 rows held out" in " ".join(result.output.split())


@pytest.mark.slow
def test_under_torchrun_it_is_the_same_run(run, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command = ["-m", "numden", "train", "-c", written(tmp_path, TINY)]
    done = run_python(*launch, *command, "--out", tmp_path / "out", "--seed", 5, "--ranks", 9)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Figures and plot:") == 1
    figures, expected = json.loads((tmp_path / "out/report.json").read_text()), run[1]
    assert figures.keys() == expected.keys()
    for name in ("equal_to_target", "decoded_tokens", "accepted_counts", "sample", "final_loss"):
        assert figures[name] == expected[name], name
    assert figures["receipt"].keys() == expected["receipt"].keys()
    assert figures["receipt"]["2 ranks x ragged"]["gradient"] < 1e-12


# --- stopping and going on ------------------------------------------------------------------------

SAVED = ["--seed", 5, "--set", "run.save_every=2"]


def assert_same_run(figures, expected):
    for name in ("equal_to_target", "accepted_counts", "sample", "final_loss", "receipt"):
        assert figures[name] == expected[name], name
    for name in RUNS:
        steps = [record["step"] for record in figures["drafter"][name]]
        assert steps == sorted(set(steps))
        last, as_expected = figures["drafter"][name][-1], expected["drafter"][name][-1]
        assert [last["step"], last["loss"]] == [as_expected["step"], as_expected["loss"]]


def test_a_run_stopped_by_sigterm_goes_on_to_the_same_end(run, tmp_path, monkeypatch):
    """Rank 1 alone is told, in the drafter's second window; both stop behind it, and save."""
    config, out = written(tmp_path, TINY), tmp_path / "out"
    windows = job.drafter_windows

    def told(*args, **kwargs):
        for number, window in enumerate(windows(*args, **kwargs)):
            if number == 1 and c10d.is_initialized() and c10d.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield window

    with monkeypatch.context() as patch:
        patch.setattr(job, "drafter_windows", told)
        result = invoke("train", "-c", config, "--out", out, *SAVED)
    assert result.exit_code == 143
    assert result.stderr == "numden train: stopped by SIGTERM; the same command goes on\n"
    steps = {path.name: sorted(p.name for p in path.glob("step-*")) for path in saved(out)}
    assert steps == {"drafter": ["step-00000002"], "target": ["step-00000002", "step-00000003"]}
    result = invoke("train", "-c", config, "--out", out, *SAVED)
    assert result.exit_code == 0, result.output
    figures = json.loads((out / "report.json").read_text())
    assert_same_run(figures, run[1])
    assert [record["step"] for record in figures["drafter"]["2 ranks"]] == [2, 3]


def saved(out):
    return (path for path in (out / "checkpoints").iterdir() if path.is_dir())


def test_checkpoints_of_another_run_are_refused(tmp_path):
    config = with_overrides(TINY, ["run.save_every=1", "run.seed=3"])
    assert checkpoints_of(TINY, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    folder = checkpoints_of(config, tmp_path)
    assert folder == tmp_path / "checkpoints"
    # Where it runs, and what it prints, may change; what it trains may not.
    free = ["run.ranks=4", "run.log_every=1", "run.keep=5", "run.save_every=7", "run.prompts=1"]
    assert checkpoints_of(with_overrides(config, free), tmp_path) == folder
    with pytest.raises(ValueError, match=r"are of a run with drafter\.lr=0\.002, got 0\.5\. Give"):
        checkpoints_of(with_overrides(config, ["drafter.lr=0.5"]), tmp_path)


def test_what_checkpoints_are_of_is_whole_or_not_there(tmp_path, monkeypatch):
    """Under torchrun another rank reads it meanwhile; and a process may be killed within."""
    config, write = with_overrides(TINY, ["run.save_every=1"]), Path.write_text

    def breaks_off(path, text):
        write(path, text[:9])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            checkpoints_of(config, tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert checkpoints_of(config, tmp_path) == tmp_path / "checkpoints"
    monkeypatch.setenv("RANK", "0")
    assert checkpoints_of(config, tmp_path) == tmp_path / "checkpoints"
    assert json.loads((tmp_path / "checkpoints/config.json").read_text())["run.seed"] == 0


def told_to_stop(command, is_time):
    """What a command says on stderr, which gets SIGTERM once it is time."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            deadline = time.monotonic() + 120  # a few seconds on a machine that is free
            while not is_time():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.terminate()
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143
    return said


@pytest.mark.slow
def test_sigterm_to_the_command_stops_its_ranks(run, tmp_path):
    config, out = written(tmp_path, TINY), tmp_path / "out"
    command = [sys.executable, "-m", "numden", "train", "-c", config, "--out", out, *SAVED]
    command = [str(each) for each in [*command, "--set", "drafter.num_windows=2000"]]

    def last():
        return max((out / "checkpoints").glob("drafter/step-*"), default=None)

    for _ in range(2):
        before = last()
        said = told_to_stop(command, lambda before=before: last() != before)
        assert said == "numden train: stopped by SIGTERM; the same command goes on\n"
