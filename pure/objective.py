"""Objectives: pure functions from total sums to the scalar loss, and their cotangents.

The gradient of ``L = f(S)``, ``S = Σ s(params, batch)``, is ``Σ vjp(s)(∂f/∂S)``. The cotangent
``∂f/∂S`` is the only thing that one micro-step must know of the others; how much of it can be
known before the window ends decides which plan can compute the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import random, tree
from .terms import LossTerms, divide
from .tree import PyTree

__all__ = ["Objective", "TermMean", "cotangent", "directions", "term_mean"]

Objective = Callable[[LossTerms], Tensor]
"""``(totals: LossTerms) -> scalar``, a pure function of the totals.

It is also evaluated at made-up totals on the CPU, to see which of its cotangents keep their ratio.
So let its constants be numbers, and no tensors of an accelerator.
"""

_NUM_PROBES = 4
# An objective that computes in float32 rounds by 1e-7; cotangents of other directions differ by far
# more, and what this lets through `spread` still sees at the real totals.
_COLLINEAR = 1e-6


@dataclass(frozen=True)
class TermMean:
    """The sum over terms of weight times num over den; see ``term_mean``."""

    weights: Any = None

    def __call__(self, terms: LossTerms) -> Tensor:
        """The loss of total ``terms``, a scalar."""
        ratios, structure = tree.flatten(divide(terms))
        if self.weights is None:
            return torch.stack([ratio.sum() for ratio in ratios]).sum()
        if tree.structure(self.weights) != structure:
            raise ValueError(
                f"term_mean: weights must be a number per term, shaped like num, got weights "
                f"{tree.names(self.weights, 'weights')} for {tree.names(terms.num, 'num')}."
            )
        weighted = zip(tree.leaves(self.weights), ratios, strict=True)
        return torch.stack([(weight * ratio).sum() for weight, ratio in weighted]).sum()


def term_mean(weights: Any = None) -> TermMean:
    """The default objective: ``Σ_k w_k · num_k / den_k``.

    Args:
        weights: a number per term, a tree shaped like ``num``; 1 for each where not given. The
            elements of a term that is a vector are added.

    Returns:
        A function from total ``LossTerms`` to a scalar tensor.

    Examples:
        >>> totals = LossTerms({"ce": torch.tensor(6.0), "z": torch.tensor(2.0)}, torch.tensor(4.0))
        >>> term_mean({"ce": 1.0, "z": 0.5})(totals)
        tensor(1.7500)
    """
    return TermMean(weights)


def cotangent(objective: Objective, totals: LossTerms) -> tuple[Tensor, LossTerms]:
    """The loss ``f(S)`` and ``∂f/∂S``, a tree like ``totals``; zeros for sums that f ignores.

    Raises:
        ValueError: the objective does not return a scalar tensor.

    Examples:
        >>> totals = LossTerms(torch.tensor(6.0), torch.tensor(4.0))
        >>> cotangent(term_mean(), totals)
        (tensor(1.5000), LossTerms(num=tensor(0.2500), den=tensor(-0.3750)))
    """
    leaves, structure = tree.flatten(totals)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        loss = objective(tree.unflatten(structure, leaves))
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"objective: must return a scalar tensor, got {got}. Sum it.")
    if not loss.requires_grad:
        return loss, tree.zeros_like(totals)
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return loss.detach(), tree.unflatten(structure, list(grads))


def directions(
    objective: Objective,
    like: LossTerms,
    *,
    where: LossTerms | None = None,
    at_most: int | None = None,
) -> tuple[LossTerms, ...] | None:
    """The term groups of an objective: the directions whose span holds every cotangent.

    Sums whose cotangents keep one ratio whatever the totals are form a group; only the scale of
    its direction is unknown until the window ends. Found by evaluating ``∂f/∂S`` at a few made-up
    totals, of which the first have all dens 1, so that the direction of a ``term_mean`` with one
    den is its weights exactly. ``spread`` proves at the end of each window that the real cotangent
    fits.

    Args:
        objective: the function f.
        like: total terms, of which only structure and shapes are used.
        where: a bool for each sum, whether it matters; all do where not given.
        at_most: stop at so many groups. There can be as many as there are numbers in ``like``.

    Returns:
        One tree like ``like`` for each group, in float64 on the CPU, zero outside of the group.
        Sums that the objective ignores or that do not matter are in no group. None where the
        objective has no finite cotangent at made-up totals, so that they do not show its groups.
    """
    # Made-up sums live on the CPU, so that reading what they give does not wait for a device.
    probes = [cotangent(objective, made_up(like, i)) for i in range(_NUM_PROBES)]
    rows = torch.stack([_flat(grads) for _, grads in probes])
    if not bool(torch.stack([loss.double() for loss, _ in probes]).isfinite().all()):
        return None
    if not bool(rows.isfinite().all()):
        return None
    if where is not None:
        rows = rows * _flat(tree.map(_filled, where, like))
    return tuple(_unflat(group, like) for group in _collinear_columns(rows, at_most))


def _filled(value: bool, like: Tensor) -> Tensor:
    return torch.full(like.shape, value, dtype=torch.float64)


def made_up(like: LossTerms, index: int) -> LossTerms:
    """Positive totals that no window had, float64 on the CPU; with index 0 each den is 1.

    Nums are below 1 and dens are not, so that an objective may take its ratios for probabilities.
    """
    leaves = tree.leaves(like)
    size = sum(leaf.numel() for leaf in leaves)
    num_dens = sum(leaf.numel() for leaf in tree.leaves(like.den))
    # Drawn: of a regular sequence some values keep a ratio, and look as if their sums did.
    values = random.uniform(random.key(index), (size,), dtype=torch.float64, minval=0.05)
    values[size - num_dens :] += 1
    if index == 0:
        values[size - num_dens :] = 1
    return _unflat(values, like)


def _collinear_columns(rows: Tensor, at_most: int | None) -> list[Tensor]:
    """Group the columns of ``rows`` by direction; a group is the vector of its columns' scales."""
    norms = rows.norm(dim=0)
    unit = rows / torch.where(norms > 0, norms, 1)
    left = norms > 0
    groups: list[Tensor] = []
    while bool(left.any()) and len(groups) != at_most:
        first = int(left.nonzero()[0])
        cosine = unit[:, first] @ unit
        residual = (unit - unit[:, first, None] * cosine).norm(dim=0)
        group = left & (residual < _COLLINEAR)
        nonzero = int(rows[:, first].nonzero()[0])
        # The scale of a direction is free; with 1 where it can be, raw sums stay what they are.
        scales = rows[nonzero] if int(group.sum()) > 1 else torch.ones_like(norms)
        groups.append(torch.where(group, scales, 0))
        left &= ~group
    return groups


