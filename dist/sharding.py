"""Functional sharding: parameters as DTensors, gathered when they are used.

A functional FSDP step is ``grad`` of ``loss ∘ all_gather``; the SUM reduction falls out of the
chain rule, since the transpose of ``all_gather`` is ``psum_scatter``.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ..pure import tree
from ._data_axes import dim_names

__all__ = ["gather", "is_sharded", "local", "local_part", "num_owned", "scatter", "shard", "wrap"]


def shard(params: Any, mesh: DeviceMesh) -> Any:
    """Give each rank its share of each leaf, cut along the first dimension.

    Over a mesh of several dimensions a leaf is cut along each, the first one first, where one of
    its dimensions divides evenly: experts that are owned over ``ep`` and sharded over ``fsdp`` are
    ``shard(experts, mesh["ep", "fsdp"])``.

    Args:
        params: a pytree of tensors, the same on all ranks.
        mesh: the ranks that share.

    Returns:
        The tree with DTensors as leaves, which torch.distributed.checkpoint saves and reshards.
        What is not cut along a mesh dimension is replicated there.

    Examples:
        >>> mesh = init_device_mesh("cpu", (2,))                               # doctest: +SKIP
        >>> shard({"w": torch.zeros(4, 3)}, mesh)["w"].to_local().shape        # doctest: +SKIP
        torch.Size([2, 3])
    """
    return tree.map(lambda leaf: _cut(leaf, mesh), params)


def _cut(leaf: Tensor, mesh: DeviceMesh) -> Tensor:
    placements = _placements(tuple(leaf.shape), tuple(mesh.shape))
    # Each rank cuts its own copy: no rank has to send its data.
    cut = distribute_tensor(leaf.detach(), mesh, placements, src_data_rank=None)
    return cut.clone()  # where there was nothing to cut it shares memory


def _placements(shape: tuple[int, ...], num_ranks: tuple[int, ...]) -> list[Placement]:
    """One cut for each mesh dimension, where it is even; a single one need not be.

    torch 2.13 gathers uneven cuts of one dimension over two of a mesh that was also flattened in a
    wrong order.
    """
    if not shape:
        return [Replicate()] * len(num_ranks)
    if len(num_ranks) == 1:
        return [Shard(0)]
    sizes, placements = list(shape), []
    for num in num_ranks:
        dim = next((dim for dim, size in enumerate(sizes) if size and not size % num), None)
        placements.append(Replicate() if dim is None else Shard(dim))
        if dim is not None:
            sizes[dim] //= num
    return placements


def is_sharded(params: Any) -> bool:
    """Whether a leaf of the tree is a DTensor."""
    return any(isinstance(leaf, DTensor) for leaf in tree.leaves(params))


def gather(sharded: Any, *, owned_over: str | Sequence[str] = ()) -> Any:
    """The whole tensors of a tree of DTensors, on each rank; other leaves as they are.

    Args:
        sharded: from ``shard``.
        owned_over: names of mesh dimensions along which leaves stay cut.
    """
    return tree.map(lambda leaf: _gathered(leaf, owned_over), sharded)


def _gathered(leaf: Tensor, owned_over: str | Sequence[str]) -> Tensor:
    if not isinstance(leaf, DTensor):
        return leaf
    owned = leaf.placements[: num_owned(leaf, owned_over)]
    whole = [Replicate()] * (leaf.device_mesh.ndim - len(owned))
    return leaf.redistribute(placements=[*owned, *whole]).to_local()


def num_owned(leaf: DTensor, owned_over: str | Sequence[str]) -> int:
    """How many leading mesh dimensions a leaf is cut along and stays so."""
    owned = dim_names(owned_over)
    names = leaf.device_mesh.mesh_dim_names or ()
    dims = [
        dim
        for dim, name in enumerate(names)
        if name in owned and not leaf.placements[dim].is_replicate()
    ]
    if dims != list(range(len(dims))):
        raise ValueError(
            "window_grad: the dimensions that parameters are owned over must come first in their "
            f"mesh, got owned_over={owned} of {names}. Take mesh['ep', 'fsdp']."
        )
    return len(dims)


def local(sharded: Any) -> Any:
    """This rank's part of each leaf; leaves that are no DTensors as they are."""
    return tree.map(local_part, sharded)


def local_part(leaf: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor whole."""
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def wrap(parts: Any, like: Any) -> Any:
    """Parts as DTensors like those of another tree: the inverse of ``local``."""

    def to_dtensor(part: Tensor, leaf: Tensor) -> Tensor:
        return _dtensor(part, leaf, leaf.placements) if isinstance(leaf, DTensor) else part

    return tree.map(to_dtensor, parts, like)


def scatter(addends: Any, like: Any, *, owned_over: str | Sequence[str] = ()) -> Any:
    """The sum of whole tensors over ranks, of which each keeps its shard: transposed ``gather``.

    Args:
        addends: a tree of tensors as ``gather`` makes them.
        like: the shards that were gathered. Leaves that are no DTensors, and the dimensions along
            which a leaf is replicated, are not summed.
        owned_over: as given to ``gather``.
    """

    def to_shard(addend: Tensor, leaf: Tensor) -> Tensor:
        if not isinstance(leaf, DTensor):
            return addend
        owned = num_owned(leaf, owned_over)
        before = [
            placement if dim < owned or placement.is_replicate() else Partial()
            for dim, placement in enumerate(leaf.placements)
        ]
        return _dtensor(addend, leaf, before).redistribute(placements=leaf.placements)

    return tree.map(to_shard, addends, like)


def _dtensor(part: Tensor, like: DTensor, placements: Sequence[Any]) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
