"""The accumulator: three pure functions that turn micro-steps into the gradient of a window.

    carry = init(params)
    for batch in window:
        carry = update(carry, params, batch)
    loss, grads, terms, metrics = finish(carry)

``update`` adds ``vjp(sums)(direction)`` to a gradient buffer for each direction of the plan and
adds up the sums; ``finish`` sums over ranks, evaluates the cotangent ``∂f/∂S`` at the totals,
writes it as ``Σ factor · direction`` and combines the buffers with the factors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._carry import LOCAL, Carry, Reduction, Spec, WindowGrad
from ._finish import finish
from ._leaves import attach, refuse_reducing
from ._micro_step import absorb, forward, init
from ._status import OnEmpty, require_on_empty
from .objective import Objective, term_mean
from .plans import PlanError, require_known
from .terms import LossFn

__all__ = ["Accumulator", "accumulator"]


class Accumulator(NamedTuple):
    """Three pure functions; see the module's docstring for the loop that they make.

    Attributes:
        init: ``(params, known=None) -> Carry``. ``known``: the total dens for plan ``before``, the
            ``FirstPass`` for ``replay``.
        update: ``(carry, params, batch, *, last=False) -> Carry``: one micro-step. ``last`` starts
            the reduction of the sums before the backward pass.
        finish: ``(carry) -> WindowGrad``.
    """

    init: Callable[..., Carry]
    update: Callable[..., Carry]
    finish: Callable[[Carry], WindowGrad]


def accumulator(
    loss_fn: LossFn,
    objective: Objective = term_mean(),
    *,
    plan: str,
    reduction: Reduction = LOCAL,
    accumulate_dtype: torch.dtype | None = None,
    on_empty: OnEmpty = "raise",
    donate: bool = False,
) -> Accumulator:
    """The accumulator of a plan, for loops of your own and for checkpoints in a window.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        objective: from totals to the loss.
        plan: "after", "before", "columns" or "replay".
        reduction: how sums and gradients are summed over ranks.
        accumulate_dtype: of the gradient buffers; the dtype of each parameter where not given.
        on_empty: see ``window_grad``.
        donate: let ``update`` and ``finish`` reuse the memory of the carry that they are given.

    Raises:
        PlanError: by ``update``, when the plan cannot express the objective.

    Examples:
        >>> from numden.pure import LossTerms
        >>> def loss_fn(w, x):
        ...     return LossTerms((w * x).sum(), x.numel())
        >>> init, update, finish = accumulator(loss_fn, plan="after")
        >>> w = torch.tensor(1.0)
        >>> carry = update(update(init(w), w, torch.tensor([8.0])), w, torch.full((3,), 2.0))
        >>> finish(carry).grads
        tensor(3.5000)
    """
    require_known(plan)
    require_on_empty(on_empty)
    if plan == "auto":
        raise PlanError("accumulator: plan 'auto' needs a window; name the plan. See explain_plan.")
    spec = Spec(objective, plan, reduction, accumulate_dtype, on_empty, donate)

    def update(carry: Carry, params: Any, batch: Any, *, last: bool = False) -> Carry:
        leaves = attach(params)
        return absorb(spec, carry, leaves, forward(loss_fn, leaves, batch), last=last)

    def start(params: Any, known: Any = None) -> Carry:
        refuse_reducing(params)
        return init(spec, attach(params), known)

    return Accumulator(start, update, lambda carry: finish(spec, carry))
