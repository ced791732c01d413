"""A function on several gloo ranks of this machine, for notebooks and tests."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as c10d

__all__ = ["run_local"]

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long the other ranks may still report an error of their own after one has raised."""


class _Rank(NamedTuple):
    process: BaseProcess
    reports: Connection


class _Report(NamedTuple):
    """What a rank hands back: its result, or its exception with the traceback as text."""

    value: Any
    failure: str | None = None


def run_local(fn: Callable[..., T], num_ranks: int, *args: Any, timeout: float = 60.0) -> list[T]:
    """``[fn(*args) on rank r for r in range(num_ranks)]``, one process for each rank.

    Each rank has an initialised default process group (gloo, CPU), one torch thread, and the
    variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``. ``fn`` asks for its
    rank by ``torch.distributed.get_rank()``.

    On Linux without an accelerator the ranks are forked: they start in hundredths of a second,
    ``fn`` may be a lambda, a closure or a notebook's function, and it sees everything that the
    caller has, random state included. A rank must then stay with its one thread, since OpenMP's
    other threads do not survive a fork. Elsewhere the ranks are spawned, because neither CUDA nor
    the autograd threads of a machine that has it can be forked: each rank imports torch anew
    (seconds), a script needs ``if __name__ == "__main__":``, and ``fn`` and ``args`` are pickled,
    by cloudpickle if it is installed. ``CUDA_VISIBLE_DEVICES=""`` brings the forks back.

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
                _raise_timeout(ranks, reports, timeout, folder)
        finally:
            for rank in ranks:
                _stop(rank)
    return [reports[rank].value for rank in range(num_ranks)]


# ---- in the caller --------------------------------------------------------------------------


def _start(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, num_ranks: int, folder: str
) -> _Rank:
    context = multiprocessing.get_context(_start_method())
    call = partial(fn, *args)
    if context.get_start_method() != "fork":
        call = partial(_call_pickled, _pickled(call))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_rank, args=(call, rank, num_ranks, folder, sender))
    with sender, warnings.catch_warnings():
        # Python 3.12 warns of a fork beside other threads; what holds is in run_local's docstring.
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        process.start()
    return _Rank(process, receiver)


def _start_method() -> str:
    can_fork = sys.platform == "linux" and not torch.accelerator.is_available()
    return "fork" if can_fork else "spawn"


def _pickled(call: Callable[[], Any]) -> bytes:
    module = import_module("cloudpickle" if find_spec("cloudpickle") else "pickle")
    try:
        return module.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "run_local: fn and args must be picklable where ranks are spawned, got an error from "
            f"{module.__name__}: {error}. Define fn in a module, install cloudpickle, or set "
            'CUDA_VISIBLE_DEVICES="" to have the ranks forked.'
        ) from error


def _collect(ranks: list[_Rank], deadline: float) -> dict[int, _Report]:
    """The reports until all ranks have reported, one has died, or the time is up; as they came."""
    reports: dict[int, _Report] = {}
    waiting = {each.reports: rank for rank, each in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = waiting.pop(reader)  # pyright: ignore[reportArgumentType]
            report = _receive(ranks[rank])
            if report is None:  # what the others then say is only that a peer is gone
                return {rank: _death(ranks[rank].process, rank, len(ranks))}
            reports[rank] = report
            if report.failure:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return reports


def _receive(rank: _Rank) -> _Report | None:
    try:
        return pickle.loads(rank.reports.recv_bytes())
    except (EOFError, ConnectionError):
        return None


def _death(process: BaseProcess, rank: int, num_ranks: int) -> _Report:
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    failure = f"rank {rank} of {num_ranks} {how} before it returned"
    return _Report(RuntimeError(f"run_local: {failure}."), failure)


def _raise_failure(reports: dict[int, _Report], num_ranks: int) -> NoReturn:
    error = next(report.value for report in reports.values() if report.failure)
    for rank, report in sorted(reports.items()):
        if report.failure:
            error.add_note(report.failure)
    unfinished = [rank for rank in range(num_ranks) if rank not in reports]
    if unfinished:
        error.add_note(f"ranks that had not finished and were stopped: {unfinished}")
    raise error


def _raise_timeout(
    ranks: list[_Rank], reports: dict[int, _Report], timeout: float, folder: str
) -> NoReturn:
    unfinished = [rank for rank in range(len(ranks)) if rank not in reports]
    error = TimeoutError(
        f"run_local: {len(ranks)} ranks must finish within timeout={timeout:g} s, got no result "
        f"from ranks {unfinished}. Look for a collective that other ranks do not call, or give "
        "more time."
    )
    for rank in unfinished:
        error.add_note(f"rank {rank} stood at\n{_stack(ranks[rank].process, rank, folder)}")
    raise error


def _stack(process: BaseProcess, rank: int, folder: str) -> str:
    """Where a rank stands: it writes its stack on SIGUSR1, even if it is stuck outside Python."""
    path = _stack_path(folder, rank)
    if not (hasattr(faulthandler, "register") and path.exists() and process.pid):
        return "  (unknown)"
    os.kill(process.pid, signal.SIGUSR1)
    until = time.monotonic() + 0.5
    while time.monotonic() < until and "File" not in path.read_text():
        time.sleep(0.01)
    return path.read_text()


def _stack_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack_{rank}"


def _stop(rank: _Rank) -> None:
    rank.process.kill()
    rank.process.join()
    rank.process.close()
    rank.reports.close()


# ---- in a rank ------------------------------------------------------------------------------


def _run_rank(
    call: Callable[[], Any], rank: int, num_ranks: int, folder: str, sender: Connection
) -> NoReturn:
    """Run ``call`` as a rank, report, and wait for the caller to end this process.

    Waiting keeps the sockets open, so that no peer fails for the lack of a finished rank. The end
    comes by SIGKILL: gloo's teardown at exit, which sometimes aborts, never runs.
    """
    try:
        with open(_stack_path(folder, rank), "w") as stack:
            if hasattr(faulthandler, "register"):
                faulthandler.register(signal.SIGUSR1, stack)
            sender.send_bytes(pickle.dumps(_report(call, rank, num_ranks, folder)))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            caller = multiprocessing.parent_process()
            if caller is not None:
                caller.join()
    finally:
        os._exit(1)


def _report(call: Callable[[], Any], rank: int, num_ranks: int, folder: str) -> _Report:
    try:
        _join_ranks(rank, num_ranks, folder)
        return _picklable(call())
    except BaseException as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        failure = f"rank {rank} of {num_ranks} raised\n{text}"
        return _Report(_rebuildable(error, rank), failure)


def _join_ranks(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    if sys.platform == "linux":  # without it gloo asks the resolver for this machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = c10d.FileStore(str(Path(folder) / "store"), num_ranks)
    c10d.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def _picklable(value: Any) -> _Report:
    try:
        pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"run_local: a result must be picklable, got {type(value).__name__} ({error}). "
            "Return tensors, numbers, strings or trees of them."
        ) from error
    return _Report(value)


def _rebuildable(error: BaseException, rank: int) -> BaseException:
    """``error`` where pickle can copy it and the caller can survive it, else a RuntimeError."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if type(copy) is type(error) and not isinstance(error, (SystemExit, KeyboardInterrupt)):
        return error
    return RuntimeError(f"run_local: rank {rank} raised {type(error).__name__}: {error}")


def _call_pickled(call: bytes) -> Any:
    try:
        fn = pickle.loads(call)
    except (AttributeError, ImportError) as error:
        raise TypeError(
            f"run_local: fn must be importable where ranks are spawned, got {error}. Define fn in a "
            'module, install cloudpickle, or set CUDA_VISIBLE_DEVICES="" to have the ranks forked.'
        ) from error
    return fn()
