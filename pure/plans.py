"""The four plans: when is the cotangent of a micro-step known?

| plan | the cotangent is known | passes per micro-step | gradient buffers |
|---|---|---|---|
| ``after`` | up to one factor at the start, wholly at the end | 1 forward, 1 backward | 1 |
| ``before`` | at the start, from dens counted before | 1 forward, 1 backward | 1 |
| ``columns`` | at the end; a buffer for each term group waits for it | 1 forward, K backward | K |
| ``replay`` | after a first pass without gradients | 2 forward, 1 backward | 1 |

All give the same gradient. They differ in cost and in the objectives that they can express.
``columns`` goes through one graph K times: a loss function that ``torch.compile`` has compiled must
keep its buffers for that, ``torch._functorch.config.donated_buffer = False``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree
from ._leaves import attach
from ._sums import Sums, evaluate
from .objective import Objective, cotangent, directions, made_up
from .terms import LossFn, LossTerms

__all__ = ["MAX_COLUMNS", "PLANS", "PlanError", "PlanReport", "explain_plan", "report"]

PLANS = ("after", "before", "columns", "replay")
MAX_COLUMNS = 2
_MANY = 4  # so many groups are described in a message
_NO_GROUPS = "the objective is not finite at made-up totals, which hides its term groups"

DenFn = Callable[[Any], Any]
"""``(batch) -> den``: the tree of dens that the loss function returns for the batch."""


class PlanError(ValueError):
    """A plan that cannot express the objective. The message names one that can."""


class PlanReport(NamedTuple):
    """A choice of plan.

    Attributes:
        plan: the name of the plan.
        reason: why this one, in a sentence.
        rejected: for each plan that cannot be used, or not at a sensible cost, why.
    """

    plan: str
    reason: str
    rejected: dict[str, str]


def explain_plan(
    loss_fn: LossFn, objective: Objective, params: Any, batch: Any, *, den_fn: DenFn | None = None
) -> PlanReport:
    """Which plan ``window_grad(..., plan="auto")`` takes for this batch, and why.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``; called once.
        objective: the function from totals to the loss.
        params: a pytree of tensors, or a module.
        batch: one micro-batch.
        den_fn: counts the dens of a batch without ``params``.

    Returns:
        A ``PlanReport``.

    Raises:
        PlanError: ``den_fn`` is given, so that "auto" means "before", and "before" cannot express
            the objective.

    Examples:
        >>> from numden.pure import term_mean
        >>> def loss_fn(w, x):
        ...     return LossTerms(((w - x) ** 2).sum(), x.numel())
        >>> report = explain_plan(loss_fn, term_mean(), torch.tensor(1.0), torch.ones(3))
        >>> report.plan
        'after'
        >>> print(report.reason)
        all terms share one den that does not depend on params: one multiply at the end
    """
    with torch.enable_grad():
        sums = evaluate(loss_fn, attach(params).params, batch)
    return report(sums, objective, den_fn=den_fn)


def report(
    sums: Sums, objective: Objective, *, den_fn: DenFn | None = None, max_columns: int = MAX_COLUMNS
) -> PlanReport:
    """The choice for a micro-step's ``sums``, which are still attached to their graph."""
    groups = term_groups(objective, sums.terms, at_most=max(max_columns, 1) + 1)
    rejected = {
        "after": _after_obstacle(groups, sums.terms),
        "before": _before_obstacle(objective, sums.terms, den_fn),
        "columns": _too_many(groups, max_columns) or _columns_obstacle(groups, sums.terms),
    }
    rejected = {plan: why for plan, why in rejected.items() if why}
    if den_fn is not None:
        require("before", sums, objective, den_fn=den_fn)
        reason = "den_fn counts the dens before the window, and they alone fix the cotangent"
        return PlanReport("before", reason, rejected)
    if "after" not in rejected:
        one = "all terms share one den that does not depend on params: one multiply at the end"
        return PlanReport("after", one, rejected)
    if groups is not None and "columns" not in rejected:
        reason = f"{len(groups)} term groups, each with a gradient buffer of its own"
        return PlanReport("columns", reason, rejected)
    reason = "the cotangent is known only from all sums: a first pass without gradients finds it"
    return PlanReport("replay", reason, rejected)


