"""The end of a window: totals over ranks, the objective, one division, one host read."""

from typing import Any

import torch
from torch import Tensor

from . import tree
from ._carry import Carry, FirstPass, Reduction, Spec, WindowGrad
from ._status import EmptyWindowError, OnEmpty, Status, check, require_repeated, sound
from ._sums import HALF, Sums, wide_dtype
from .objective import cotangent, spread
from .plans import PlanError
from .terms import LossTerms, divide
from .tree import PyTree

__all__ = ["finish", "finish_value", "ratios", "reduce_totals", "wait_for"]


def reduce_totals(reduction: Reduction, sums: Sums | None, faults: Tensor | None) -> Any:
    """The sums of all ranks, and on how many ranks each was bad; None without any micro-step.

    The result may be a function that waits for them.
    """
    if sums is None or faults is None:
        return reduction.totals(None)
    return reduction.totals((sums, (faults >= 0).to(wide_dtype(faults.device))))


def wait_for(totals: Any) -> tuple[Sums, Tensor] | None:
    """The totals, once their reduction is done."""
    found: Any = totals() if callable(totals) else totals
    return found


def ratios(sums: Sums) -> dict[str, Any]:
    """The total metrics, divided."""
    return {name: divide(metric) for name, metric in sums.metrics.items()}


def finish(spec: Spec, carry: Carry) -> WindowGrad:
    """The loss, the gradient, the totals and the metrics of the window in ``carry``."""
    unrepeated = _unrepeated(carry)
    if unrepeated is not None and spec.on_empty != "skip":
        require_repeated(unrepeated)
    totals = _totals(spec, carry)
    if totals is None:
        return _without_micro_steps(spec, carry)
    sums, faults = totals
    loss, grads = cotangent(spec.objective, sums.terms)
    finite = torch.isfinite(torch.stack([loss, *map(torch.sum, tree.leaves(grads))])).all()
    factors, misfit = spread(grads, carry.directions)
    status = _status(spec, carry, sums, faults, finite, misfit)
    good = sound(status, sums.terms, unrepeated) if spec.on_empty == "skip" else finite
    factors = [torch.where(good, factor, 0) for factor in factors]
    combined = spec.reduction.grads(_combine(carry.grads, factors, donate=spec.donate))
    if spec.on_empty == "skip":
        good = spec.reduction.agree(good)
    else:
        check(status, sums.terms, spec.plan, spec.on_empty, spec.reduction.reports)
    return WindowGrad(_settled(loss, good, spec.on_empty), combined, sums.terms, ratios(sums))


def finish_value(spec: Spec, found: FirstPass) -> tuple[Tensor, LossTerms, dict[str, Any]]:
    """The loss, the totals and the metrics of a window whose sums were found."""
    if found.totals is None:
        device = torch.device("cpu")
        return _loss_without_micro_steps(spec, device), _no_terms(device), {}
    sums, faults = found.totals
    loss = cotangent(spec.objective, sums.terms)[0]
    none, finite = torch.zeros_like(loss), torch.isfinite(loss)
    local = torch.full_like(faults, -1) if found.faults is None else found.faults
    status = Status(_dens(sums.terms), faults, local, finite, none, none)
    good = sound(status, sums.terms) if spec.on_empty == "skip" else finite
    if spec.on_empty != "skip":
        check(status, sums.terms, spec.plan, spec.on_empty, spec.reduction.reports)
    return _settled(loss, good, spec.on_empty), sums.terms, ratios(sums)


def _settled(loss: Tensor, good: Tensor, on_empty: OnEmpty) -> Tensor:
    return torch.where(good, loss, 0.0 if on_empty == "zero" else float("nan"))


def _unrepeated(carry: Carry) -> Tensor | None:
    """How far a replay's sums are from those of its first pass; None for other plans."""
    if not isinstance(carry.known, FirstPass):
        return None
    first, second = carry.known.sums, carry.sums
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise PlanError(
            "plan 'replay': both passes go over the same window, got one of them without a "
            "micro-step. Give update each batch that first_pass had."
        )
    return _apart(second.terms, first.terms)


