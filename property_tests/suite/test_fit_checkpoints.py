"""``fit`` goes on by itself, and stops when it is told to."""

import shutil
from functools import partial

import pytest
import torch
from checkpoint_cases import apart, fit, killed_in_pass, same, start, stream
from dist_cases import mean_loss, said

from numden import dist
from numden.dist import run_local
from numden.property_tests.counters import count_collectives
from numden.pure import accumulator


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["tree", "fsdp"])
def test_fit_goes_on_from_where_it_was_told_to_stop(kind, tmp_path):
    """One rank of two gets SIGTERM: both stop after that window, and the next call goes on."""
    straight = run_local(fit, 2, kind, tmp_path / "straight")
    told = partial(fit, told=(1, 2))
    stopped = run_local(told, 2, kind, tmp_path / "stopped")
    assert [(step, records) for _, step, records in stopped] == [(3, [2, 3])] * 2
    assert names(tmp_path / "stopped") == ["step-00000003"]
    resumed = run_local(fit, 2, kind, tmp_path / "stopped")
    assert [(step, records) for _, step, records in resumed] == [(5, [4, 5])] * 2
    assert names(tmp_path / "stopped") == ["step-00000003", "step-00000005"]
    for got, want in zip(resumed, straight, strict=True):
        assert same(got[0], want[0])


@pytest.mark.parametrize("kind", ["tree", "fsdp"])
def test_fit_repeats_a_window_in_which_it_was_killed(kind, tmp_path):
    """Rank 1 has 7 micro-steps in the first window and 4 in the second: it dies in its third."""
    straight = run_local(fit, 2, kind, tmp_path / "straight", 3)
    killed = partial(fit, save_every=1, loss=killed_in_pass(9))
    with pytest.raises(RuntimeError, match=r"SIGKILL|[Cc]onnection"):  # of it, or of its peer
        run_local(killed, 2, kind, tmp_path / "killed", 3)
    assert names(tmp_path / "killed") == ["step-00000001"]
    resumed = run_local(fit, 2, kind, tmp_path / "killed", 3)
    assert all(same(got[0], want[0]) for got, want in zip(resumed, straight, strict=True))


def test_hosts_ask_each_other_by_a_group_of_their_own(tmp_path, monkeypatch):
    """Where tensors go over NCCL."""
    monkeypatch.setattr("numden.dist._checkpointing.group_device", lambda _: torch.device("cuda"))
    stopped = run_local(partial(fit, told=(1, 2)), 2, "tree", tmp_path)
    assert [step for _, step, _ in stopped] == [3, 3]


def test_fit_resumes_on_another_number_of_ranks(tmp_path):
    (straight, _, _), _ = run_local(fit, 2, "tree", tmp_path / "straight")
    run_local(fit, 2, "tree", tmp_path / "run", 2)
    ((got, step, _),) = run_local(fit, 1, "tree", tmp_path / "run")
    assert step == 5
    assert apart(got, straight) < 1e-10


def test_fit_saves_now_and_then_and_keeps_the_last(tmp_path):
    run_local(partial(fit, save_every=2, keep=2), 1, "tree", tmp_path)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    run_local(partial(fit, save_every=2, keep=3), 1, "tree", tmp_path, 7)
    assert names(tmp_path) == [f"step-0000000{step}" for step in (5, 6, 7)]


def test_a_run_that_is_done_does_nothing(tmp_path):
    run_local(fit, 1, "tree", tmp_path)
    ((_, step, records),) = run_local(partial(fit, windows=raising()), 1, "tree", tmp_path)
    assert (step, records) == (5, [])
    assert names(tmp_path) == ["step-00000005"]


def raising():
    raise AssertionError("no window is needed")
    yield


def test_windows_may_be_a_function_of_how_many_are_done(tmp_path):
    """An iterable starts with the run, and gives the same windows again."""
    run_local(fit, 1, "tree", tmp_path / "a", 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ((by_function, _, _),) = run_local(fit, 1, "tree", tmp_path / "a")
    ((by_iterable, _, _),) = run_local(lambda: fit("tree", tmp_path / "b", windows=stream()), 1)
    assert same(by_function, by_iterable)


def test_fit_counts_windows_from_the_state_it_is_given(tmp_path):
    def on_rank():
        state, step = start("tree")
        options = {"num_windows": 2, "checkpoints": tmp_path, "progress": False}
        state, _ = dist.fit(step, state._replace(step=10), stream, **options)
        return state.step

    assert run_local(on_rank, 1) == [12]
    assert run_local(on_rank, 1) == [12]


def test_checkpoints_of_another_run(tmp_path):
    def on_rank():
        state, step = start("tree")
        begin = accumulator(mean_loss, plan="after").init
        dist.save(tmp_path / "within", state._replace(carry=begin(state.params)))
        dist.save(tmp_path / "before", state)
        run = partial(dist.fit, step, state._replace(step=3), stream, num_windows=1)
        folders = tmp_path / "within", tmp_path / "before"
        return [said(partial(run, checkpoints=folder)) for folder in folders]

    ((within, before),) = run_local(on_rank, 1)
    assert "/step-00000000+0000', within a window for a state of step 3. Give fit" in within
    assert before.startswith("ValueError: fit: checkpoints must be of this run and between windows")


def collectives_of_fit(**options):
    state, step = start("tree")
    with count_collectives() as calls:
        dist.fit(step, state, stream, num_windows=3, log_every=9, progress=False, **options)
    return calls.total()


def test_being_told_to_stop_costs_one_collective_in_a_window(tmp_path):
    """Beside those of the one checkpoint at the end."""

    def on_rank():
        state, _ = start("tree")
        with count_collectives() as calls:
            dist.save(tmp_path / "saved", state)
        more = collectives_of_fit(checkpoints=tmp_path / "run") - collectives_of_fit()
        return more, calls.total()

    for more, saving in run_local(on_rank, 2):
        assert more - saving == 3 + 2  # and to look for a checkpoint: a size and an object
