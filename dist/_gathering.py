"""Shards that are gathered in each micro-step, so that no rank holds a whole gradient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..pure import LossFn, tree
from ._collectives import all_gather
from .sharding import num_owned

__all__ = ["gathering"]


def gathering(loss_fn: LossFn, like: Any, *, owned_over: Sequence[str] = ()) -> LossFn:
    """``loss_fn ∘ all_gather``, of this rank's parts.

    It has one collective for each leaf and mesh dimension that cuts it, and so has its transpose,
    which gives each rank the sum of the gradients at its own part. As often as ``loss_fn`` can be
    differentiated, so can this.

    Args:
        loss_fn: of whole tensors.
        like: the shards whose parts, by ``local``, this is a function of.
        owned_over: names of mesh dimensions along which leaves stay cut.
    """
    cuts = [_cuts(leaf, owned_over) for leaf in tree.leaves(like)]

    def loss_of_parts(parts: Any, batch: Any) -> Any:
        leaves, structure = tree.flatten(parts)
        whole = [_whole(leaf, of_leaf) for leaf, of_leaf in zip(leaves, cuts, strict=True)]
        return loss_fn(tree.unflatten(structure, whole), batch)

    return loss_of_parts


class _Cut(NamedTuple):
    """A dimension of a tensor that was dealt to the ranks of a group.

    Attributes:
        group: the ranks.
        dim: of the tensor.
        size: of all of them.
        dealt: to a rank; the last ones may have less.
    """

    group: c10d.ProcessGroup
    dim: int
    size: int
    dealt: int


def _cuts(leaf: Tensor, owned_over: Sequence[str]) -> list[_Cut]:
    """The cuts that are to be undone, the last one first."""
    if not isinstance(leaf, DTensor):
        return []
    mesh, sizes, cuts = leaf.device_mesh, list(leaf.shape), []
    for axis, (place, placement) in enumerate(zip(_here(mesh), leaf.placements, strict=True)):
        if isinstance(placement, Shard):
            dim, size = placement.dim, sizes[placement.dim]
            dealt = -(-size // mesh.size(axis))
            sizes[dim] = min(dealt, max(0, size - place * dealt))
            cuts.append(_Cut(mesh.get_group(axis), dim, size, dealt))
    return cuts[num_owned(leaf, owned_over) :][::-1]


def _here(mesh: DeviceMesh) -> Sequence[int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return coordinate


def _whole(part: Tensor, cuts: list[_Cut]) -> Tensor:
    # Leaf by leaf, as FSDP2 goes layer by layer: joined, all leaves would be in memory twice.
    for group, dim, size, dealt in cuts:
        part = all_gather(_pad(part, dim, dealt), group, dim=dim).narrow(dim, 0, size)
    return part


def _pad(part: Tensor, dim: int, size: int) -> Tensor:
    shape = list(part.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim) if shape[dim] else part
