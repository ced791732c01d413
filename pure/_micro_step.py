"""One micro-step: sums forward, a weighted vjp backward, both added to the carry."""

from typing import Any

import torch
from torch import Tensor

from . import tree
from ._carry import Carry, FirstPass, Spec
from ._finish import reduce_totals
from ._leaves import Leaves, lend_grads, zero_grads
from ._sums import Sums, add_sums, evaluate, note_faults, require_same, wide
from .objective import Objective, cotangent, made_up
from .plans import PlanError, dens_with_grad, require
from .terms import LossFn, LossTerms, TermStructureError
from .tree import PyTree

__all__ = ["absorb", "forward", "init"]


def init(spec: Spec, leaves: Leaves, known: Any = None) -> Carry:
    """The carry of a window without micro-steps: one zero gradient buffer."""
    is_first_pass = isinstance(known, FirstPass)
    fits = {"before": known is not None and not is_first_pass, "replay": is_first_pass}
    if not fits.get(spec.plan, known is None):
        needs = {"before": "the total dens", "replay": "a FirstPass"}.get(spec.plan, "nothing")
        raise PlanError(
            f"plan {spec.plan!r}: init(params, known) takes {needs} as known, got "
            f"{type(known).__name__}."
        )
    if spec.plan == "before":
        known = tree.map(wide, known)
    zeros = tree.unflatten(leaves.structure, zero_grads(leaves, spec.accumulate_dtype))
    device = leaves.tensors[0].device if leaves.tensors else torch.device("cpu")
    step = torch.zeros((), dtype=torch.int64, device=device)
    return Carry((zeros,), (), None, None, step, known)


def forward(loss_fn: LossFn, leaves: Leaves, batch: Any) -> Sums:
    """The sums of a micro-step, attached to the graph of ``leaves``."""
    with torch.enable_grad():
        return evaluate(loss_fn, leaves.params, batch)


def absorb(spec: Spec, carry: Carry, leaves: Leaves, sums: Sums, *, last: bool = False) -> Carry:
    """Add a micro-step, whose ``sums`` are attached to the graph of ``leaves``."""
    if carry.totals is not None:
        raise ValueError(
            "update: a window goes on until last=True, got one more micro-step after it, which "
            "the totals would lack. Give last=True to the last update alone, or to none."
        )
    if not spec.donate:
        carry = carry._replace(grads=tree.map(torch.clone, carry.grads))
    before = carry.sums
    if before is None:
        carry = carry._replace(directions=_directions(spec, carry, sums))
    _refuse_dropped_gradient(spec, sums.terms)
    unheld = _unheld_dens(carry, sums.terms) if spec.plan == "columns" else None
    carry = carry._replace(
        sums=add_sums(carry.sums, sums, carry.step),
        faults=note_faults(carry.faults, sums.terms, carry.step, unheld),
        step=carry.step + 1,
    )
    if spec.plan in ("after", "columns") and _has_float16(leaves):
        carry = _rescaled(carry, before)
    if last and spec.plan != "replay":
        carry = carry._replace(totals=reduce_totals(spec.reduction, carry.sums, carry.faults))
    return carry._replace(grads=_backward(spec, carry, leaves, sums.terms))


def _refuse_dropped_gradient(spec: Spec, terms: LossTerms) -> None:
    """In each micro-step: that the first had no den with a gradient says nothing of the others."""
    if spec.plan in ("after", "before") and (names := dens_with_grad(terms)):
        raise PlanError(
            f"plan {spec.plan!r}: {', '.join(names)} depends on params in this micro-step, and its "
            "gradient would be dropped. Detach it, or use plan='replay'."
        )


def _unheld_dens(carry: Carry, terms: LossTerms) -> list[Tensor]:
    """Which dens require grad though no direction holds them; decided on the device."""
    per_direction = [tree.leaves(direction.den) for direction in carry.directions]
    unheld = []
    for place, den in enumerate(tree.leaves(terms.den)):
        held = [(dens[place] != 0).any() for dens in per_direction if den.requires_grad]
        none = torch.full((), den.requires_grad, device=den.device)
        unheld.append(none & ~torch.stack(held).any() if held else none)
    return unheld


def _directions(spec: Spec, carry: Carry, sums: Sums) -> tuple[LossTerms, ...]:
    """What the sums of each micro-step are weighted with, one tree for each gradient buffer."""
    den_fn = _given if spec.plan == "before" else spec.den_fn
    groups = require(spec.plan, sums, spec.objective, den_fn=den_fn)
    if spec.plan == "replay":
        groups = (_cotangent_of_totals(spec.objective, sums, carry.known.totals),)
    if spec.plan == "before":
        groups = (_cotangent_of_dens(spec.objective, sums.terms, carry.known),)
    finite = (tree.map(_finite, group) for group in groups)
    return tuple(tree.map(_like, _rounded(group), sums.terms) for group in finite)


