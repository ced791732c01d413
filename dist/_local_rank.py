"""One rank of ``run_local``: the process that runs the function and reports."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as c10d

__all__ = ["Report", "call_pickled", "pickled", "run_rank", "stack_path"]


class Report(NamedTuple):
    """What a rank hands back: its result, or its exception with the traceback as text."""

    value: Any
    failure: str | None = None


def run_rank(
    call: Callable[[], Any], rank: int, num_ranks: int, folder: str, sender: Any
) -> NoReturn:
    """Run ``call`` as a rank, report, and wait for the caller to end this process.

    Waiting keeps the sockets open, so that no peer fails for the lack of a finished rank. The end
    comes by SIGKILL: gloo's teardown at exit, which sometimes aborts, never runs.
    """
    try:
        with open(stack_path(folder, rank), "w") as stack:
            faulthandler.enable(stack)
            if hasattr(faulthandler, "register"):
                faulthandler.register(signal.SIGUSR1, stack)
            report = _report(call, rank, num_ranks, folder)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            sender.send_bytes(report)
            caller = multiprocessing.parent_process()
            if caller is not None:
                caller.join()
    finally:
        os._exit(1)


def _report(call: Callable[[], Any], rank: int, num_ranks: int, folder: str) -> bytes:
    try:
        _join_ranks(rank, num_ranks, folder)
        return _packed(call())
    except BaseException as error:
        below = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, below)).rstrip()
        failure = f"rank {rank} of {num_ranks} raised\n{text}"
        return pickle.dumps(Report(_rebuildable(error, rank), failure))


def _join_ranks(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    if sys.platform == "linux":  # without it gloo asks the resolver for this machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A file has no port that another process could take in between.
    meeting = (Path(folder) / "store").as_uri()
    c10d.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(Report(value))
    except Exception as error:
        raise TypeError(
            f"run_local: a result must be picklable, got {type(value).__name__} ({error}). "
            "Return tensors, numbers, strings or trees of them."
        ) from error


def _rebuildable(error: BaseException, rank: int) -> BaseException:
    """``error`` where pickle can copy it and the caller can survive it, else a RuntimeError."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if type(copy) is type(error) and not isinstance(error, (SystemExit, KeyboardInterrupt)):
        return error
    return RuntimeError(f"run_local: rank {rank} raised {type(error).__name__}: {error}")


def stack_path(folder: str, rank: int) -> Path:
    """Where a rank writes its stack on SIGUSR1 and when it crashes."""
    return Path(folder) / f"stack_{rank}"


def pickled(call: Callable[[], Any]) -> bytes:
    """``call`` for a process that shares nothing with this one; ``call_pickled`` calls it."""
    module = import_module("cloudpickle" if find_spec("cloudpickle") else "pickle")
    try:
        return module.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_picklable(error) from error


def _not_picklable(error: Exception) -> TypeError:
    return TypeError(
        f"run_local: where ranks are spawned fn and args must be picklable, got {error}. Define fn "
        'in a module, install cloudpickle, or set CUDA_VISIBLE_DEVICES="" to have the ranks forked.'
    )


def call_pickled(call: bytes) -> Any:
    """Call what ``pickled`` packed."""
    try:
        fn = pickle.loads(call)
    except (AttributeError, ImportError) as error:
        raise _not_picklable(error) from error
    return fn()
