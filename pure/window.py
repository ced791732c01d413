"""Windows: the loss of all micro-batches of an optimizer step, and its gradient."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _transforms, tree
from ._carry import LOCAL, Carry, FirstPass, Reduction, Spec, WindowGrad
from ._finish import finish, finish_value, ratios, reduce_totals, wait_for
from ._fold import fold as fold
from ._fold import scan as scan
from ._leaves import Leaves, attach, refuse_reducing
from ._micro_step import absorb, forward, init
from ._status import OnEmpty, require_on_empty
from ._sums import Sums, add_sums, detach, evaluate, note_faults, wide
from .objective import Objective, term_mean
from .plans import DenFn, PlanError, report, require_known
from .terms import LossFn, LossTerms, add
from .tree import PyTree

__all__ = ["WindowValue", "first_pass", "fold", "scan", "window_grad", "window_value"]


class WindowValue(NamedTuple):
    """The loss of a window, without a gradient.

    Attributes:
        loss: the objective of the total terms, a float64 scalar.
        terms: the total loss terms, float64.
        metrics: the ratios of the total metrics, by name.
    """

    loss: Tensor
    terms: LossTerms
    metrics: dict[str, Any]


def window_value(
    loss_fn: LossFn,
    objective: Objective = term_mean(),
    *,
    reduction: Reduction = LOCAL,
    on_empty: OnEmpty = "raise",
) -> Callable[[Any, Iterable[Any]], WindowValue]:
    """The loss of a window, for evaluation: ``(params, window) -> WindowValue``.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        objective: from totals to the loss.
        reduction: how sums are summed over ranks.
        on_empty: as for ``window_grad``.

    Returns:
        A function without side effects. Inside ``torch.func`` its result is differentiable.

    Raises:
        EmptyWindowError: by the result, see ``on_empty``.
        NonFiniteLossError: by the result, when a num is not finite in some micro-step.
        TermStructureError: by the result, when terms, dtypes or dens do not fit together.

    Examples:
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> window = [torch.tensor([8.0]), torch.tensor([2.0, 2.0, 2.0])]
        >>> window_value(loss_fn)(torch.tensor(1.0), window).loss
        tensor(3.5000, dtype=torch.float64)
    """
    require_on_empty(on_empty)
    spec = Spec(objective, "after", reduction, on_empty=on_empty)

    def value_of(params: Any, window: Iterable[Any]) -> WindowValue:
        if _transforms.inside():
            _transforms.refuse_sharded(params)
            sums = _transforms.sums_of_window(loss_fn, params, batches_of(window))
            return WindowValue(objective(sums.terms), sums.terms, ratios(sums))
        found = _first_pass(loss_fn, reduction, params, batches_of(window))
        return WindowValue(*finish_value(spec, found))

    return value_of


def first_pass(
    loss_fn: LossFn, reduction: Reduction = LOCAL
) -> Callable[[Any, Iterable[Any]], FirstPass]:
    """``(params, window) -> FirstPass``: the sums of a window, found without gradients.

    It is what ``accumulator(..., plan="replay").init(params, known)`` takes as ``known``.

    Examples:
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> first_pass(loss_fn)(torch.tensor(1.0), [torch.ones(3), torch.ones(2)]).sums.terms
        LossTerms(num=tensor(5., dtype=torch.float64), den=tensor(5., dtype=torch.float64))
    """
    return lambda params, window: _first_pass(loss_fn, reduction, params, batches_of(window))


def _first_pass(
    loss_fn: LossFn,
    reduction: Reduction,
    params: Any,
    batches: Iterator[Any],
    seen: Sums | None = None,
) -> FirstPass:
    """The pass without gradients; ``seen`` are the sums of a batch that came before ``batches``."""
    total, faults = None, None
    with torch.no_grad():
        each = itertools.chain(
            [] if seen is None else [seen],
            (evaluate(loss_fn, params, batch) for batch in batches),
        )
        for step, sums in enumerate(each):
            total = add_sums(total, sums, step)
            faults = note_faults(faults, sums.terms, step)
    return FirstPass(total, faults, wait_for(reduce_totals(reduction, total, faults)))


def window_grad(
    loss_fn: LossFn,
    objective: Objective = term_mean(),
    *,
    plan: str = "auto",
    den_fn: DenFn | None = None,
    reduction: Reduction = LOCAL,
    accumulate_dtype: torch.dtype | None = None,
    on_empty: OnEmpty = "raise",
) -> Callable[[Any, Iterable[Any]], WindowGrad]:
    """The loss of a window and its gradient: ``(params, window) -> WindowGrad``.

    The loss is ``f(S)`` of the sums ``S`` over all micro-steps (and ranks), so neither it nor the
    gradient depends on how the batch was cut into micro-steps. It stands for

        grads, loss = grad_and_value(lambda p: objective(fold(loss_fn)(p, window)))(params)

    with the memory of one micro-step: gradients are added in place on detached leaves.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``; each den belongs to
            its num, and both are sums over the batch.
        objective: the pure function f from total terms to the scalar loss.
        plan: "after", "before", "columns", "replay" or "auto"; ``explain_plan`` says which "auto"
            takes and why. All give the same gradient.
        den_fn: ``(batch) -> den``, the dens counted without ``params``, for plan "before".
        reduction: how sums and gradients are summed over ranks (``numden.dist`` has them).
        accumulate_dtype: of the gradients, float32 for bfloat16 params say; the dtype of each
            parameter where not given.
        on_empty: what a total den that is zero, negative or not finite means. "raise": an
            ``EmptyWindowError``. "zero": the empty term counts 0, with zero gradients. "skip": the
            loss is NaN, the gradients are zeros and ``WindowGrad.valid`` is False, without a host
            read; so it is for each of the errors below that values tell of.

    Returns:
        A function of ``params`` (a pytree of tensors, or a module) and ``window`` (any iterable of
        batches; "before" and "replay" keep the batches of a one-shot iterator). It leaves params,
        batches, ``.grad`` fields and random state as they were. Inside ``torch.func`` transforms
        it works too, ``plan`` and ``on_empty`` then play no part.

    Raises:
        PlanError: by the result, when the plan cannot express the objective.
        EmptyWindowError: by the result, see ``on_empty``.
        NonFiniteLossError: by the result, when a num is not finite in some micro-step.
        TermStructureError: by the result, when terms, dtypes or dens do not fit together.
        TypeError: by the result, when params are no floating-point tensors, or a module that
            reduces gradients over ranks itself.

    Examples:
        >>> def loss_fn(w, x):
        ...     return LossTerms((w * x).sum(), x.numel())
        >>> window = [torch.tensor([8.0]), torch.tensor([2.0, 2.0, 2.0])]
        >>> result = window_grad(loss_fn)(torch.tensor(1.0), window)
        >>> result.loss, result.grads
        (tensor(3.5000, dtype=torch.float64), tensor(3.5000))
    """
    require_known(plan)
    require_on_empty(on_empty)
    if den_fn is not None and plan == "auto":
        plan = "before"
    spec = Spec(objective, plan, reduction, accumulate_dtype, on_empty, den_fn=den_fn)

    def grad_of(params: Any, window: Iterable[Any]) -> WindowGrad:
        if not _transforms.inside():  # where what is wrong with these modules is something else
            refuse_reducing(params)
        return run(spec, loss_fn, params, window)

    return grad_of


def run(spec: Spec, loss_fn: LossFn, params: Any, window: Iterable[Any]) -> WindowGrad:
    """One window by the plan of ``spec``, whose options have been checked."""
    batches = batches_of(window)
    if _transforms.inside():
        return _transforms.grad_of_sums(loss_fn, spec.objective, params, batches)
    # Once, before any forward pass: FSDP2 replaces a module's parameters while they are gathered.
    leaves = attach(params)
    if spec.plan == "auto":
        return _run_auto(spec, loss_fn, leaves, batches)
    if spec.plan in ("after", "columns"):
        return _stream(spec, loss_fn, leaves, init(spec, leaves), batches)
    kept = list(batches)
    if spec.plan == "before":
        known = _count_dens(spec, kept)
    else:
        known = _first_pass(loss_fn, spec.reduction, params, iter(kept))
    return _stream(spec, loss_fn, leaves, init(spec, leaves, known), iter(kept))


def batches_of(window: Iterable[Any]) -> Iterator[Any]:
    """The batches of a window.

    Raises:
        TypeError: ``window`` is a dict, whose keys are no batches.
    """
    if isinstance(window, dict):
        raise TypeError(
            "window: a window is an iterable of batches, got a dict. A window of one batch is "
            "[batch]."
        )
    return iter(window)


def _run_auto(spec: Spec, loss_fn: LossFn, leaves: Leaves, batches: Iterator[Any]) -> WindowGrad:
    """Let the terms of the first micro-step choose the plan, and go on with its graph."""
    first = next(batches, _END)
    if first is _END:
        spec = replace(spec, plan="after")
        return finish(spec, init(spec, leaves))
    sums = forward(loss_fn, leaves, first)
    chosen = report(sums, spec.objective, max_columns=spec.max_columns)
    spec = replace(spec, plan=spec.settle_plan(chosen.plan))
    if spec.plan != "replay":
        started = iter([sums])
        del sums  # its graph is to end with its micro-step, not with the window
        batches = itertools.chain([first], batches)
        return _stream(spec, loss_fn, leaves, init(spec, leaves), batches, started)
    seen = detach(sums)
    del sums  # and with it the graph, before the first pass
    rest = list(batches)
    found = _first_pass(loss_fn, spec.reduction, leaves.params, iter(rest), seen)
    return _stream(spec, loss_fn, leaves, init(spec, leaves, found), iter([first, *rest]))


def _count_dens(spec: Spec, window: list[Any]) -> PyTree:
    """The total dens by ``den_fn``; an empty tuple where no rank has a batch."""
    if spec.den_fn is None:
        raise PlanError(
            "plan 'before': it needs den_fn, which counts the dens of a batch without params. Give "
            "it, or use plan='auto'."
        )
    dens = [tree.map(wide, spec.den_fn(batch)) for batch in window]
    total = wait_for(spec.reduction.totals(functools.reduce(add, dens) if dens else None))
    return () if total is None else total


def _stream(
    spec: Spec,
    loss_fn: LossFn,
    leaves: Leaves,
    carry: Carry,
    batches: Iterator[Any],
    started: Iterable[Sums] = (),
) -> WindowGrad:
    """Micro-step after micro-step; ``started`` has the forward pass of the first, if made."""
    passes = iter(started)
    for batch, last in _mark_last(batches):
        sums = next(passes, None) or forward(loss_fn, leaves, batch)
        carry = absorb(spec, carry, leaves, sums, last=last)
        del sums  # the graph of a micro-step is gone before the next is built
    return finish(spec, carry)


def _mark_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether none follows."""
    item = next(items, _END)
    while item is not _END:
        following = next(items, _END)
        yield item, following is _END
        item = following


_END = object()
