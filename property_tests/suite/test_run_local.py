import contextlib
import multiprocessing
import operator
import os
import signal
import sys
import tempfile
import time
from functools import partial

import pytest
import torch
import torch.distributed as c10d

from numden.dist import _local_rank, _run_local, run_local


class _TwoPartError(Exception):
    """Pickle cannot rebuild it: its arguments are not those of __init__."""

    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name}={value}")


@pytest.fixture(autouse=True)
def _nothing_remains(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert multiprocessing.active_children() == []
    assert list(tmp_path.glob("run_local_*")) == []
    with contextlib.suppress(ChildProcessError):  # raised where there is no child at all
        zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert zombie is None


def _rank_and_sum(value):
    total = torch.tensor(value + c10d.get_rank())
    c10d.all_reduce(total)
    return c10d.get_rank(), total.item()


def test_results_come_in_order_of_ranks():
    assert run_local(_rank_and_sum, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_closure_and_results_of_many_kinds():
    offset = torch.arange(3.0)

    def fn(scale):
        x = (offset * scale + c10d.get_rank()).requires_grad_()
        return {"tensor": x.detach(), "leaf": x, "words": ["a", None]}

    results = run_local(fn, 2, 2.0)
    for rank, result in enumerate(results):
        assert torch.equal(result["tensor"], torch.tensor([0.0, 2.0, 4.0]) + rank)
        assert result["leaf"].requires_grad
        assert result["words"] == ["a", None]


def test_result_larger_than_a_pipe_holds():
    results = run_local(lambda: torch.full((300_000,), float(c10d.get_rank())), 2)
    assert [result.sum().item() for result in results] == [0.0, 300_000.0]


def test_each_rank_has_its_environment_and_one_thread():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def fn():
        return [os.environ[name] for name in names], torch.get_num_threads(), c10d.get_backend()

    assert run_local(fn, 2) == [([str(rank), "2", str(rank), "2"], 1, "gloo") for rank in (0, 1)]
    assert not c10d.is_initialized()


def test_more_ranks_than_cores():
    num_ranks = 2 * (os.cpu_count() or 1) + 1
    assert len(run_local(_rank_and_sum, num_ranks, 0)) == num_ranks


def test_ranks_run_backward_after_the_caller_used_its_threads():
    def fn():
        x = torch.ones(300, 300, requires_grad=True)
        (grad,) = torch.autograd.grad((x @ x).sum(), x)
        return grad.sum().item()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        here = fn()
        assert run_local(fn, 2) == [here, here]
    finally:
        torch.set_num_threads(threads)


def test_output_of_ranks_is_flushed(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        run_local(lambda: print(f"hello from {c10d.get_rank()}"), 2)
    assert set((tmp_path / "out").read_text().split("\n")) == {"", "hello from 0", "hello from 1"}


def test_exception_keeps_its_type_and_names_its_rank():
    def fn():
        if c10d.get_rank() == 1:
            raise KeyError("scales")
        c10d.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="scales") as caught:
        run_local(fn, 2)
    assert time.monotonic() - start < 10  # far from the timeout of 60 s
    raised, stopped = caught.value.__notes__
    assert raised.startswith("rank 1 of 2 raised\nTraceback")
    assert 'raise KeyError("scales")' in raised
    assert stopped == "ranks that had not finished and were stopped: [0]"


def test_every_rank_that_raises_is_in_the_notes():
    def fn():
        time.sleep(0.2 * c10d.get_rank())
        raise ValueError(f"bad value on rank {c10d.get_rank()}")

    with pytest.raises(ValueError, match="bad value on rank 0") as caught:
        run_local(fn, 2)
    assert [note.split("\n")[0] for note in caught.value.__notes__] == [
        "rank 0 of 2 raised",
        "rank 1 of 2 raised",
    ]
    assert "bad value on rank 1" in caught.value.__notes__[1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_TwoPartError("lr", 3), "_TwoPartError: lr=3"),
        (SystemExit(4), "SystemExit: 4"),
        (KeyboardInterrupt("by hand"), "KeyboardInterrupt: by hand"),
    ],
)
def test_exception_that_cannot_be_raised_again_becomes_a_runtime_error(error, words):
    def fn():
        raise error

    with pytest.raises(RuntimeError, match=f"run_local: rank 0 raised {words}"):
        run_local(fn, 1)


def test_hang_is_a_timeout_error_that_shows_where():
    def stuck_in_a_collective():
        if c10d.get_rank() == 1:
            c10d.barrier()

    start = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"timeout=1 s, got no result from ranks \[1\]"
    ) as caught:
        run_local(stuck_in_a_collective, 3, timeout=1)
    assert time.monotonic() - start < 5
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1 stood at\n")
    assert "in barrier" in note
    assert note.endswith("in stuck_in_a_collective")


@pytest.mark.parametrize("meanwhile", [c10d.barrier, partial(time.sleep, 30)])
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "exited with code 3"),
    ],
)
def test_death_of_a_rank_is_an_error_at_once(end, words, meanwhile):
    def fn():
        end() if c10d.get_rank() == 1 else meanwhile()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"got rank 1 of 2 that {words}"):
        run_local(fn, 2)
    assert time.monotonic() - start < 10  # far from 30 s, and from the timeout


def test_crash_shows_where():
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RuntimeError, match="killed by SIGSEGV") as caught:
        run_local(crash, 1)
    assert "Segmentation fault" in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith("in crash")


def test_result_must_be_picklable():
    with pytest.raises(TypeError, match="run_local: a result must be picklable, got function"):
        run_local(lambda: lambda: 0, 1)


def test_num_ranks_must_be_positive():
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got num_ranks=0"):
        run_local(int, 0)


def test_a_rank_starts_no_ranks():
    with pytest.raises(RuntimeError, match="run_local: the caller must not be a rank itself"):
        run_local(lambda: run_local(int, 1), 1)


@pytest.mark.slow
def test_spawned_ranks_get_pickles(monkeypatch):
    monkeypatch.setattr(_run_local, "_can_fork", lambda: False)
    assert run_local(c10d.get_rank, 2) == [0, 1]
    with pytest.raises(TypeError) as caught:
        run_local(operator.add, 1, 1, "a")
    assert caught.value.__notes__[0].startswith("rank 0 of 1 raised\nTraceback")


def test_spawned_ranks_refuse_what_cannot_be_pickled(monkeypatch):
    monkeypatch.setattr(_run_local, "_can_fork", lambda: False)
    monkeypatch.setattr(_local_rank, "find_spec", lambda name: None)  # no cloudpickle
    with pytest.raises(TypeError, match="where ranks are spawned fn and args must be picklable"):
        run_local(lambda: 0, 1)


def test_spawned_ranks_name_what_they_cannot_import():
    call = _local_rank.pickled(_rank_and_sum)
    missing = call.replace(b"_rank_and_sum", b"_rank_and_sun")
    with pytest.raises(TypeError, match=r"got .*_rank_and_sun.*Define fn in a module"):
        _local_rank.call_pickled(missing)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can fork beside torch")
def test_ranks_are_forked_only_without_an_accelerator(monkeypatch):
    for available in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)  # noqa: B023
        assert _run_local._can_fork() is not available