def _totals(spec: Spec, carry: Carry) -> tuple[Sums, Tensor] | None:
    if isinstance(carry.known, FirstPass):
        return carry.known.totals
    started = carry.totals or reduce_totals(spec.reduction, carry.sums, carry.faults)
    return wait_for(started)


def _combine(grads: tuple[PyTree, ...], factors: list[Tensor], *, donate: bool) -> PyTree:
    """``Σ factor_k · grads_k``; without factors, the zeros that the first buffer still holds."""
    leaves, structure = tree.flatten(grads[0])
    out = leaves if donate else [leaf.clone() for leaf in leaves]
    own = [_own_part(leaf) for leaf in out]
    for factor in factors[:1]:
        for leaf in own:
            leaf.mul_(_factor_for(leaf, factor))
    for buffer, factor in zip(grads[1:], factors[1:], strict=False):
        for leaf, more in zip(own, map(_own_part, tree.leaves(buffer)), strict=True):
            leaf.add_(more * _factor_for(leaf, factor))
    return tree.unflatten(structure, out)


def _own_part(leaf: Any) -> Tensor:
    """This rank's shard of a DTensor, which takes no factor of its shape; other tensors whole."""
    return leaf.to_local() if hasattr(leaf, "to_local") else leaf


def _factor_for(leaf: Tensor, factor: Tensor) -> Tensor:
    factor = factor.to(leaf.device)
    if leaf.dtype not in HALF:
        return factor
    # A 0-dim factor would be rounded to the leaf's dtype first: 0.4 % off for the whole gradient.
    return factor.float().expand_as(leaf)


def _status(
    spec: Spec, carry: Carry, sums: Sums, faults: Tensor, finite: Tensor, misfit: Tensor
) -> Status:
    none = torch.zeros_like(misfit)
    local = carry.faults
    apart = _apart(sums.terms.den, carry.known) if spec.plan == "before" else none
    if isinstance(carry.known, FirstPass):
        local = carry.known.faults
    if carry.sums is None:  # an empty rank, which had no directions either
        misfit = none
    local = torch.full_like(faults, -1) if local is None else local
    return Status(_dens(sums.terms), faults, local, finite, misfit, apart)


def _dens(terms: LossTerms) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(terms.den)])


def _apart(a: PyTree, b: PyTree) -> Tensor:
    """The largest difference between two trees of sums, relative to the larger value.

    A sum that cancels is compared with a millionth of the largest: its rounding is that of its
    addends.
    """
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    least = 1e-6 * torch.stack([leaf.abs().max() for leaf in tree.leaves(a)]).max()
    scaled = [
        ((x - y).abs() / torch.maximum(x.abs(), y.abs()).clamp_min(least.clamp_min(1e-30))).max()
        for x, y in ((x, y.to(x.device, x.dtype, non_blocking=True)) for x, y in pairs)
    ]
    return torch.stack(scaled).max()


def _without_micro_steps(spec: Spec, carry: Carry) -> WindowGrad:
    loss = _loss_without_micro_steps(spec, carry.step.device)
    grads = spec.reduction.grads(_combine(carry.grads, [], donate=spec.donate))
    return WindowGrad(loss, grads, _no_terms(loss.device), {})


def _no_terms(device: torch.device) -> LossTerms:
    """Zeros: what terms a window without micro-steps would have had is not known."""
    zero = torch.zeros((), dtype=wide_dtype(device), device=device)
    return LossTerms(zero, zero.clone())


def _loss_without_micro_steps(spec: Spec, device: torch.device) -> Tensor:
    if spec.on_empty == "raise":
        raise EmptyWindowError(
            "window: the window has no micro-step. Give it at least one batch, or say "
            "on_empty='zero' or on_empty='skip'."
        )
    loss = 0.0 if spec.on_empty == "zero" else float("nan")
    return torch.full((), loss, dtype=wide_dtype(device), device=device)
