"""Functional sharding: parameters as DTensors, gathered when they are used.

A functional FSDP step is ``grad`` of ``loss ∘ all_gather``; the SUM reduction falls out of the
chain rule, since the transpose of ``all_gather`` is ``psum_scatter``.
"""

from typing import Any

import torch.distributed as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..pure import tree
from ._ranks import require_ranks
from .reduction import ReduceGrads, sum_replicated

__all__ = ["gather", "is_sharded", "shard", "sum_to_shards"]


def shard(params: Any, mesh: DeviceMesh) -> Any:
    """Give each rank its share of each leaf, cut along the first dimension.

    Args:
        params: a pytree of tensors, the same on all ranks.
        mesh: one-dimensional.

    Returns:
        The tree with DTensors as leaves, which torch.distributed.checkpoint saves and reshards.
        Leaves without a dimension are replicated.

    Examples:
        >>> mesh = init_device_mesh("cpu", (2,))                               # doctest: +SKIP
        >>> shard({"w": torch.zeros(4, 3)}, mesh)["w"].to_local().shape        # doctest: +SKIP
        torch.Size([2, 3])
    """
    return tree.map(lambda leaf: _cut(leaf, mesh), params)


def _cut(leaf: Tensor, mesh: DeviceMesh) -> Tensor:
    # Each rank cuts its own copy: no rank has to send its data.
    cut = distribute_tensor(leaf.detach(), mesh, _placements(leaf, mesh), src_data_rank=None)
    return cut.clone()  # where there was nothing to cut it shares memory


def _placements(leaf: Tensor, mesh: DeviceMesh) -> list[Any]:
    if mesh.ndim != 1:
        raise ValueError(f"shard: mesh must have one dimension, got {mesh.ndim}. Take mesh['dp'].")
    return [Shard(0) if leaf.dim() else Replicate()]


def gather(sharded: Any) -> Any:
    """The whole tensors of a tree of DTensors, on each rank; other leaves as they are."""
    return tree.map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, sharded)


def is_sharded(params: Any) -> bool:
    """Whether a leaf of the tree is a DTensor."""
    return any(isinstance(leaf, DTensor) for leaf in tree.leaves(params))


def sum_to_shards(like: Any, group: c10d.ProcessGroup) -> ReduceGrads:
    """Sum whole gradients of this rank into the shards of ``like``, a reduce-scatter for each.

    Raises:
        ValueError: the shards are cut over other ranks than those of ``group``.
    """
    leaves = [leaf for leaf in tree.leaves(like) if isinstance(leaf, DTensor)]
    for mesh in {leaf.device_mesh for leaf in leaves}:
        require_ranks("params from shard", mesh, group)

    def reduce(grads: Any, flag: Tensor) -> Any:
        pairs = zip(tree.leaves(grads), tree.leaves(like), strict=True)
        replicated = [grad for grad, leaf in pairs if not isinstance(leaf, DTensor)]
        sum_replicated(group)(replicated, flag)
        return tree.map(_to_shard, grads, like)

    return reduce


def _to_shard(grad: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return grad
    addend = DTensor.from_local(grad, like.device_mesh, [Partial()], run_check=False)
    return addend.redistribute(placements=like.placements)
