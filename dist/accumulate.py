"""The accumulator over ranks: for loops of your own, that may stop within a window.

init, update, finish = accumulator(loss_fn, plan="after")
carry = init(params)
for batch in window:
carry = update(carry, params, batch)         # no collective: save state and carry here
loss, grads, terms, metrics = finish(carry, params)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh

from .. import pure
from ..pure import Carry, LossFn, Objective, PlanError, WindowGrad, term_mean, tree
from ..pure._carry import Spec
from ..pure._finish import finish as finish_on_rank
from ..pure._status import OnEmpty
from ..pure.plans import require_known
from ._data_axes import DataAxes, data_axes
from ._sum_partial import sum_partial
from ._whole_window import empty_window
from .layout import reduction_rules
from .reduction import WindowCollectives
from .sharding import gather, is_sharded, scatter

__all__ = ["Accumulator", "accumulator"]


class Accumulator(NamedTuple):
    """Three functions; see the module's docstring for the loop that they make.

    Attributes:
        init: ``(params) -> Carry``.
        update: ``(carry, params, batch) -> Carry``: one micro-step of this rank.
        finish: ``(carry, params) -> WindowGrad``: the collectives of the window. Ranks may have had
            different numbers of micro-steps, also none.
    """

    init: Callable[[Any], Carry]
    update: Callable[[Carry, Any, Any], Carry]
    finish: Callable[[Carry, Any], WindowGrad]


def accumulator(
    loss_fn: LossFn,
    objective: Objective = term_mean(),
    *,
    plan: str,
    mesh: DeviceMesh | None = None,
    group: c10d.ProcessGroup | None = None,
    accumulate_dtype: torch.dtype | None = None,
    on_empty: OnEmpty = "raise",
    donate: bool = False,
) -> Accumulator:
    """The accumulator of ``window_grad`` over ranks, whose carry ``save`` writes.

    Its gradients are those of ``window_grad`` with the same plan, bit for bit.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        objective: from totals to the loss.
        plan: "after" or "columns", which need to know nothing before the window.
        mesh: see ``window_grad``.
        group: see ``window_grad``.
        accumulate_dtype: see ``window_grad``.
        on_empty: see ``window_grad``.
        donate: let ``update`` and ``finish`` reuse the memory of the carry that they are given.

    Returns:
        Functions of params that are a replicated pytree, a plain module, or a tree from ``shard``.
        Shards are gathered in each call of ``init`` and ``update``, so that ranks must make as many
        calls; give them ``gather(params)`` instead to gather once per window. ``finish`` needs the
        shards themselves. Where ``update`` raises, its own rank alone knows, and should end.

    Raises:
        PlanError: another plan; or by ``update``, when the plan cannot express the objective.
        TypeError: by ``init``, an FSDP2 or DDP module.

    Examples:
        >>> from numden.pure import LossTerms
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> init, update, finish = accumulator(loss_fn, plan="after")
        >>> w = torch.tensor(1.0)
        >>> finish(update(init(w), w, torch.tensor([8.0])), w).grads
        tensor(8.)
    """
    require_known(plan)
    if plan not in ("after", "columns"):
        raise PlanError(
            f"accumulator: over ranks the plan is 'after' or 'columns', got plan={plan!r}. Use "
            "window_grad, and repeat a window that was cut off."
        )
    on_rank = pure.accumulator(
        loss_fn,
        objective,
        plan=plan,
        accumulate_dtype=accumulate_dtype,
        on_empty=on_empty,
        donate=donate,
    )
    spec = Spec(
        objective, plan, accumulate_dtype=accumulate_dtype, on_empty=on_empty, donate=donate
    )

    def finish(carry: Carry, params: Any) -> WindowGrad:
        axes = data_axes(mesh, group)
        return on_rank.finish(carry) if axes is None else _finish(spec, carry, params, axes)

    return Accumulator(
        lambda params: on_rank.init(_gathered(params)),
        lambda carry, params, batch: on_rank.update(carry, _gathered(params), batch),
        finish,
    )


def _gathered(params: Any) -> Any:
    return gather(params) if is_sharded(params) else params


def _finish(spec: Spec, carry: Carry, params: Any, axes: DataAxes) -> WindowGrad:
    to_shards = partial(scatter, like=params) if is_sharded(params) else None
    reduce = sum_partial(reduction_rules(params, axes), axes, first=to_shards)
    collectives = WindowCollectives(axes.group, reduce, on_empty=spec.on_empty)
    whole = carry.grads[0]
    try:
        if carry.sums is None:
            return empty_window(spec, whole, collectives)
        result = finish_on_rank(replace(spec, reduction=collectives.reduction), carry)
        collectives.settle()
        return result
    except Exception as error:
        collectives.abandon(error, lambda: tree.zeros_like(whole))
        raise
