"""A run that was stopped goes on as if it had not been; what is half written is not there."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d
from checkpoint_cases import ADAM, apart, same, start, train, whole
from dist_cases import fully_sharded, mean_loss, net, said
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh

from numden import dist
from numden.dist import TrainState, latest, load, run_local, save
from numden.dist import _checkpoint_folder as folders
from numden.pure import accumulator

KINDS = [
    "tree",
    "fsdp",
    "shard",
    *(pytest.param(k, marks=pytest.mark.slow) for k in ("module", "ddp")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_equivalent_resumed_uninterrupted(kind, tmp_path):
    """In new processes, on as many ranks and on fewer or more."""
    straight = {
        ranks: run_local(train, ranks, kind, tmp_path / f"straight{ranks}", range(4))
        for ranks in (1, 2)
    }
    for saved_on in (1, 2):
        for resumed_on in (1, 2):
            folder = tmp_path / f"{saved_on} to {resumed_on}"
            run_local(train, saved_on, kind, folder, range(2))
            resumed = run_local(resume, resumed_on, kind, folder)
            for got, want in zip(resumed, straight[resumed_on], strict=True):
                if saved_on == resumed_on:
                    assert same(got, want)
                # Adam divides by roots of squares, which magnifies roundings.
                assert apart(got, want) < 1e-10


def resume(kind, folder):
    return train(kind, folder, range(2, 4), resume=True)


def hybrid(folder):
    """A 2 x 2 module, its shards replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    module = fully_sharded(net(), mesh)
    state = dist.init_state(module, ADAM)
    return save(folder, state, extra={"rank": 0}) and whole(state)


def test_shards_are_saved_once_and_fit_other_meshes(tmp_path):
    expected = run_local(hybrid, 4, tmp_path)[0]

    def on_rank():
        state, _ = start("fsdp")
        with torch.no_grad():
            for leaf in state.params.parameters():
                leaf.zero_()
        return whole(load(tmp_path, state)[0])

    for found in run_local(on_rank, 3):
        assert same(found, expected)
    for meta in FileSystemReader(latest(tmp_path)).read_metadata().state_dict_metadata.values():
        held = sum(torch.Size(chunk.sizes).numel() for chunk in meta.chunks)
        assert held == meta.size.numel()


# --- whole or not there --------------------------------------------------------------------------


def weights(value=0.0):
    return TrainState({"w": torch.full((3,), value), "b": [torch.tensor(value)]}, {"count": 0})


def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = {
    "before a tensor is written": (FileSystemWriter, "write_data"),
    "before torch's metadata": (FileSystemWriter, "finish"),
    "before the marker": (folders, "finish"),
    "before the rename": (Path, "rename"),
    "while older ones are removed": (folders.shutil, "rmtree"),
}


def saved_until(folder, where, name, victim):
    """Two whole checkpoints, and a third in which rank ``victim`` dies."""
    for step in (1, 2):
        save(folder, weights(float(step))._replace(step=step))
    if c10d.get_rank() == victim:
        setattr(where, name, die)  # the ranks are processes of their own
    save(folder, weights(3.0)._replace(step=3), keep=2)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_saving(moment, tmp_path):
    with pytest.raises(RuntimeError, match=r"rank 0 .*SIGKILL"):
        run_local(saved_until, 2, tmp_path, *MOMENTS[moment], 0)
    whole_of_step, left = 2, ["step-00000002", "step-00000004"]
    if moment == "while older ones are removed":
        whole_of_step, left = 3, ["step-00000003", "step-00000004"]
    state, _ = load(tmp_path, weights())
    assert state.step == whole_of_step
    assert torch.equal(state.params["w"], torch.full((3,), float(whole_of_step)))
    assert any(path.name.startswith(".unfinished") for path in tmp_path.iterdir())
    path = save(tmp_path, weights(4.0)._replace(step=4), keep=2)
    left = (
        ["step-00000002", "step-00000004"]
        if whole_of_step == 2
        else [f"step-0000000{i}" for i in (3, 4)]
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == left
    assert latest(tmp_path) == path


def test_another_rank_killed_while_saving(tmp_path):
    with pytest.raises(RuntimeError, match=r"rank 1 .*SIGKILL"):
        run_local(saved_until, 2, tmp_path, FileSystemWriter, "write_data", 1)
    assert load(tmp_path, weights())[0].step == 2


def test_a_step_that_is_saved_again(tmp_path):
    for value in (1.0, 2.0, 3.0):
        save(tmp_path, weights(value), keep=2)
        assert load(tmp_path, weights())[0].params["b"][0] == value
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-00000000~1",
        "step-00000000~2",
    ]
    first = load(tmp_path / "step-00000000~1", weights())[0]
    assert first.params["b"][0] == 2.0