def _rounded(direction: LossTerms) -> LossTerms:
    """The direction with nums in powers of two, if they differ by such: its scale is free.

    A loss in bfloat16 passes it on in bfloat16, which would round the whole gradient alike. What
    is left of it the end of the window multiplies with, in the dtype of the accumulators. It must
    not depend on this rank's terms: FSDP2 sums gradients of all ranks before that.
    """
    sizes = torch.cat([leaf.abs().reshape(-1) for leaf in tree.leaves(direction.num)])
    tiny = torch.finfo(sizes.dtype).tiny
    mantissas = sizes / torch.exp2(torch.log2(sizes.clamp_min(tiny)).floor())  # in [1, 2), or 0
    mantissa = mantissas.max()
    alike = ((mantissas == mantissa) | (sizes == 0)).all() & (mantissa > 0)
    return tree.map(lambda leaf: leaf / torch.where(alike, mantissa, 1).to(leaf), direction)


def _finite(direction: Tensor) -> Tensor:
    # What is not finite belongs to an empty term, whose sums 0 would make NaN of it.
    return torch.where(torch.isfinite(direction), direction, 0)


def _like(value: Tensor, total: Tensor) -> Tensor:
    return value.to(total.device, total.dtype, non_blocking=True)


def _cotangent_of_totals(objective: Objective, sums: Sums, totals: Any) -> LossTerms:
    if totals is None:
        raise PlanError("plan 'replay': the first pass had no micro-step, got one in the second.")
    require_same(totals[0], sums, lambda: "the second pass")
    return cotangent(objective, totals[0].terms)[1]


def _has_float16(leaves: Leaves) -> bool:
    return any(leaf.dtype == torch.float16 for leaf in leaves.tensors)


def _given(batch: Any) -> Any:
    raise AssertionError("the dens were given to init; den_fn is only asked whether it exists")


def _cotangent_of_dens(objective: Objective, terms: LossTerms, dens: Any) -> LossTerms:
    _require_like_dens(terms, dens)
    # The nums are not known and play no part, so any will do.
    nums = tree.map(_like, made_up(terms, 1).num, terms.num)
    dens = tree.map(_like, dens, terms.den)  # den_fn may have counted on the host
    grads = cotangent(objective, LossTerms(nums, dens))[1]
    return LossTerms(grads.num, tree.zeros_like(grads.den))


def _require_like_dens(terms: LossTerms, dens: Any) -> None:
    def described(den: Any) -> list[str]:
        shapes = [str(list(leaf.shape)) if leaf.dim() else "" for leaf in tree.leaves(den)]
        return [name + shape for name, shape in zip(tree.names(den, "den"), shapes, strict=True)]

    got, need = described(dens), described(terms.den)
    if got != need:
        raise TermStructureError(
            f"plan 'before': the dens counted before the window must be like those of loss_fn, got "
            f"{got} for {need}. Let den_fn return what loss_fn returns as den."
        )


def _rescaled(carry: Carry, before: Sums | None) -> Carry:
    """Keep sums of float16 gradients in range: prescale by about one over the total den so far.

    It is a power of two, so that scaling is exact, and part of the directions, so that the last
    multiply undoes it. It shrinks as the total den grows; buffers shrink with it.
    """
    assert carry.sums is not None
    prescale = _power_of_two_below(carry.sums.terms)
    if before is not None:
        prescale = prescale / _power_of_two_below(before.terms)
        for buffer in tree.leaves(carry.grads):
            buffer.mul_(prescale)
    directions = tree.map(lambda leaf: leaf * prescale, carry.directions)
    return carry._replace(directions=directions)


def _power_of_two_below(terms: LossTerms) -> Tensor:
    """A power of two not above one over the largest den; 1 where that is below 1."""
    den = torch.stack([leaf.max() for leaf in tree.leaves(terms.den)]).max()
    return torch.exp2(-torch.ceil(torch.log2(den.clamp_min(1))))


def _backward(spec: Spec, carry: Carry, leaves: Leaves, terms: LossTerms) -> tuple[PyTree, ...]:
    grads = list(carry.grads)
    weighted = [_weight(terms, direction) for direction in carry.directions]
    last = max((k for k, scalar in enumerate(weighted) if scalar is not None), default=-1)
    for k, scalar in enumerate(weighted):
        while len(grads) <= k:
            grads.append(
                tree.unflatten(leaves.structure, zero_grads(leaves, spec.accumulate_dtype))
            )
        if scalar is not None:
            _accumulate(scalar, leaves, tree.leaves(grads[k]), keep_graph=k < last)
    return tuple(grads)


def _weight(terms: LossTerms, direction: LossTerms) -> Tensor | None:
    """``Σ direction · sum`` over the sums with a graph; None where there are none."""
    pairs = zip(tree.leaves(terms), tree.leaves(direction), strict=True)
    with torch.enable_grad():  # the caller may be in no_grad, where gradients are of use too
        parts = [(leaf * weight).sum() for leaf, weight in pairs if leaf.requires_grad]
        return torch.stack(parts).sum() if parts else None


def _accumulate(scalar: Tensor, leaves: Leaves, buffers: list[Tensor], *, keep_graph: bool) -> None:
    # The graph of an FSDP2 module ends in gathered parameters, which only its own hooks know.
    gathered = hasattr(leaves.params, "set_requires_gradient_sync")
    if not leaves.tensors and not gathered:
        return  # what requires grad is not ours
    with lend_grads(leaves, buffers):
        scalar.backward(retain_graph=keep_graph, inputs=None if gathered else leaves.tensors)
