"""Loss terms: sums of numerators and denominators, and their algebra.

``LossTerms`` is a commutative monoid under ``add``, whose neutral elements are ``zeros_like``.
That is all that accumulation over micro-steps and ranks needs; ``divide`` comes last, once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree
from .tree import PyTree

__all__ = [
    "LossFn",
    "LossTerms",
    "Metrics",
    "TermStructureError",
    "add",
    "combine",
    "divide",
    "merge",
    "scale",
    "zeros_like",
]


class LossTerms(NamedTuple):
    """Sums over tokens, samples or whatever a loss counts: a numerator over a denominator.

    Attributes:
        num: a pytree of sums, differentiable; a scalar tensor for one term, a dict for several.
        den: a pytree of sums with the structure of ``num``, or a prefix of it: one scalar is
            shared by all terms.

    Examples:
        >>> terms = LossTerms(num=torch.tensor(8.0), den=torch.tensor(1))
        >>> divide(add(terms, LossTerms(torch.tensor(6.0), torch.tensor(3))))
        tensor(3.5000)
    """

    num: PyTree
    den: PyTree


Metrics = dict[str, LossTerms]
"""Sums that are reported beside the loss. They never enter the objective."""

LossFn = Callable[[Any, Any], LossTerms | tuple[LossTerms, Metrics]]
"""``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``."""


class TermStructureError(ValueError):
    """Loss terms whose trees, dtypes or counts do not fit together. The message says what to do."""


def add(a: PyTree, b: PyTree) -> PyTree:
    """The sum of two trees of sums of one structure: associative and commutative.

    Args:
        a: ``LossTerms``, or any pytree of tensors or numbers.
        b: a tree with the structure of ``a``.

    Raises:
        TermStructureError: the structures differ.

    Examples:
        >>> add(LossTerms(1.0, 2), LossTerms(3.0, 4))
        LossTerms(num=4.0, den=6)
    """
    if tree.structure(a) != tree.structure(b):
        raise TermStructureError(
            "add: the two trees must have one structure, got "
            f"{tree.structure(a)} and {tree.structure(b)}. Return the same terms from each batch; "
            "a term that a batch lacks is a pair of zeros."
        )
    return tree.map(lambda x, y: x + y, a, b)


def zeros_like(terms: PyTree) -> PyTree:
    """The neutral element of ``add`` with the structure, shapes and dtypes of ``terms``.

    Examples:
        >>> zeros_like(LossTerms(torch.tensor(3.0), torch.tensor(2)))
        LossTerms(num=tensor(0.), den=tensor(0))
    """
    return tree.zeros_like(terms)


def scale(terms: PyTree, factor: float | Tensor) -> PyTree:
    """Each sum times ``factor``: numerators and denominators, so that ratios stay as they are.

    ``scale(terms, 2)`` equals ``add(terms, terms)``. To weight a term in the objective give
    ``term_mean`` its weight instead.

    Examples:
        >>> scale(LossTerms(3.0, 2.0), 2)
        LossTerms(num=6.0, den=4.0)
    """
    return tree.map(lambda leaf: leaf * factor, terms)


def merge(**terms: LossTerms) -> LossTerms:
    """Several named loss terms as one, with dicts by name as ``num`` and ``den``.

    Examples:
        >>> merge(ce=LossTerms(3.0, 2), z=LossTerms(1.0, 4))
        LossTerms(num={'ce': 3.0, 'z': 1.0}, den={'ce': 2, 'z': 4})
    """
    return LossTerms(
        num={name: each.num for name, each in terms.items()},
        den={name: each.den for name, each in terms.items()},
    )


def divide(terms: LossTerms) -> PyTree:
    """The ratios ``num / den``, with the structure of ``num``.

    Integers are divided in float64. A ratio is 0, with zero gradient, where both num and den
    are 0: the mean over an empty set that adds nothing. It is infinite where only den is 0.

    Raises:
        TermStructureError: ``den`` is neither like ``num`` nor a prefix of it.

    Examples:
        >>> divide(LossTerms({"ce": torch.tensor([6.0, 0.0])}, torch.tensor([4.0, 0.0])))
        {'ce': tensor([1.5000, 0.0000])}
    """
    nums, structure = tree.flatten(terms.num)
    ratios = [_ratio(num, den) for num, den in zip(nums, den_per_num(terms), strict=True)]
    return tree.unflatten(structure, ratios)


def den_per_num(terms: LossTerms) -> list[Any]:
    """The denominator of each leaf of ``num``, a shared one repeated."""
    try:
        return tree.broadcast_prefix(terms.den, terms.num)
    except ValueError:
        raise TermStructureError(
            "LossTerms: den must have the structure of num or be a prefix of it, got num "
            f"{tree.names(terms.num, 'num')} and den {tree.names(terms.den, 'den')}. "
            "Give each term a den, or all of them one scalar."
        ) from None


def _ratio(num: Any, den: Any) -> Tensor:
    num, den = torch.as_tensor(num), torch.as_tensor(den)
    if not num.is_floating_point():
        num = num.double()
    empty = (num == 0) & (den == 0)
    # The inner `where` keeps 0/0 out of the backward pass, whose NaN the outer one would not stop.
    ratio = num / torch.where(empty, torch.ones_like(den), den)
    return torch.where(empty, torch.zeros_like(ratio), ratio)


def combine(**loss_fns: LossFn) -> LossFn:
    """One loss function from several: ``num`` and ``den`` become dicts by name.

    Metrics of the parts keep their names, with the part's name and a slash before them.

    Examples:
        >>> both = combine(
        ...     fit=lambda w, x: LossTerms(((w - x) ** 2).sum(), x.numel()),
        ...     size=lambda w, x: LossTerms(w.abs() * x.numel(), x.numel()),
        ... )
        >>> both(torch.tensor(2.0), torch.tensor([1.0, 5.0]))
        LossTerms(num={'fit': tensor(10.), 'size': tensor(4.)}, den={'fit': 2, 'size': 2})
    """

    def combined(params: Any, batch: Any) -> LossTerms | tuple[LossTerms, Metrics]:
        parts = {name: split_metrics(fn(params, batch)) for name, fn in loss_fns.items()}
        terms = merge(**{name: part for name, (part, _) in parts.items()})
        metrics = {f"{name}/{k}": v for name, (_, ms) in parts.items() for k, v in ms.items()}
        return (terms, metrics) if metrics else terms

    return combined


def split_metrics(result: LossTerms | tuple[LossTerms, Metrics]) -> tuple[LossTerms, Metrics]:
    """What a loss function returned, as ``(terms, metrics)``; no metrics are an empty dict.

    Raises:
        TermStructureError: ``result`` is neither ``LossTerms`` nor ``(LossTerms, dict)``.
    """
    if isinstance(result, LossTerms):
        return result, {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], LossTerms):
        if isinstance(result[1], dict):
            return result
        raise TermStructureError(
            f"loss_fn: metrics must be a dict of LossTerms by name, got {type(result[1]).__name__}."
        )
    raise TermStructureError(
        f"loss_fn: must return LossTerms or (LossTerms, metrics), got {type(result).__name__}. "
        "Return the sum and the count, LossTerms(loss_sum, token_count), and no mean."
    )
