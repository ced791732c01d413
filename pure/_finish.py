"""The end of a window: totals over ranks, the objective, one division, one host read."""

from typing import Any

import torch
from torch import Tensor

from . import tree
from ._carry import Carry, FirstPass, Reduction, Spec, WindowGrad
from .objective import Objective, cotangent, spread
from ._status import EmptyWindowError, Status, check, require_repeated
from ._sums import Sums, wide_dtype
from .terms import LossTerms, divide
from .tree import PyTree

__all__ = ["finish", "finish_value", "ratios", "reduce_totals", "value"]


def reduce_totals(
    reduction: Reduction, sums: Sums | None, faults: Tensor | None
) -> Any:
    """The sums of all ranks, and on how many ranks each was bad; None without any micro-step.

    The result may be a function that waits for them.
    """
    if sums is None or faults is None:
        return reduction.totals(None)
    return reduction.totals((sums, (faults >= 0).to(wide_dtype(faults.device))))


def wait_for(totals: Any) -> tuple[Sums, Tensor] | None:
    """The totals, once their reduction is done."""
    return totals() if callable(totals) else totals


def ratios(sums: Sums) -> dict[str, Any]:
    """The total metrics, divided."""
    return {name: divide(metric) for name, metric in sums.metrics.items()}


def value(
    objective: Objective, terms: LossTerms, on_empty: str
) -> tuple[Tensor, LossTerms, Tensor]:
    """The loss at total ``terms`` under a policy, the cotangent, and whether both are good."""
    loss, grads = cotangent(objective, terms)
    dens = _dens(terms)
    positive = ((dens > 0) & torch.isfinite(dens)).all()
    if on_empty == "skip":
        good = positive & torch.isfinite(loss)
        return torch.where(good, loss, float("nan")), grads, good
    if on_empty == "zero":
        good = torch.isfinite(loss)
        return torch.where(good, loss, 0), grads, good
    return loss, grads, torch.ones_like(positive)


def finish(spec: Spec, carry: Carry) -> WindowGrad:
    """The loss, the gradient, the totals and the metrics of the window in ``carry``."""
    if isinstance(carry.known, FirstPass) and spec.on_empty != "skip" and carry.sums is not None:
        require_repeated(_apart(carry.sums.terms, carry.known.sums.terms))
    totals = _totals(spec, carry)
    if totals is None:
        return _without_micro_steps(spec, carry)
    sums, faults = totals
    loss, grads, good = value(spec.objective, sums.terms, spec.on_empty)
    factors, misfit = spread(grads, carry.directions)
    factors = [torch.where(good, factor, 0) for factor in factors]
    combined = spec.reduction.grads(_combine(carry.grads, factors, donate=spec.donate))
    if spec.on_empty != "skip":
        status = _status(spec, carry, sums, faults, misfit)
        check(status, sums.terms, spec.plan, spec.on_empty, spec.reduction.reports)
    return WindowGrad(loss, combined, sums.terms, ratios(sums))


def finish_value(spec: Spec, found: FirstPass) -> tuple[Tensor, LossTerms, dict[str, Any]]:
    """The loss, the totals and the metrics of a window whose sums were found."""
    if found.totals is None:
        loss = _loss_without_micro_steps(spec, torch.device("cpu"))
        return loss, LossTerms(loss * 0, loss * 0), {}
    sums, faults = found.totals
    loss, _, _ = value(spec.objective, sums.terms, spec.on_empty)
    if spec.on_empty != "skip":
        none = torch.zeros_like(loss)
        local = torch.full_like(faults, -1) if found.faults is None else found.faults
        status = Status(_dens(sums.terms), faults, local, none, none)
        check(status, sums.terms, spec.plan, spec.on_empty, spec.reduction.reports)
    return loss, sums.terms, ratios(sums)


def _totals(spec: Spec, carry: Carry) -> tuple[Sums, Tensor] | None:
    if isinstance(carry.known, FirstPass):
        return carry.known.totals
    started = carry.totals or reduce_totals(spec.reduction, carry.sums, carry.faults)
    return wait_for(started)


def _combine(grads: tuple[PyTree, ...], factors: list[Tensor], *, donate: bool) -> PyTree:
    """``Σ factor_k · grads_k``; without factors, the zeros that the first buffer still holds."""
    if not factors:
        return grads[0]
    leaves, structure = tree.flatten(grads[0])
    out = leaves if donate else [leaf.clone() for leaf in leaves]
    for leaf in out:
        leaf.mul_(factors[0].to(leaf.device))
    for buffer, factor in zip(grads[1:], factors[1:], strict=False):
        for leaf, more in zip(out, tree.leaves(buffer), strict=True):
            leaf.add_(more * factor.to(leaf.device))
    return tree.unflatten(structure, out)


def _status(spec: Spec, carry: Carry, sums: Sums, faults: Tensor, misfit: Tensor) -> Status:
    none = torch.zeros_like(misfit)
    local = carry.faults
    apart = _apart(sums.terms.den, carry.known) if spec.plan == "before" else none
    if isinstance(carry.known, FirstPass):
        local = carry.known.faults
    if carry.sums is None:  # an empty rank, which had no directions either
        misfit = none
    local = torch.full_like(faults, -1) if local is None else local
    return Status(_dens(sums.terms), faults, local, misfit, apart)


def _dens(terms: LossTerms) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(terms.den)])


def _apart(a: PyTree, b: PyTree) -> Tensor:
    """The largest difference between two trees of sums, relative to the larger value."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    scaled = [
        ((x - y).abs() / torch.maximum(x.abs(), y.abs()).clamp_min(1e-30)).max()
        for x, y in ((x, torch.as_tensor(y, dtype=x.dtype, device=x.device)) for x, y in pairs)
    ]
    return torch.stack(scaled).max()


def _without_micro_steps(spec: Spec, carry: Carry) -> WindowGrad:
    loss = _loss_without_micro_steps(spec, carry.step.device)
    return WindowGrad(loss, spec.reduction.grads(carry.grads[0]), LossTerms(loss * 0, loss * 0), {})


def _loss_without_micro_steps(spec: Spec, device: torch.device) -> Tensor:
    if spec.on_empty == "raise":
        raise EmptyWindowError(
            "window_grad: the window has no micro-step. Give it at least one batch, or say "
            "on_empty='zero' or on_empty='skip'."
        )
    loss = 0.0 if spec.on_empty == "zero" else float("nan")
    return torch.full((), loss, dtype=wide_dtype(device), device=device)
