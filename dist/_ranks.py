"""Which ranks a window is summed over, and how they tell each other what went wrong."""

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..pure import EmptyWindowError, NonFiniteLossError, PlanError, TermStructureError

__all__ = ["RankError", "Report", "data_group", "group_device", "raise_reports", "report_of"]

_SHARED_ERRORS = {
    error.__name__: error
    for error in (EmptyWindowError, NonFiniteLossError, PlanError, TermStructureError)
}

Report = tuple[str | None, str | None, Any]
"""Of one rank: the name of the error's type, its text, and the structure of its sums."""


class RankError(RuntimeError):
    """A loss function raised on some rank. Every rank raises this, in the same window."""


def data_group(
    mesh: DeviceMesh | None = None, group: c10d.ProcessGroup | None = None
) -> c10d.ProcessGroup | None:
    """The ranks that sums are reduced over: those of ``group`` or of the whole ``mesh``.

    Returns:
        The group; all ranks where neither is given; None where there are no other ranks.

    Raises:
        ValueError: both are given.
        RuntimeError: a launcher started several ranks, but no process group was made.
    """
    if mesh is not None and group is not None:
        raise ValueError("window_grad: give mesh or group, got both.")
    if group is not None:
        return group
    if mesh is not None:
        return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    if c10d.is_initialized():
        return c10d.group.WORLD
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"window_grad: WORLD_SIZE={os.environ['WORLD_SIZE']} but no process group. Call "
            "torch.distributed.init_process_group first."
        )
    return None


def report_of(error: Exception | None, structure: Any = None) -> Report:
    """What this rank says of itself."""
    if error is None:
        return None, None, structure
    name = type(error).__name__
    text = str(error) if name in _SHARED_ERRORS else f"{name}: {error}"
    return name, text, structure


def raise_reports(reports: Sequence[Report], cause: Exception | None = None) -> None:
    """Raise the one error that all ranks raise, if any of them reported one."""
    failed = [(rank, name, text) for rank, (name, text, _) in enumerate(reports) if name]
    if not failed:
        return
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for rank, _, text in failed:
        ranks_by_text[str(text)].append(rank)
    everywhere = len(ranks_by_text) == 1 and len(failed) == len(reports) > 1
    texts = "; ".join(
        text if everywhere else f"{text} (rank {', '.join(map(str, ranks))})"
        for text, ranks in ranks_by_text.items()
    )
    names = {name for _, name, _ in failed}
    kind = _SHARED_ERRORS.get(names.pop(), RankError) if len(names) == 1 else RankError
    if kind is RankError:
        texts = f"window_grad: the loss failed: {texts}. Nothing was updated on any rank."
    raise kind(texts) from cause


def group_device(group: c10d.ProcessGroup) -> torch.device:
    """The kind of device whose tensors the group reduces."""
    backend = c10d.get_backend(group)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl"
        else torch.device("cpu")
    )
