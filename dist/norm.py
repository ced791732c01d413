"""The global norm where gradients are shards: each element counted once."""

from collections import defaultdict

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..pure import optim
from .sharding import local_part

__all__ = ["sum_of_squares"]


def sum_of_squares(leaves: list[Tensor]) -> Tensor:
    """``Σ x²`` over all elements of all leaves, of which this rank may hold shards.

    For ``clip_by_global_norm(max_norm, sum_squares=sum_of_squares)``. Shards are summed over the
    mesh dimensions that they are cut along, in one all-reduce for each; replicas count once.

    Args:
        leaves: plain tensors, replicated, and DTensors, with the same layouts on all ranks.

    Returns:
        A float64 scalar, the same on all ranks.

    Raises:
        ValueError: a leaf is partial: its ranks hold addends, whose squares do not add up.

    Examples:
        >>> sum_of_squares([torch.tensor([3.0, 4.0])])
        tensor(25., dtype=torch.float64)
    """
    by_groups: dict[tuple[c10d.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for leaf in leaves:
        by_groups[_cut_over(leaf)].append(local_part(leaf))
    total = torch.zeros((), dtype=torch.float64)
    for groups, shards in by_groups.items():
        part = optim.sum_of_squares(shards)
        for group in groups:
            c10d.all_reduce(part, group=group)
        total = part + total.to(part.device)
    return total


def _cut_over(leaf: Tensor) -> tuple[c10d.ProcessGroup, ...]:
    """The groups over whose ranks the elements of a leaf are spread."""
    if not isinstance(leaf, DTensor):
        return ()
    if any(placement.is_partial() for placement in leaf.placements):
        raise ValueError(
            f"sum_of_squares: gradients must be reduced, got placements {leaf.placements}. "
            "Redistribute Partial to Replicate or Shard first."
        )
    # What is not a replica is a shard, of which DTensor has several kinds.
    cut = [dim for dim, each in enumerate(leaf.placements) if not each.is_replicate()]
    return tuple(leaf.device_mesh.get_group(dim) for dim in cut)
