"""What ``fit`` does about checkpoints: go on from the last, save now and then, stop when asked to.

On SIGTERM, which schedulers send some seconds before they kill, all ranks must stop after the same
window, whichever of them was told and when. So they ask each other after each window: one
all-reduce of one number between the hosts, over gloo also where tensors go over NCCL, so that no
host waits for its device. The hosts wait for each other there, as the devices do anyhow in the
window's own all-reduce.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d

from ._checkpoint_folder import latest
from ._ranks import group_device
from ._together import by_first
from .checkpoint import load, save

if TYPE_CHECKING:
    from .train import TrainState

__all__ = ["checkpointing", "resumed"]

Folder = str | os.PathLike[str]


def resumed(folder: Folder | None, state: "TrainState") -> tuple["TrainState", bool]:
    """The state of the last checkpoint, or ``state`` where there is none; whether there is one.

    Raises:
        ValueError: the checkpoint is not of a run that starts from ``state``.
    """
    last = None if folder is None else by_first(lambda: latest(folder))
    if last is None:
        return state, False
    loaded = load(last, state)[0]
    if loaded.step < state.step or loaded.carry is not None:
        within = "" if loaded.carry is None else ", within a window"
        raise ValueError(
            f"fit: checkpoints must be of this run and between windows, got {str(last)!r}{within} "
            f"for a state of step {state.step}. Give fit a folder of its own, and the state that "
            "the run starts from."
        )
    return loaded, True


@contextmanager
def checkpointing(
    folder: Folder | None, *, saved: int | None, save_every: int | None, keep: int | None
) -> Iterator[Callable[..., bool]]:
    """A function ``(state, *, last=False)`` that saves if it is time, and says whether to stop.

    Args:
        folder: None for never.
        saved: the step that is saved already.
        save_every: windows from checkpoint to checkpoint; None for the last alone.
        keep: how many checkpoints stay.
    """
    if folder is None:
        yield lambda state, *, last=False: False
        return
    with _stop_asked() as stop_asked:

        def checkpoint(state: "TrainState", *, last: bool = False) -> bool:
            nonlocal saved
            stop = not last and stop_asked()
            due = last or stop or (save_every is not None and state.step % save_every == 0)
            if due and saved != state.step:
                save(folder, state, keep=keep)
                saved = state.step
            return stop

        yield checkpoint


@contextmanager
def _stop_asked() -> Iterator[Callable[[], bool]]:
    """Whether some rank got SIGTERM since; all ranks call it and hear the same."""
    told = threading.Event()
    before: Any = None
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:  # elsewhere Python has no signals
        before = signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    try:
        with _group_of_hosts() as group:
            yield lambda: _any_rank(told.is_set(), group)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _group_of_hosts() -> Iterator[c10d.ProcessGroup | None]:
    """All ranks, over gloo; None where this is the only one."""
    world = c10d.group.WORLD if c10d.is_initialized() else None
    if world is None or group_device(world).type == "cpu":
        yield world
        return
    group = c10d.new_group(backend="gloo")
    assert isinstance(group, c10d.ProcessGroup)
    try:
        yield group
    finally:
        c10d.destroy_process_group(group)


def _any_rank(flag: bool, group: c10d.ProcessGroup | None) -> bool:
    if group is None:
        return flag
    flags = torch.tensor(int(flag))
    c10d.all_reduce(flags, c10d.ReduceOp.MAX, group=group)
    return bool(flags)