def require(
    plan: str, sums: Sums, objective: Objective, *, den_fn: DenFn | None
) -> tuple[LossTerms, ...]:
    """The term groups of ``sums`` for a plan that needs them, if it can express the objective.

    Raises:
        PlanError: it cannot.
    """
    groups, obstacle = (), None
    if plan == "after":
        groups = term_groups(objective, sums.terms, at_most=_MANY)
        obstacle = _after_obstacle(groups, sums.terms)
    elif plan == "before":
        obstacle = _before_obstacle(objective, sums.terms, den_fn)
    elif plan == "columns":
        groups = term_groups(objective, sums.terms)
        obstacle = _columns_obstacle(groups, sums.terms)
    if obstacle:
        instead = report(sums, objective).plan
        raise PlanError(f"plan {plan!r}: {obstacle}. Use plan={instead!r}.")
    return groups or ()


def require_known(plan: str) -> None:
    """Raise unless ``plan`` is the name of a plan."""
    if plan not in (*PLANS, "auto"):
        raise PlanError(f"window: plan must be one of {PLANS} or 'auto', got {plan!r}.")


def term_groups(
    objective: Objective, terms: LossTerms, *, at_most: int | None = None
) -> tuple[LossTerms, ...] | None:
    """The directions of the objective that reach a num or a den with a gradient."""
    graph = tree.map(lambda leaf: leaf.requires_grad, terms.den)
    where = LossTerms(tree.map(lambda _: True, terms.num), graph)
    return directions(objective, terms, where=where, at_most=at_most)


def dens_with_grad(terms: LossTerms) -> list[str]:
    """The names of dens through which a gradient would flow."""
    return [name for name, den in tree.named(terms.den, "den").items() if den.requires_grad]


def _after_obstacle(groups: tuple[LossTerms, ...] | None, terms: LossTerms) -> str | None:
    if names := dens_with_grad(terms):
        return f"{', '.join(names)} depends on params, and its gradient would be dropped"
    if groups is None:
        return _NO_GROUPS
    if len(groups) > 1:
        more = "; …" if len(groups) == _MANY else ""
        return (
            f"the terms form {'several' if more else len(groups)} groups with cotangents of their "
            f"own ({'; '.join(_describe(group) for group in groups)}{more}), and one factor at the "
            "end serves one group"
        )
    return None


def _before_obstacle(objective: Objective, terms: LossTerms, den_fn: DenFn | None) -> str | None:
    if names := dens_with_grad(terms):
        return f"{', '.join(names)} depends on params, so it cannot be counted before the window"
    if den_fn is None:
        return "it needs den_fn, which counts the dens of a batch without params"
    if cotangent_needs_nums(objective, terms):
        return "the cotangent of the objective depends on the nums, not on the dens alone"
    return None


def _columns_obstacle(groups: tuple[LossTerms, ...] | None, terms: LossTerms) -> str | None:
    if groups is None:
        return _NO_GROUPS
    held = {name for group in groups for name in _touched("den", group.den)}
    if names := [name for name in dens_with_grad(terms) if name not in held]:
        return f"{', '.join(names)} depends on params, but the objective seems not to use it"
    return None


def _too_many(groups: tuple[LossTerms, ...] | None, max_columns: int) -> str | None:
    if groups is not None and len(groups) > max_columns:
        return f"it would hold more than {max_columns} gradient buffers, one for each term group"
    return None


def _describe(group: LossTerms) -> str:
    return " + ".join([*_touched("num", group.num), *_touched("den", group.den)])


def _touched(root: str, directions: Any) -> list[str]:
    named = tree.named(directions, root).items()
    return [name + _places(leaf) for name, leaf in named if bool((leaf != 0).any())]


def _places(direction: Tensor) -> str:
    """Which element of a term is meant, where it is one of several."""
    places = direction.nonzero().tolist()
    return str(places[0]) if direction.dim() and len(places) == 1 < direction.numel() else ""


def cotangent_needs_nums(objective: Objective, terms: LossTerms) -> bool:
    """Whether ``∂f/∂num`` changes with the nums while the dens stay, seen at made-up totals."""
    with_nums = [LossTerms(made_up(terms, i).num, made_up(terms, 1).den) for i in (1, 2)]
    (_, first), (_, second) = (cotangent(objective, totals) for totals in with_nums)
    pairs = zip(tree.leaves(first.num), tree.leaves(second.num), strict=True)
    return not all(torch.allclose(a, b, rtol=1e-9, atol=0) for a, b in pairs)
