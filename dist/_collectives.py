"""Collectives that torch.func can differentiate and batch.

Each is a linear map of the values of all ranks, stacked, and its derivative is its transpose:

===================  ================================  ===================
collective           result on rank ``r``              transpose
===================  ================================  ===================
``psum(x)``          ``sum_s x_s``                     ``psum``
``all_gather(x)``    ``concat_s x_s``                  ``psum_scatter``
``psum_scatter(x)``  ``sum_s x_s[r]``                  ``all_gather``
``all_to_all(x)``    ``concat_s x_s[r]``               ``all_to_all``, dims swapped
``ppermute(x)``      ``x_s`` for ``(s, r)`` in perm    ``ppermute``, inverse
===================  ================================  ===================

So a rank differentiates its own addend of a loss that is the sum over ranks: with
``y = collective(x)``, the gradient at ``x_s`` is that of ``sum_r loss_r(y_r)``. A loss that all
ranks compute alike counts once per rank. Do not ``psum`` a loss before differentiating it.

All ranks must take the same derivatives of the same collectives in the same order, as they must
call them: an ``x`` that needs a gradient on one rank needs one on all, and so does a result that
enters the loss.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..pure.tree import PyTree
from ._axis import Axis, group_of
from ._linear import apply_by_leaf, exchange_over, gather_over, permute_over, scatter_over, sum_over

__all__ = ["all_gather", "all_to_all", "ppermute", "psum", "psum_scatter"]


def psum(tree: PyTree, axis: Axis = None) -> PyTree:
    """The sum of each leaf over the ranks of ``axis``, on each of them.

    Leaves of one dtype travel together. Booleans are counted, in int64.

    Args:
        tree: a pytree of tensors, of the same structure and shapes on all ranks.
        axis: ``mesh["dp"]``, ``mesh["dp", "cp"]``, a process group, or None for all ranks.

    Raises:
        ValueError: there is no process group, or this rank is not in it.
        TypeError: a leaf is no tensor.

    Examples:
        >>> import torch.distributed as c10d
        >>> from numden.dist import run_local
        >>> run_local(lambda: psum({"n": torch.tensor(c10d.get_rank() + 1)}), 2)
        [{'n': tensor(3)}, {'n': tensor(3)}]

        Each rank's loss is its own addend, so the gradient of their sum at its ``x`` has the
        cotangents of all ranks:

        >>> def grad_of_addend(x):
        ...     weight = c10d.get_rank() + 1.0
        ...     return torch.func.grad(lambda x: weight * psum(x))(x)
        >>> run_local(grad_of_addend, 2, torch.tensor(5.0))
        [tensor(3.), tensor(3.)]
    """
    group = group_of("psum", axis)
    run = partial(sum_over, group)
    return apply_by_leaf("psum", tree, run, run, lambda leaf: _summable(leaf).reshape(-1), _like)


def all_gather(tree: PyTree, axis: Axis = None, *, dim: int = 0) -> PyTree:
    """Each leaf of all ranks of ``axis``, concatenated along ``dim`` in the order of ranks.

    What ``jax.lax.all_gather(..., tiled=True)`` does. To stack instead, gather ``x[None]``.

    Args:
        tree: a pytree of tensors ``[..., n, ...]``, of the same shapes on all ranks.
        axis: ``mesh["dp"]``, ``mesh["dp", "cp"]``, a process group, or None for all ranks.
        dim: the dimension that grows.

    Returns:
        The tree of ``[..., num_ranks * n, ...]``. Its transpose is ``psum_scatter``.

    Raises:
        ValueError: a leaf has no ``dim``, there is no process group, or this rank is not in it.
        TypeError: a leaf is no tensor.

    Examples:
        A step of functionally sharded data parallelism is the gradient of loss ∘ all_gather. Each
        rank holds a shard of ``w`` and a row of the batch, and gets the gradient of the whole
        batch's sum at its shard:

        >>> import torch.distributed as c10d
        >>> from numden.dist import run_local
        >>> w, batch = torch.tensor([2.0, 3.0]), torch.tensor([[1.0, 1.0], [10.0, 0.0]])
        >>> def step():
        ...     shard, row = w[c10d.get_rank()][None], batch[c10d.get_rank()]
        ...     return torch.func.grad(lambda shard: row @ all_gather(shard))(shard)
        >>> run_local(step, 2)
        [tensor([11.]), tensor([1.])]
    """
    group = group_of("all_gather", axis)

    def flat(leaf: Tensor) -> Tensor:
        _check_dim(leaf, dim)
        return leaf.reshape(-1)

    def concat(part: Tensor, leaf: Tensor) -> Tensor:
        return _join(part.reshape(group.size, *leaf.shape), dim % leaf.ndim)

    run, transpose = partial(gather_over, group), partial(scatter_over, group)
    return apply_by_leaf("all_gather", tree, run, transpose, flat, concat)


def psum_scatter(tree: PyTree, axis: Axis = None, *, dim: int = 0) -> PyTree:
    """The sum of each leaf over the ranks of ``axis``, of which each keeps its part of ``dim``.

    What ``jax.lax.psum_scatter(..., tiled=True)`` does. Booleans are counted, in int64.

    Args:
        tree: a pytree of tensors ``[..., num_ranks * n, ...]``, of the same shapes on all ranks.
        axis: ``mesh["dp"]``, ``mesh["dp", "cp"]``, a process group, or None for all ranks.
        dim: the dimension that is scattered.

    Returns:
        The tree of ``[..., n, ...]``. Its transpose is ``all_gather``.

    Raises:
        ValueError: ``num_ranks`` does not divide ``dim``, there is no process group, or this rank
            is not in it.
        TypeError: a leaf is no tensor.

    Examples:
        >>> import torch.distributed as c10d
        >>> from numden.dist import run_local
        >>> run_local(lambda: psum_scatter(torch.tensor([1, 2, 3, 4])), 2)
        [tensor([2, 4]), tensor([6, 8])]
    """
    group = group_of("psum_scatter", axis)

    def rows(leaf: Tensor) -> Tensor:
        return _cut(_summable(leaf), dim, group.size).flatten(1)

    def shard(part: Tensor, leaf: Tensor) -> Tensor:
        return part.reshape(_cut(leaf, dim, group.size).shape[1:])

    run, transpose = partial(scatter_over, group), partial(gather_over, group)
    return apply_by_leaf("psum_scatter", tree, run, transpose, rows, shard)


def all_to_all(
    tree: PyTree, axis: Axis = None, *, split_dim: int = 0, concat_dim: int = 0
) -> PyTree:
    """Each leaf cut along ``split_dim``, one part to each rank, joined along ``concat_dim``.

    What ``jax.lax.all_to_all(..., tiled=True)`` does.

    Args:
        tree: a pytree of tensors, of the same shapes on all ranks.
        axis: ``mesh["ep"]``, ``mesh["dp", "ep"]``, a process group, or None for all ranks.
        split_dim: the dimension that is divided by ``num_ranks``.
        concat_dim: the dimension that is multiplied by ``num_ranks``.

    Returns:
        The parts for this rank in the order of the ranks they come from. The transpose, and the
        inverse, is ``all_to_all`` with the two dims swapped.

    Raises:
        ValueError: ``num_ranks`` does not divide ``split_dim``, a leaf has no ``concat_dim``, there
            is no process group, or this rank is not in it.
        TypeError: a leaf is no tensor.

    Examples:
        >>> import torch.distributed as c10d
        >>> from numden.dist import run_local
        >>> run_local(lambda: all_to_all(torch.tensor([0, 1]) + 10 * c10d.get_rank()), 2)
        [tensor([ 0, 10]), tensor([ 1, 11])]
    """
    group = group_of("all_to_all", axis)

    def rows(leaf: Tensor) -> Tensor:
        _check_dim(leaf, concat_dim)
        return _cut(leaf, split_dim, group.size).flatten(1)

    def concat(part: Tensor, leaf: Tensor) -> Tensor:
        blocks = part.reshape(_cut(leaf, split_dim, group.size).shape)
        return _join(blocks, concat_dim % leaf.ndim)

    run = partial(exchange_over, group)
    return apply_by_leaf("all_to_all", tree, run, run, rows, concat)


def ppermute(tree: PyTree, axis: Axis, perm: Sequence[tuple[int, int]]) -> PyTree:
    """Each leaf sent from rank to rank of ``axis``, by pairs ``(source, destination)``.

    Args:
        tree: a pytree of tensors, of the same structure and shapes on all ranks.
        axis: ``mesh["pp"]``, ``mesh["dp", "pp"]``, a process group, or None for all ranks.
        perm: the pairs, the same on all ranks. A rank that is nobody's destination gets zeros.

    Returns:
        The leaves of this rank's source. The transpose is ``ppermute`` with each pair reversed.

    Raises:
        ValueError: a rank is twice a source or a destination or none of ``axis``; there is no
            process group, or this rank is not in it.
        TypeError: a leaf is no tensor.

    Examples:
        >>> import torch.distributed as c10d
        >>> from numden.dist import run_local
        >>> run_local(lambda: ppermute(torch.tensor(c10d.get_rank() + 7), None, [(0, 1)]), 2)
        [tensor(0), tensor(7)]
    """
    group = group_of("ppermute", axis)
    pairs = tuple((source, dest) for source, dest in perm)
    for ends in ([source for source, _ in pairs], [dest for _, dest in pairs]):
        if len(set(ends)) < len(ends) or not set(ends) <= set(range(group.size)):
            raise ValueError(
                "ppermute: perm must name each of the ranks at most once as source and once as "
                f"destination, got perm={list(pairs)} for {group.size} ranks. Use ranks within "
                "axis, from 0, in pairs (source, destination)."
            )
    run = partial(permute_over, group, pairs)
    transpose = partial(permute_over, group, tuple((dest, source) for source, dest in pairs))
    return apply_by_leaf("ppermute", tree, run, transpose, lambda leaf: leaf.reshape(-1), _like)


def _summable(leaf: Tensor) -> Tensor:
    return leaf.long() if leaf.dtype == torch.bool else leaf


def _like(part: Tensor, leaf: Tensor) -> Tensor:
    return part.reshape(leaf.shape)


def _check_dim(leaf: Tensor, dim: int) -> None:
    if not -leaf.ndim <= dim < leaf.ndim:
        raise ValueError(
            f"must have the dimension to work on, got dim={dim} for shape {tuple(leaf.shape)}. "
            "Give another dim, or a leaf of one dimension more: x[None]."
        )


def _cut(leaf: Tensor, dim: int, num_ranks: int) -> Tensor:
    """``[..., num_ranks * n, ...]`` as ``[num_ranks, ..., n, ...]``."""
    _check_dim(leaf, dim)
    size, remainder = divmod(leaf.shape[dim], num_ranks)
    if remainder:
        raise ValueError(
            f"must be divisible by the number of ranks, got size {leaf.shape[dim]} for "
            f"{num_ranks} ranks in dim={dim} of shape {tuple(leaf.shape)}. Pad it."
        )
    return leaf.unflatten(dim, (num_ranks, size)).movedim(dim % leaf.ndim, 0)


def _join(blocks: Tensor, dim: int) -> Tensor:
    """``[num_ranks, ..., n, ...]`` as ``[..., num_ranks * n, ...]``: the inverse of ``_cut``."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1)
