"""One micro-step: sums forward, a weighted vjp backward, both added to the carry."""

from typing import Any

import torch
from torch import Tensor

from . import tree
from ._carry import Carry, Spec
from ._finish import reduce_totals
from ._leaves import Leaves, attach, lend_grads, zero_grads
from .objective import Objective, cotangent, made_up
from .plans import PlanError, dens_with_grad, require
from ._sums import Sums, add_sums, evaluate, note_faults, require_same
from .terms import LossFn, LossTerms
from .tree import PyTree

__all__ = ["absorb", "forward", "init"]


def init(spec: Spec, params: Any, known: Any = None) -> Carry:
    """The carry of a window without micro-steps: one zero gradient buffer."""
    if (known is None) == (spec.plan in ("before", "replay")):
        needs = {"before": "the total dens", "replay": "a FirstPass"}.get(spec.plan, "nothing")
        raise PlanError(f"plan {spec.plan!r}: init(params, known) takes {needs} as known.")
    leaves = attach(params)
    zeros = tree.unflatten(leaves.structure, zero_grads(leaves, spec.accumulate_dtype))
    device = leaves.tensors[0].device if leaves.tensors else torch.device("cpu")
    step = torch.zeros((), dtype=torch.int64, device=device)
    return Carry((zeros,), (), None, None, step, known)


def forward(loss_fn: LossFn, params: Any, batch: Any) -> tuple[Leaves, Sums]:
    """The sums of a micro-step, attached to the graph of the leaves beside them."""
    leaves = attach(params)
    with torch.enable_grad():
        return leaves, evaluate(loss_fn, leaves.params, batch)


def absorb(spec: Spec, carry: Carry, leaves: Leaves, sums: Sums, *, last: bool = False) -> Carry:
    """Add a micro-step, whose ``sums`` are attached to the graph of ``leaves``."""
    if not spec.donate:
        carry = carry._replace(grads=tree.map(torch.clone, carry.grads))
    if carry.sums is None:
        carry = carry._replace(directions=_directions(spec, carry, leaves, sums))
    _refuse_dropped_gradient(spec, carry, sums.terms)
    carry = carry._replace(
        sums=add_sums(carry.sums, sums, carry.step),
        faults=note_faults(carry.faults, sums.terms, carry.step),
        step=carry.step + 1,
    )
    if last and spec.plan != "replay":
        carry = carry._replace(totals=reduce_totals(spec.reduction, carry.sums, carry.faults))
    return carry._replace(grads=_backward(spec, carry, leaves, sums.terms))


def _refuse_dropped_gradient(spec: Spec, carry: Carry, terms: LossTerms) -> None:
    """A den that requires grad must be in a direction, in each micro-step and not only the first."""
    if spec.plan == "replay":
        return
    for name in dens_with_grad(terms):
        covered = {
            name
            for direction in carry.directions
            for name, leaf in zip(
                tree.names(terms.den, "den"), tree.leaves(direction.den), strict=True
            )
            if spec.plan == "columns" and bool((leaf != 0).any())
        }
        if name not in covered:
            raise PlanError(
                f"plan {spec.plan!r}: {name} depends on params in this micro-step, and its gradient "
                "would be dropped. Detach it, or use plan='replay'."
            )


def _directions(spec: Spec, carry: Carry, leaves: Leaves, sums: Sums) -> tuple[LossTerms, ...]:
    """What the sums of each micro-step are weighted with, one tree for each gradient buffer."""
    den_fn = _given if spec.plan == "before" else spec.den_fn
    groups = require(spec.plan, sums, spec.objective, den_fn=den_fn)
    if spec.plan == "replay":
        groups = (cotangent(spec.objective, carry.known.totals[0].terms)[1],)
    if spec.plan == "before":
        groups = (_cotangent_of_dens(spec.objective, sums.terms, carry.known),)
    like = sums.terms
    groups = tuple(
        tree.map(lambda d, s: d.to(s.device, s.dtype, non_blocking=True), group, like)
        for group in groups
    )
    if spec.plan == "after" and any(leaf.dtype == torch.float16 for leaf in leaves.tensors):
        prescale = _power_of_two_below(like)
        groups = tuple(tree.map(lambda d: d * prescale, group) for group in groups)
    return groups


def _given(batch: Any) -> Any:
    raise AssertionError("the dens were given to init; den_fn is only asked whether it exists")


def _cotangent_of_dens(objective: Objective, terms: LossTerms, dens: Any) -> LossTerms:
    wide = tree.map(lambda den: torch.as_tensor(den).detach().to(torch.float64), dens)
    require_same(tree.map(Tensor.detach, terms.den), wide, lambda: "den_fn")
    nums = tree.map(
        lambda leaf, den: leaf.to(den.device), made_up(terms, 1).num, _spread_den(wide, terms)
    )
    grads = cotangent(objective, LossTerms(nums, wide))[1]
    return LossTerms(grads.num, tree.zeros_like(grads.den))


def _spread_den(den: Any, terms: LossTerms) -> Any:
    return tree.unflatten(tree.structure(terms.num), tree.broadcast_prefix(den, terms.num))


def _power_of_two_below(terms: LossTerms) -> Tensor:
    """About one over the largest den of a micro-step: keeps sums of float16 gradients in range."""
    den = torch.stack([leaf.detach().max() for leaf in tree.leaves(terms.den)]).max()
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
    parts = [(leaf * weight).sum() for leaf, weight in pairs if leaf.requires_grad]
    return torch.stack(parts).sum() if parts else None


def _accumulate(scalar: Tensor, leaves: Leaves, buffers: list[Tensor], *, keep_graph: bool) -> None:
    # The graph of an FSDP2 module ends in gathered parameters, which only its own hooks know.
    gathered = hasattr(leaves.params, "set_requires_gradient_sync")
    with lend_grads(leaves, buffers):
        scalar.backward(retain_graph=keep_graph, inputs=None if gathered else leaves.tensors)
