import json
import sys
import time

import numpy as np
import pytest
import torch
from adapter_cases import ONE_RANK, PARAMS, TWO_RANKS, UNEVEN, assert_gradient, mean, window

from numden.property_tests.adapters import UnfitWorld, from_command
from numden.property_tests.worlds.world import StepResult, World

HEAD = """
import json, sys, time
from pathlib import Path
import numpy as np
folder = Path(sys.argv[-1])
world = json.loads((folder / "world.json").read_text())
params = dict(np.load(folder / "params.npz"))
windows = [
    [dict(np.load(folder / f"rank{rank}_micro{i}.npz")) for i in range(count)]
    for rank, count in enumerate(world["micro_steps"])
]
batches = [batch for window in windows for batch in window]
"""

SUMS = """
num = sum((batch["losses"] * batch["mask"]).sum() for batch in batches)
grad = num / sum(batch["mask"].sum() for batch in batches)
grad = grad.reshape(1)
np.savez(folder / "grads.npz", w=grad)
"""


def program(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(HEAD + body)
    return [sys.executable, path, "--quick"]


@pytest.mark.parametrize("world", [ONE_RANK["ragged"], TWO_RANKS["partial"], UNEVEN])
def test_gradient_of_a_program(tmp_path, world):
    result = from_command(program(tmp_path, SUMS))(PARAMS, world)
    assert_gradient(result, mean(world))
    assert result == StepResult(grads=result.grads)


def test_all_that_a_program_may_write(tmp_path):
    body = """
np.savez(folder / "new_params.npz", w=params["w"] - grad)
(folder / "result.json").write_text(json.dumps({"loss": 5.5, "eval_loss": 7}))
"""
    world = ONE_RANK["ragged"]
    result = from_command(program(tmp_path, SUMS + body))(PARAMS, world)
    assert_gradient(result, mean(world))
    torch.testing.assert_close(result.params, {"w": 2 - mean(world).reshape(1)})
    assert (result.loss, result.eval_loss) == (5.5, 7)


def test_what_a_program_is_told(tmp_path):
    copied = tmp_path / "copied"
    body = f"import shutil\nshutil.copytree(folder, {str(copied)!r})\n" + SUMS
    rest = [window([[4.0]]), []]
    world = World([window([[1.0]]), window([[3.0]])], mesh={"dp": 2}, accumulation=5, rest=rest)
    from_command(program(tmp_path, body), num_ranks=2)(PARAMS, world)
    assert sorted(path.name for path in copied.iterdir()) == [
        "params.npz",
        "rank0_micro0.npz",
        "rank0_rest0.npz",
        "rank1_micro0.npz",
        "stderr",
        "world.json",
    ]
    assert json.loads((copied / "world.json").read_text()) == {
        "ranks": 2,
        "mesh": {"dp": 2},
        "accumulation": 5,
        "micro_steps": [1, 1],
        "rest": [1, 0],
        "params": ["w"],
        "fields": ["losses", "mask", "labels", "attention_mask"],
    }
    with np.load(copied / "rank1_micro0.npz") as batch:
        assert batch["losses"].tolist() == [[1.0, 3.0]]
        assert {name: str(batch[name].dtype) for name in batch} == {
            "losses": "float64",
            "mask": "bool",
            "labels": "int64",
            "attention_mask": "int64",
        }


def test_a_batch_may_be_one_array(tmp_path):
    body = 'np.savez(folder / "grads.npz", w=batches[0]["batch"])'
    step = from_command(program(tmp_path, body))
    assert step(PARAMS, [[torch.tensor([3.0])]]).grads == {"w": torch.tensor([3.0])}


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("sys.exit('no such layer')", RuntimeError, r"got 1 from .*\n.*stderr:\nno such layer"),
        ("", FileNotFoundError, r"must write grads.npz or new_params.npz .* got neither"),
        (SUMS.replace("w=", "v="), ValueError, r"grads.npz must have .*\{'w': \[1\]\}, got \{'v'"),
        (SUMS.replace("reshape(1)", "reshape(1, 1)"), ValueError, r"got \{'w': \[1, 1\]\}"),
    ],
    ids=["exit status", "no file", "names", "shapes"],
)
def test_a_program_that_fails(tmp_path, body, error, words):
    with pytest.raises(error, match=words):
        from_command(program(tmp_path, body))(PARAMS, UNEVEN)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(1.5); open({str(alive)!r}, 'w')"
    body = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    body += "print('deep in thought', file=sys.stderr, flush=True)\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)timeout=1 s, .*Give more time.*deep in thought"):
        from_command(program(tmp_path, body), timeout=1)(PARAMS, UNEVEN)
    assert time.monotonic() - start < 10
    time.sleep(2)
    assert not alive.exists()


def test_what_cannot_be_written():
    step = from_command(["true"], num_ranks=1)
    with pytest.raises(UnfitWorld, match="runs on num_ranks=1"):
        step(PARAMS, UNEVEN)
    for batch in [{"x": {"y": torch.tensor(1.0)}}, {"x": torch.tensor(1.0).bfloat16()}]:
        with pytest.raises(ValueError, match=r"dtypes that numpy has, got \['x'\]"):
            step(PARAMS, [[batch]])
