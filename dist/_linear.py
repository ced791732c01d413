"""Linear maps across ranks, which torch.func can differentiate and batch.

A map acts on the leading dimensions of a tensor, the ranks and the elements of a leaf: whatever
follows, such as the dimension of a vmap, it leaves alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..pure import tree as trees
from ..pure.tree import PyTree
from ._axis import Group

__all__ = [
    "apply_by_leaf",
    "exchange_over",
    "gather_over",
    "permute_over",
    "scatter_over",
    "sum_over",
]

Map = Callable[[Tensor], Tensor]

_ops = torch.ops._c10d_functional
"""torch's functional collectives, which give a fresh tensor."""


def apply_by_leaf(
    function: str,
    tree: PyTree,
    run: Map,
    transpose: Map,
    to_rows: Map,
    from_rows: Callable[[Tensor, Tensor], Tensor],
) -> PyTree:
    """``from_rows(run(to_rows(leaf)), leaf)`` of each leaf, leaves of one dtype joined in between.

    Rows are ``[n]``, or ``[num_ranks, n]`` where a leaf has a part for each rank.
    """
    leaves, structure = trees.flatten(tree)
    by_kind: dict[Any, dict[int, Tensor]] = {}
    for index, leaf in enumerate(leaves):
        try:
            rows = to_rows(_tensor(leaf))
        except (TypeError, ValueError) as error:
            name = trees.names(tree, "tree")[index]
            raise type(error)(f"{function}: {name} {error}") from None
        by_kind.setdefault((rows.dtype, rows.device), {})[index] = rows
    for kind in by_kind.values():
        rows = list(kind.values())
        result = _Linear.apply(torch.cat(rows, -1) if len(rows) > 1 else rows[0], run, transpose)
        parts = result.split([row.shape[-1] for row in rows], -1)
        for index, part in zip(kind, parts, strict=True):
            leaves[index] = from_rows(part, leaves[index])
    return trees.unflatten(structure, leaves)


def _tensor(leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise TypeError(f"must be a tensor, got {leaf!r}. Wrap numbers by torch.tensor.")
    return leaf


class _Linear(torch.autograd.Function):
    """``run(x)`` for a linear ``run`` over ranks that acts on leading dimensions only."""

    @staticmethod
    def forward(x: Tensor, run: Map, transpose: Map) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Map, Map], output: Tensor) -> None:
        _, ctx.run, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _Linear.apply(grad_outputs[0], ctx.transpose, ctx.run), None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> Tensor:
        return _Linear.apply(grad_inputs[0], ctx.run, ctx.transpose)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], *args: Any) -> tuple[Tensor, int]:
        x, run, transpose = args
        result = _Linear.apply(x.movedim(in_dims[0], -1), run, transpose)
        return result, result.ndim - 1


def sum_over(group: Group, x: Tensor) -> Tensor:
    """``[...] -> [...]``, the sum; its own transpose."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.name))


def gather_over(group: Group, x: Tensor) -> Tensor:
    """``[...] -> [num_ranks, ...]``, all ranks stacked; the transpose of ``scatter_over``."""
    gathered = _ops.all_gather_into_tensor(x.reshape(-1), group.size, group.name)
    return _ops.wait_tensor(gathered).reshape(group.size, *x.shape)


def scatter_over(group: Group, x: Tensor) -> Tensor:
    """``[num_ranks, ...] -> [...]``, this rank's part of the sum."""
    shard = _ops.reduce_scatter_tensor(x.reshape(-1), "sum", group.size, group.name)
    return _ops.wait_tensor(shard).reshape(x.shape[1:])


def exchange_over(group: Group, x: Tensor) -> Tensor:
    """``[num_ranks, ...] -> [num_ranks, ...]``, one part to each rank; its own transpose."""
    splits = [1] * group.size
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), splits, splits, group.name))


def permute_over(group: Group, perm: tuple[tuple[int, int], ...], x: Tensor) -> Tensor:
    """``[...] -> [...]``, from rank to rank; its transpose has the pairs of ``perm`` reversed."""
    # An all-to-all of which most parts are empty: no order of sends and receives can deadlock.
    sends = [x.numel() * ((group.rank, rank) in perm) for rank in range(group.size)]
    receives = [x.numel() * ((rank, group.rank) in perm) for rank in range(group.size)]
    sent = x.reshape(-1)[: sum(sends)]
    received = _ops.wait_tensor(_ops.all_to_all_single(sent, receives, sends, group.name))
    return received.reshape(x.shape) if any(receives) else torch.zeros_like(x)
