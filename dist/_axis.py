"""The ranks that a collective runs over."""

from typing import NamedTuple

import torch.distributed as c10d
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axis", "Group", "group_of", "process_group_of"]

Axis = ProcessGroup | DeviceMesh | None
"""``mesh["dp"]``, ``mesh["dp", "cp"]``, a process group, or None for all ranks."""


class Group(NamedTuple):
    """What a collective needs to know of its ranks."""

    name: str
    size: int
    rank: int


def group_of(function: str, axis: Axis) -> Group:
    """The ranks of ``axis``; see ``process_group_of``."""
    group = process_group_of(function, axis)
    return Group(group.group_name, group.size(), group.rank())


def process_group_of(function: str, axis: Axis) -> ProcessGroup:
    """The group of ``axis``; that of a mesh of several dimensions in row-major order.

    Args:
        function: who asks, for the messages.
        axis: a process group; a mesh or a slice of one by names of its dimensions; or None.

    Raises:
        ValueError: there is no process group, or this rank is not in it.
        TypeError: ``axis`` is of another kind.
    """
    if not c10d.is_initialized():
        raise ValueError(
            f"{function}: ranks need a process group, got none initialised. Start the ranks by "
            "run_local, or by torchrun and torch.distributed.init_process_group."
        )
    group = _process_group(function, axis)
    if group is None:
        raise ValueError(
            f"{function}: this rank must belong to axis, got rank {c10d.get_rank()} outside of "
            "it. Call it on the ranks of axis only."
        )
    return group


def _process_group(function: str, axis: Axis) -> ProcessGroup | None:
    if axis is None:
        return c10d.group.WORLD
    if isinstance(axis, ProcessGroup):
        return axis
    if isinstance(axis, DeviceMesh):
        if axis.get_coordinate() is None:
            return None
        # torch keeps the group of a flattened mesh, so that it is made once.
        return (axis if axis.ndim == 1 else axis._flatten()).get_group()
    if axis == c10d.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to ranks outside
        return None
    raise TypeError(
        f"{function}: axis must be a ProcessGroup, a DeviceMesh or None, got {axis!r}. "
        'Slice a mesh by the names of its dimensions: mesh["dp"].'
    )