def spread(cotangents: LossTerms, directions: tuple[LossTerms, ...]) -> tuple[list[Tensor], Tensor]:
    """Write a cotangent as ``Σ factor_k · direction_k``.

    Returns:
        The factors, and the largest remainder over all nums and over those dens that a direction
        touches, relative to the largest cotangent of these: near 0 when the directions can express
        it.
    """
    flat = _flat(cotangents)
    rows = [_flat(direction) for direction in directions]
    nums = _flat(
        LossTerms(tree.map(torch.ones_like, cotangents.num), tree.zeros_like(cotangents.den))
    )
    factors = [_factor(flat, row, nums) for row in rows]
    remainder, counts = flat.clone(), nums
    for factor, row in zip(factors, rows, strict=True):
        remainder = remainder - factor * row
        counts = counts + (row != 0)
    remainder, largest = (torch.where(counts > 0, x.abs(), 0).max() for x in (remainder, flat))
    return factors, remainder / largest.clamp_min(torch.finfo(flat.dtype).tiny)


def _factor(flat: Tensor, row: Tensor, nums: Tensor) -> Tensor:
    """How many times ``row`` is in ``flat``: read from its nums, if it has any; 0 for no row."""
    own = torch.where((row * nums != 0).any(), row * nums, row)
    return (own @ flat) / (own @ own).clamp_min(torch.finfo(flat.dtype).tiny)


def _flat(sums: PyTree) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(sums)])


def _unflat(vector: Tensor, like: LossTerms) -> LossTerms:
    leaves, structure = tree.flatten(like)
    parts = vector.split([leaf.numel() for leaf in leaves])
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return tree.unflatten(structure, shaped)
