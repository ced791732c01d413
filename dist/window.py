"""The loss of a window and its gradient over ranks: ``numden.pure``'s, with a reduction."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..pure import LossFn, Objective, WindowGrad, WindowValue, term_mean
from ..pure._carry import Spec
from ..pure._status import OnEmpty, require_on_empty
from ..pure._transforms import inside
from ..pure.plans import DenFn, require_known
from ..pure.window import run
from ..pure.window import window_value as window_value_of_one_rank
from ._data_axes import data_axes, dim_names
from ._fsdp_window import fsdp_value, fsdp_window, is_fsdp
from ._gathering import gathering
from ._lockstep import lockstep_value, lockstep_window
from ._sum_partial import sum_partial
from ._whole_window import whole_value, whole_window
from .layout import reduction_rules
from .sharding import gather as gather_shards
from .sharding import is_sharded, local, scatter, wrap

__all__ = ["Gather", "window_grad", "window_value"]

Gather = Literal["window", "micro-step"]
"""When functional shards are gathered."""


def window_grad(
    loss_fn: LossFn,
    objective: Objective = term_mean(),
    *,
    mesh: DeviceMesh | None = None,
    group: c10d.ProcessGroup | None = None,
    plan: str = "auto",
    den_fn: DenFn | None = None,
    accumulate_dtype: torch.dtype | None = None,
    on_empty: OnEmpty = "raise",
    owned_over: str | Sequence[str] = (),
    gather: Gather = "window",
    lockstep: bool = False,
    equal_steps: bool = False,
) -> Callable[[Any, Iterable[Any]], WindowGrad]:
    """The loss of a window over all ranks and its gradient: ``(params, window) -> WindowGrad``.

    As ``numden.pure.window_grad``: the loss is the objective of the sums over all micro-steps of
    all ranks, the same on each rank. Per window there is one all-reduce of all sums, packed in
    float64 and started before the last backward pass, and the SUM of the gradients; none in a
    micro-step. (Plan "before" has one small all-reduce more, and so has ``on_empty="skip"``.)

    Ranks may have different numbers of micro-steps, also none. When a loss function raises on one
    rank, or ranks return different terms, all ranks raise the same error in this window, and the
    next window is a good one. (Where a rank raises within a pass that runs in lockstep, its peers
    wait for what it cannot send any more: it ends the process groups, and its own process should
    end by the error that it raises. The others then raise the same one.)

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``, of this rank's tokens
            alone: no collective, no factor of the number of ranks.
        objective: the pure function f from total terms to the scalar loss.
        mesh: the ranks over which tokens are split, all dimensions of it: those of the data, of
            experts, and of the sequence where it is split; not those of tensor parallelism.
            ``explain_reduction`` says who sums which gradient over which of them.
        group: the same as a process group; all ranks where neither is given.
        plan: see ``numden.pure.window_grad``. "auto" prefers "replay" to "columns" for an FSDP2
            module, which would have to reduce in each micro-step. In lockstep it has one small
            all-reduce more, by which ranks whose first micro-steps differ agree on one plan.
        den_fn: ``(batch) -> den``, for plan "before".
        accumulate_dtype: of the gradients, while they are accumulated and summed.
        on_empty: "raise", "zero" or "skip", decided by the totals over ranks.
        owned_over: names of mesh dimensions along which parameters that are cut (DTensors) belong
            to the rank that has them, as experts do: ``loss_fn`` gets that part, or finds it in
            the module, and brings the tokens to it. Their gradients are whole there.
        gather: functional shards are gathered once in a "window", or in each "micro-step", where
            no rank holds a whole gradient.
        lockstep: ``loss_fn`` has collectives of its own. Then ranks are given as many micro-steps,
            of which those without a batch repeat one with sums of zero. So it is with FSDP2, with
            ``owned_over``, and where each micro-step gathers.
        equal_steps: all ranks are known to have as many micro-steps; in lockstep it saves the small
            all-reduce of their counts.

    Returns:
        A function of ``params`` and the window of this rank. ``params`` are a replicated pytree; a
        tree from ``shard``, whose gradient has its shards; or a module: plain or DDP (replicated),
        or FSDP2, which is set to SUM. It leaves params, ``.grad`` and random state as they were.

    Raises:
        RankError: by the result, when a loss function raised on some rank.
        PlanError: by the result, when the plan cannot express the objective.
        EmptyWindowError: by the result, see ``on_empty``.
        NonFiniteLossError: by the result, naming term, micro-step and rank.
        TermStructureError: by the result, when terms do not fit together, or ranks differ.
        ValueError: by the result, when params lie on other ranks than the window.

    Examples:
        >>> from numden.pure import LossTerms
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> window_grad(loss_fn)(torch.tensor(1.0), [torch.tensor([8.0])]).grads
        tensor(8.)
    """
    require_known(plan)
    require_on_empty(on_empty)
    _require_gather(gather)
    if den_fn is not None and plan == "auto":
        plan = "before"
    spec = Spec(
        objective, plan, accumulate_dtype=accumulate_dtype, on_empty=on_empty, den_fn=den_fn
    )

    owned = dim_names(owned_over)

    def grad(params: Any, window: Iterable[Any]) -> WindowGrad:
        axes = data_axes(mesh, group)
        if axes is None:
            return run(spec, loss_fn, params, window)
        _refuse_transforms()
        if is_fsdp(params):
            return fsdp_window(
                spec, loss_fn, params, window, axes, owned_over=owned, equal_steps=equal_steps
            )
        loss, own, first = _on_rank(loss_fn, params, owned, gather)
        reduce = sum_partial(reduction_rules(params, axes, owned), axes, first=first)
        if lockstep or owned or gather == "micro-step":
            result = lockstep_window(
                spec, loss, own, window, axes.group, reduce, equal_steps=equal_steps
            )
        else:
            result = whole_window(spec, loss, own, window, axes.group, reduce)
        if isinstance(params, DistributedDataParallel):
            result = result._replace(grads={f"module.{k}": v for k, v in result.grads.items()})
        return result

    return grad


class _OnRank(NamedTuple):
    """What a rank differentiates, and what is done to its gradients before they are summed."""

    loss_fn: LossFn
    params: Any
    first: Callable[[Any], Any] | None


def _on_rank(loss_fn: LossFn, params: Any, owned: tuple[str, ...], gather: Gather) -> _OnRank:
    if isinstance(params, DistributedDataParallel):
        # Its own reduction is per backward pass; without its forward it has nothing to do.
        return _OnRank(loss_fn, params.module, None)
    if isinstance(params, nn.Module) or not is_sharded(params):
        return _OnRank(loss_fn, params, None)
    if gather == "micro-step":
        whole_loss = gathering(loss_fn, params, owned_over=owned)
        return _OnRank(whole_loss, local(params), partial(wrap, like=params))
    whole = gather_shards(params, owned_over=owned)
    return _OnRank(loss_fn, whole, partial(scatter, like=params, owned_over=owned))


def window_value(
    loss_fn: LossFn,
    objective: Objective = term_mean(),
    *,
    mesh: DeviceMesh | None = None,
    group: c10d.ProcessGroup | None = None,
    on_empty: OnEmpty = "raise",
    owned_over: str | Sequence[str] = (),
    lockstep: bool = False,
) -> Callable[[Any, Iterable[Any]], WindowValue]:
    """The loss of a window over all ranks, for evaluation: ``(params, window) -> WindowValue``.

    As ``numden.pure.window_value``, with one all-reduce of all sums (and one of the counts for an
    FSDP2 module). Ranks may have different numbers of batches, also none.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        objective: from totals to the loss.
        mesh: see ``window_grad``.
        group: see ``window_grad``.
        on_empty: see ``window_grad``.
        owned_over: see ``window_grad``.
        lockstep: see ``window_grad``.

    Raises:
        RankError: by the result, when a loss function raised on some rank.

    Examples:
        >>> from numden.pure import LossTerms
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> window_value(loss_fn)(torch.tensor(1.0), [torch.tensor([8.0, 4.0])]).loss
        tensor(6., dtype=torch.float64)
    """
    require_on_empty(on_empty)

    spec = Spec(objective, "after", on_empty=on_empty)

    owned = dim_names(owned_over)

    def value(params: Any, window: Iterable[Any]) -> WindowValue:
        axes = data_axes(mesh, group)
        if axes is None:
            return window_value_of_one_rank(loss_fn, objective, on_empty=on_empty)(params, window)
        _refuse_transforms()
        if is_fsdp(params):
            return fsdp_value(spec, loss_fn, params, window, axes)
        _, own, _ = _on_rank(loss_fn, params, owned, "window")
        evaluate = lockstep_value if lockstep or owned else whole_value
        return evaluate(spec, loss_fn, own, window, axes.group)

    return value


def _require_gather(gather: str) -> None:
    if gather not in get_args(Gather):
        raise ValueError(
            f"window_grad: gather must be one of {get_args(Gather)}, got gather={gather!r}."
        )


def _refuse_transforms() -> None:
    if inside():
        raise TypeError(
            "window: over ranks it cannot run inside a torch.func transform, whose gradients "
            "would be local. Differentiate a loss with numden.dist.psum and all_gather instead."
        )
