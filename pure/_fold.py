"""Loops over micro-batches: sums of a function, and a state carried through."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import tree
from ._status import EmptyWindowError
from .terms import add
from .tree import PyTree

__all__ = ["fold", "scan"]

_NONE = object()


def fold(fun: Callable[[Any, Any], PyTree]) -> Callable[[Any, Iterable[Any]], PyTree]:
    """``(params, window) -> Σ fun(params, batch)``, for any pytree of sums.

        total = fun(params, first)
        for batch in rest:
            total = add(total, fun(params, batch))

    Raises:
        EmptyWindowError: by the result, when the window has no batch: its sums have no structure.
        TermStructureError: by the result, when two batches give different structures.

    Examples:
        >>> fold(lambda w, x: {"sum": w * sum(x), "count": len(x)})(2, [[1, 2], [3]])
        {'sum': 12, 'count': 3}
    """

    def folded(params: Any, window: Iterable[Any]) -> PyTree:
        sums = (fun(params, batch) for batch in window)
        first = next(sums, _NONE)
        if first is _NONE:
            raise EmptyWindowError("fold: the window has no batch, so its sums have no structure.")
        return functools.reduce(add, sums, first)

    return folded


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
) -> tuple[Any, Any]:
    """Carry a state through ``xs`` and stack what ``f`` puts out: ``jax.lax.scan``'s contract.

        ys = []
        for x in xs:
            init, y = f(init, x)
            ys.append(y)
        return init, stack(ys)

    Args:
        f: ``(carry, x) -> (carry, y)``.
        init: the first carry, any pytree.
        xs: a tensor, dict or tuple of tensors, cut along their first dimension; or a list or any
            other iterable of elements, which may be ragged; or None.
        length: the number of steps where ``xs`` is None.

    Returns:
        The last carry, and the ``y`` stacked along a new first dimension; None without a step.

    Raises:
        ValueError: neither ``xs`` nor ``length`` is given, or tensors in ``xs`` disagree in length.

    Examples:
        >>> scan(lambda total, x: (total + x, total), torch.tensor(0), torch.tensor([1, 2, 3]))
        (tensor(6), tensor([0, 1, 3]))
    """
    ys = []
    for x in _elements(xs, length):
        init, y = f(init, x)
        ys.append(y)
    return init, tree.map(_stack, *ys) if ys else None


def _stack(*leaves: Any) -> Tensor:
    return torch.stack([torch.as_tensor(leaf) for leaf in leaves])


def _elements(xs: Any, length: int | None) -> Iterable[Any]:
    if xs is None:
        if length is None:
            raise ValueError("scan: give xs or length.")
        return [None] * length
    if not isinstance(xs, Tensor | dict | tuple):
        return xs
    leaves, structure = tree.flatten(xs)
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        raise ValueError(f"scan: xs must agree in their first dimension, got {sorted(lengths)}.")
    if length not in (None, *lengths):
        raise ValueError(f"scan: length must be that of xs, got {length=} for {lengths.pop()}.")
    return (tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(lengths.pop()))
