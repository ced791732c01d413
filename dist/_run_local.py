"""A function on several gloo ranks of this machine, for notebooks and tests."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as c10d

from ._local_rank import Report, call_pickled, pickled, run_rank, stack_path

__all__ = ["run_local"]

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long the other ranks may still report an error of their own after one has raised."""

END_OF_STACK = " in _report\n"
"""In ``_local_rank._report``. What called that is the same for all ranks."""


class _Rank(NamedTuple):
    process: BaseProcess
    reports: Any  # the reading end of a pipe, whose type depends on the system
    stack: Path


def run_local(fn: Callable[..., T], num_ranks: int, *args: Any, timeout: float = 60.0) -> list[T]:
    """``[fn(*args) on rank r for r in range(num_ranks)]``, one process for each rank.

    Each rank has an initialised default process group (gloo, CPU), one torch thread, and the
    variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``. ``fn`` asks for its
    rank by ``torch.distributed.get_rank()``.

    On Linux without an accelerator the ranks are forked: they start in hundredths of a second,
    ``fn`` may be a lambda, a closure or a notebook's function, and it sees everything that the
    caller has, random state included. A rank must then stay with its one thread, since OpenMP's
    other threads do not survive a fork. What ``fn`` is the first to import, each rank imports
    anew at each call: better import it in the caller.

    Elsewhere the ranks are spawned, because neither CUDA nor the autograd threads of a machine that
    has it can be forked: each rank imports torch anew (seconds), a script needs
    ``if __name__ == "__main__":``, and ``fn`` and ``args`` are pickled, by cloudpickle if it is
    installed. ``CUDA_VISIBLE_DEVICES=""`` brings the forks back.

    Args:
        fn: what each rank runs; its result must be picklable.
        num_ranks: number of ranks; may exceed the number of cores.
        *args: arguments of ``fn``, the same for all ranks.
        timeout: seconds until the ranks that have not finished are stopped.

    Returns:
        The results in the order of ranks. They are handed back before anything is torn down.

    Raises:
        TimeoutError: some rank did not finish; the notes show where each of them stood.
        RuntimeError: a rank died of a signal or by an exit, or the caller has a process group.
        TypeError: ``fn`` or a result cannot be pickled.
        Exception: what a rank raised, of the same type where it can be pickled. The notes name
            each rank that raised, with its traceback.

    Examples:
        >>> import torch.distributed as c10d
        >>> run_local(lambda factor: factor * c10d.get_rank(), 3, 10)
        [0, 10, 20]
    """
    if num_ranks < 1:
        raise ValueError(f"run_local: num_ranks must be at least 1, got num_ranks={num_ranks}.")
    if c10d.is_initialized():
        raise RuntimeError(
            "run_local: the caller must not be a rank itself, got an initialised process group. "
            "Call it before init_process_group, or after destroy_process_group."
        )
    with tempfile.TemporaryDirectory(prefix="run_local_") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                ranks.append(_start(fn, args, rank, num_ranks, folder))
            reports = _collect(ranks, time.monotonic() + timeout)
            if any(report.failure for report in reports.values()):
                _raise_failure(reports, num_ranks)
            if len(reports) < num_ranks:
                _raise_timeout(ranks, reports, timeout)
        finally:
            _stop(ranks)
    return [reports[rank].value for rank in range(num_ranks)]


def _start(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, num_ranks: int, folder: str
) -> _Rank:
    if _can_fork():
        # DDP, torch.optim and torch.func over an autograd.Function import it when first used, which
        # takes each rank two seconds, at each call. Here it takes them once.
        import_module("torch._dynamo")
        context, call = multiprocessing.get_context("fork"), partial(fn, *args)
    else:
        context = multiprocessing.get_context("spawn")
        call = partial(call_pickled, pickled(partial(fn, *args)))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_rank, args=(call, rank, num_ranks, folder, sender))
    with sender, warnings.catch_warnings():
        # Python 3.12 warns of a fork beside other threads; what holds is in run_local's docstring.
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        process.start()
    return _Rank(process, receiver, stack_path(folder, rank))


def _can_fork() -> bool:
    return sys.platform == "linux" and not torch.accelerator.is_available()


def _collect(ranks: list[_Rank], deadline: float) -> dict[int, Report]:
    """The reports until all ranks have reported, one has died, or the time is up; as they came."""
    reports: dict[int, Report] = {}
    while len(reports) < len(ranks):
        waiting = {rank: each.reports for rank, each in enumerate(ranks) if rank not in reports}
        ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, reader in waiting.items() if reader in ready]:
            report = _receive(ranks[rank])
            if report is None:  # the first in line: the others only say that a peer is gone
                return {rank: _death(ranks[rank], rank, len(ranks)), **reports}
            reports[rank] = report
            if report.failure:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return reports


def _receive(rank: _Rank) -> Report | None:
    try:
        return pickle.loads(rank.reports.recv_bytes())
    except (EOFError, ConnectionError):
        return None


def _death(dead: _Rank, rank: int, num_ranks: int) -> Report:
    dead.process.join()
    code = dead.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    error = RuntimeError(
        f"run_local: each rank must return or raise, got rank {rank} of {num_ranks} that {how}. "
        "SIGKILL is often the system out of memory; for the rest run fn in one process."
    )
    return Report(error, f"rank {rank} of {num_ranks} {how}\n{_stack(dead)}".rstrip())


def _raise_failure(reports: dict[int, Report], num_ranks: int) -> NoReturn:
    error = next(report.value for report in reports.values() if report.failure)
    for rank in sorted(reports):
        if reports[rank].failure:
            error.add_note(reports[rank].failure)
    unfinished = [rank for rank in range(num_ranks) if rank not in reports]
    if unfinished:
        error.add_note(f"ranks that had not finished and were stopped: {unfinished}")
    raise error


def _raise_timeout(ranks: list[_Rank], reports: dict[int, Report], timeout: float) -> NoReturn:
    unfinished = [rank for rank in range(len(ranks)) if rank not in reports]
    error = TimeoutError(
        f"run_local: {len(ranks)} ranks must finish within timeout={timeout:g} s, got no result "
        f"from ranks {unfinished}. Look for a collective that other ranks do not call, or give "
        "more time."
    )
    for rank in unfinished:
        _write_stack(ranks[rank])
        error.add_note(f"rank {rank} stood at\n{_stack(ranks[rank])}")
    raise error


def _write_stack(rank: _Rank) -> None:
    """Have a rank write where it stands, which it does on SIGUSR1 even if stuck outside Python."""
    if not (hasattr(faulthandler, "register") and rank.stack.exists() and rank.process.pid):
        return
    os.kill(rank.process.pid, signal.SIGUSR1)
    until = time.monotonic() + 0.5
    while time.monotonic() < until and END_OF_STACK not in rank.stack.read_text():
        time.sleep(0.01)


def _stack(rank: _Rank) -> str:
    text = rank.stack.read_text() if rank.stack.exists() else ""
    return text.partition(END_OF_STACK)[0].rpartition("\n")[0] if END_OF_STACK in text else text


def _stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.reports.close()