def test_steps_are_ordered_by_number(tmp_path):
    for step in (9, 100_000_000, 12):
        save(tmp_path, weights()._replace(step=step))
    assert latest(tmp_path) == tmp_path / "step-100000000"


def test_loading_leaves_like_alone(tmp_path):
    save(tmp_path, weights(2.0))
    like = weights(1.0)
    load(tmp_path, like)
    assert torch.equal(like.params["w"], torch.ones(3))


# --- errors --------------------------------------------------------------------------------------


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"load: path must be a whole .*got '.*' with no f"):
        load(tmp_path / "none", weights())
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(FileNotFoundError, match=r"with \['step-00000003'\]\. Give the folder"):
        load(tmp_path, weights())
    assert latest(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"w": torch.zeros(3)}}, r"none that .* lacks and state\.params\['b'\]\[0\] th"),
        ({"opt_state": {}}, r"and state\.opt_state\['count'\] that it has"),
        ({"opt_state": {"count": 0, "m": 0.0}}, r"got state\.opt_state\['m'\] that .* lacks"),
        (
            {"params": weights().params | {"w": torch.zeros(2)}},
            r"got state\.params\['w'\] of torch\.float32 \[2\] for torch\.float32 \[3\]",
        ),
        (
            {"params": weights().params | {"w": torch.zeros(3).double()}},
            r"got state\.params\['w'\] of torch\.float64 \[3\] for torch\.float32 \[3\]",
        ),
    ],
)
def test_wrong_structure_names_the_leaf(change, message, tmp_path):
    save(tmp_path, weights())
    with pytest.raises(ValueError, match=message):
        load(tmp_path, weights()._replace(**change))


def test_extra_of_another_structure(tmp_path):
    save(tmp_path, weights(), extra={"cursor": 3})
    assert load(tmp_path, weights())[1] is None
    with pytest.raises(ValueError, match=r"got extra\['key'\] that .* and extra\['cursor'\] that"):
        load(tmp_path, weights(), extra={"key": 3})


def test_ranks_that_do_not_share_a_file_system(tmp_path):
    def on_rank():
        if c10d.get_rank():
            folders.Path.is_dir = lambda self: False
        return said(lambda: save(tmp_path, weights()))

    first, second = run_local(on_rank, 2)
    assert first == second
    assert first.startswith("FileNotFoundError: save: all ranks must see the folder")
    assert "not seen by rank 1. Save to" in first


def test_a_carry_on_some_ranks_alone(tmp_path):
    def on_rank():
        carry = accumulator(mean_loss, plan="after").init({}) if c10d.get_rank() else None
        return said(lambda: save(tmp_path, weights()._replace(carry=carry)))

    assert all("got none on ranks [0]" in each for each in run_local(on_rank, 2))


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match=r"save: leaves must be .* got extra\['name'\] of type str"):
        save(tmp_path, weights(), extra={"name": "x"})
    with pytest.raises(ValueError, match=r"save: keep must be at least 1, got keep=0"):
        save(tmp_path, weights(), keep=0)
    assert list(tmp_path.iterdir()) == []
