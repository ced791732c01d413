"""Which ranks a window is summed over, and how they tell each other what went wrong."""

import os
import pickle
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..pure import EmptyWindowError, NonFiniteLossError, PlanError, TermStructureError
from ._axis import process_group_of

__all__ = [
    "RankError",
    "Report",
    "data_group",
    "gather_reports",
    "group_device",
    "is_of_connection",
    "raise_reports",
    "report_of",
    "require_ranks",
]

_SHARED_ERRORS = {
    error.__name__: error
    for error in (EmptyWindowError, NonFiniteLossError, PlanError, TermStructureError)
}

_LOST = "this rank lost the connection to another, whose process may have ended"
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")

Report = tuple[str | None, str | None, Any]
"""Of one rank: the name of the error's type, its text, and the structure of its sums."""


class RankError(RuntimeError):
    """A loss function or a window raised on some rank. Every rank raises this, in one window."""


def data_group(
    mesh: DeviceMesh | None = None, group: c10d.ProcessGroup | None = None
) -> c10d.ProcessGroup | None:
    """The ranks that sums are reduced over: those of ``group`` or of the whole ``mesh``.

    Returns:
        The group; all ranks where neither is given; None where there are no other ranks.

    Raises:
        ValueError: both are given, or this rank is not in the one that is.
        RuntimeError: a launcher started several ranks, but no process group was made.
    """
    if mesh is not None and group is not None:
        raise ValueError("window: give mesh or group, got both.")
    if mesh is None and group is None and not c10d.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"window: ranks need a process group, got none and WORLD_SIZE="
                f"{os.environ['WORLD_SIZE']}. Call torch.distributed.init_process_group first."
            )
        return None
    return process_group_of("window", mesh if group is None else group)


def require_ranks(
    what: str, mesh: DeviceMesh, group: c10d.ProcessGroup, *, or_more: bool = False
) -> None:
    """Raise unless ``what`` is summed over the ranks that the loss is summed over.

    Args:
        what: for the message.
        mesh: the ranks that ``what`` is on.
        group: the ranks of the window.
        or_more: whether ``mesh`` may have more ranks than the window.
    """
    has, needs = set(mesh.mesh.flatten().tolist()), set(c10d.get_process_group_ranks(group))
    if has != needs and not (or_more and has > needs):
        raise ValueError(
            f"window_grad: {what} must be on the ranks of the window, got ranks {sorted(has)} for "
            f"a window over {sorted(needs)}: its gradient would be the sum over other ranks than "
            "the loss. Give window_grad the mesh that they are on."
        )


def report_of(error: Exception | None, structure: Any = None) -> Report:
    """What this rank says of itself."""
    if error is None:
        return None, None, structure
    if is_of_connection(error):
        return "ConnectionError", f"ConnectionError: {_LOST}", structure
    name = type(error).__name__
    text = str(error) if name in _SHARED_ERRORS else f"{name}: {error}"
    return name, text, structure


def is_of_connection(error: Exception) -> bool:
    """Whether a collective failed since a process that takes part is gone.

    gloo says so by a plain RuntimeError, from which only its text tells it.
    """
    said = str(error)
    return isinstance(error, c10d.DistError) or any(each in said for each in _BROKEN)


def gather_reports(
    own: Report, group: c10d.ProcessGroup, cause: Exception | None = None
) -> dict[int, Report]:
    """All ranks' reports, by rank among all there are, if none of them is of an error."""
    gathered: list[Any] = [None] * group.size()
    c10d.all_gather_object(gathered, _picklable(own), group=group)
    by_rank = dict(zip(c10d.get_process_group_ranks(group), gathered, strict=True))
    raise_reports(by_rank, cause)
    return by_rank


def _picklable(own: Report) -> Report:
    """``own``, without the structure of sums that cannot travel: no rank may stay behind here."""
    try:
        pickle.dumps(own)
    except Exception as error:
        name, text, _ = own
        if name or text:
            return name, text, None
        return report_of(
            TypeError(
                f"the trees of sums must be picklable, to tell other ranks of them, got {error}. "
                "Use dicts, or define the class in a module."
            )
        )
    return own


def raise_reports(reports: Mapping[int, Report], cause: Exception | None = None) -> None:
    """Raise the one error that all ranks raise, if any of ``reports``, by rank, is of an error."""
    failed = {rank: (name, text) for rank, (name, text, _) in reports.items() if name}
    if not failed:
        return
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for rank, (_, text) in failed.items():
        ranks_by_text[str(text)].append(rank)
    everywhere = len(ranks_by_text) == 1 and len(failed) == len(reports) > 1
    texts = "; ".join(
        text if everywhere else f"{text} (rank {', '.join(map(str, ranks))})"
        for text, ranks in ranks_by_text.items()
    )
    names = {name for name, _ in failed.values()}
    kind = _SHARED_ERRORS.get(names.pop(), RankError) if len(names) == 1 else RankError
    if kind is RankError:
        texts = f"window: a rank failed: {texts}. Nothing was updated on any rank."
    raise kind(texts) from cause


def group_device(group: c10d.ProcessGroup) -> torch.device:
    """The kind of device whose tensors the group reduces."""
    backend = c10d.get_backend(group)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl"
        else torch.device("cpu")
    )
