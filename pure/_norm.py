"""The global norm of gradients, and clipping by it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import tree
from .tree import PyTree

__all__ = ["SumSquares", "Transform", "clip_by_global_norm", "global_norm", "sum_of_squares"]

Transform = Callable[[PyTree], PyTree]
"""``grads -> grads``, of the same structure."""

SumSquares = Callable[[list[Tensor]], Tensor]
"""From all leaves to the sum of their squares over all ranks, a scalar."""


def sum_of_squares(leaves: list[Tensor]) -> Tensor:
    """``Σ x²`` over all elements of all leaves, a float64 scalar tensor.

    Along the last dim it adds in float32 (in float64 for float64), from there in float64: a
    parameter of millions keeps seven digits, where one float32 sum keeps three.

    Examples:
        >>> sum_of_squares([torch.tensor([[3.0, 4.0]]), torch.tensor(2.0)])
        tensor(29., dtype=torch.float64)
    """
    if not leaves:
        return torch.zeros((), dtype=torch.float64)
    sums = [_row_norms(leaf).double().square().sum() for leaf in leaves]
    return torch.stack([each.to(sums[0].device) for each in sums]).sum()


def global_norm(grads: PyTree, *, sum_squares: SumSquares = sum_of_squares) -> Tensor:
    """The Euclidean norm of all leaves as one vector, a float64 scalar tensor.

    Args:
        grads: a pytree of tensors.
        sum_squares: from the list of leaves to the sum of their squares. Where leaves are
            shards, this is where the sums of the ranks are added.

    Examples:
        >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        tensor(5., dtype=torch.float64)
    """
    return sum_squares(tree.leaves(grads)).sqrt()


def clip_by_global_norm(
    max_norm: float, *, sum_squares: SumSquares = sum_of_squares, donate: bool = False
) -> Transform:
    """Scale gradients by ``min(1, max_norm / (norm + 1e-6))``, as torch's ``clip_grad_norm_``.

    Args:
        max_norm: the largest global norm that is let through.
        sum_squares: see ``global_norm``.
        donate: scale the tensors that are given rather than copies of them, which take a third
            of the time and no memory; a ``WindowGrad`` that holds them has them clipped then.

    Raises:
        ValueError: ``max_norm`` is not positive.

    Examples:
        >>> clip_by_global_norm(1.0)({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        {'a': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    if not max_norm > 0:
        raise ValueError(
            f"clip_by_global_norm: max_norm must be positive, got {max_norm=}. "
            "Leave the transform out to not clip."
        )

    def clip(grads: PyTree) -> PyTree:
        norm = global_norm(grads, sum_squares=sum_squares)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return tree.map(partial(_scaled, factor=factor, donate=donate), grads)

    return clip


def _scaled(leaf: Tensor, factor: Tensor, *, donate: bool) -> Tensor:
    factor = factor.to(leaf.device)
    # Scalar leaves would be promoted to the factor's dtype.
    return leaf.mul_(factor) if donate else (leaf * factor).to(leaf.dtype)


def _row_norms(leaf: Tensor) -> Tensor:
    wide = torch.promote_types(leaf.dtype, torch.float32)
    return torch.linalg.vector_norm(leaf, dim=-1, dtype=wide)
