"""The loss of a window and its gradient over ranks: ``numden.pure``'s, with a reduction."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .. import pure
from ..pure import FirstPass, LossFn, Objective, WindowGrad, WindowValue, term_mean, tree
from ..pure._carry import Spec
from ..pure._finish import finish
from ..pure._leaves import attach, zero_grads
from ..pure._micro_step import init
from ..pure._status import OnEmpty, require_on_empty
from ..pure._transforms import inside
from ..pure.plans import DenFn, require_known
from ..pure.window import run
from ._packed import Packed, pack, unpack
from ._ranks import data_group
from .fsdp import (
    abort_with,
    even_window,
    is_fsdp,
    neutral_when_idle,
    reshard,
    split_by_reducer,
    sum_gradients,
)
from .reduction import ReduceGrads, WindowCollectives, sum_replicated
from .sharding import gather, is_sharded, sum_to_shards

__all__ = ["window_grad", "window_value"]


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
    equal_steps: bool = False,
) -> Callable[[Any, Iterable[Any]], WindowGrad]:
    """The loss of a window over all ranks and its gradient: ``(params, window) -> WindowGrad``.

    As ``numden.pure.window_grad``: the loss is the objective of the sums over all micro-steps of
    all ranks, the same on each rank. Per window there is one all-reduce of all sums, packed in
    float64 and started before the last backward pass, and the SUM of the gradients; none in a
    micro-step. (Plan "before" has one all-reduce more.)

    Ranks may have different numbers of micro-steps, also none. When a loss function raises on one
    rank, or ranks return different terms, all ranks raise the same error in this window.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``, of this rank's tokens
            alone: no collective, no factor of the number of ranks.
        objective: the pure function f from total terms to the scalar loss.
        mesh: the ranks over which tokens are split (data, and sequence where it is split), all
            dimensions of it.
        group: the same as a process group; all ranks where neither is given.
        plan: see ``numden.pure.window_grad``. "auto" prefers "replay" to "columns" for an FSDP2
            module, which would have to reduce in each micro-step.
        den_fn: ``(batch) -> den``, for plan "before".
        accumulate_dtype: of the gradients, while they are accumulated and summed.
        on_empty: "raise", "zero" or "skip", decided by the totals over ranks.
        equal_steps: all ranks are known to have as many micro-steps; saves an FSDP2 module the
            small all-reduce of their counts.

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

    Examples:
        >>> from numden.pure import LossTerms
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> window_grad(loss_fn)(torch.tensor(1.0), [torch.tensor([8.0])]).grads
        tensor(8.)
    """
    require_known(plan)
    require_on_empty(on_empty)
    if den_fn is not None and plan == "auto":
        plan = "before"
    spec = Spec(
        objective, plan, accumulate_dtype=accumulate_dtype, on_empty=on_empty, den_fn=den_fn
    )

    def grad(params: Any, window: Iterable[Any]) -> WindowGrad:
        ranks = data_group(mesh, group)
        if ranks is None:
            return run(spec, loss_fn, params, window)
        _refuse_transforms()
        if is_fsdp(params):
            return _fsdp_window(spec, loss_fn, params, window, ranks, equal_steps=equal_steps)
        if is_sharded(params):
            reduce = sum_to_shards(params, ranks)
            return _window(spec, loss_fn, gather(params), window, ranks, reduce)
        if isinstance(params, DistributedDataParallel):
            # Its own reduction is per backward pass; without its forward it has nothing to do.
            result = _window(spec, loss_fn, params.module, window, ranks, sum_replicated(ranks))
            return result._replace(grads={f"module.{k}": v for k, v in result.grads.items()})
        return _window(spec, loss_fn, params, window, ranks, sum_replicated(ranks))

    return grad


def _refuse_transforms() -> None:
    if inside():
        raise TypeError(
            "window_grad: over ranks it cannot run inside a torch.func transform, whose gradients "
            "would be local. Differentiate a loss with numden.dist.psum and all_gather instead."
        )


def _window(
    spec: Spec,
    loss_fn: LossFn,
    params: Any,
    window: Iterable[Any],
    group: c10d.ProcessGroup,
    reduce_grads: ReduceGrads,
) -> WindowGrad:
    """One window on params that each rank holds in whole."""
    collectives = WindowCollectives(group, reduce_grads, num_totals=_num_totals(spec))
    spec = replace(spec, reduction=collectives.reduction)
    try:
        batches = iter(window)
        for first in batches:
            result = run(spec, loss_fn, params, itertools.chain([first], batches))
            if spec.on_empty == "skip":
                collectives.settle()
            return result
        return _empty_window(spec, params, collectives)
    except Exception as error:
        collectives.abandon(error, lambda: _zeros(spec, params))
        raise


def _num_totals(spec: Spec) -> int:
    return 2 if spec.plan == "before" else 1


def _zeros(spec: Spec, params: Any) -> Any:
    leaves = attach(params)
    return tree.unflatten(leaves.structure, zero_grads(leaves, spec.accumulate_dtype))


def _empty_window(spec: Spec, params: Any, collectives: WindowCollectives) -> WindowGrad:
    """Take part without a micro-step: zeros to each sum, whose structure the others tell."""
    if spec.on_empty == "skip" and collectives.device.type != "cpu":
        raise ValueError(
            "window_grad: on_empty='skip' reads nothing on the host, so a rank without a batch "
            "cannot learn the terms of the others. Give each rank a batch, or use 'zero'."
        )
    nothing = [
        pack(None, failed=False, device=collectives.device) for _ in range(_num_totals(spec))
    ]
    received = [collectives.start(packed)() for packed in nothing]
    grads = collectives.grads(_zeros(spec, params))
    gathered = collectives.gather((None, None, None)) if collectives.in_trouble() else []
    like = next((like for _, _, like in gathered if like is not None), None)
    told = pure.Reduction(
        totals=lambda sums: sums,
        grads=lambda _: grads,
        reports=lambda _: [(rank, text) for rank, (_, text, _) in enumerate(gathered)],
    )
    carry = init(replace(spec, plan="after"), attach(params))
    if like is not None:
        totals = _on(collectives.device, unpack(received[-1], like))
        carry = carry._replace(totals=totals, known=_known(spec, received, totals))
    return finish(replace(spec, reduction=told), carry)


def _known(spec: Spec, received: list[Packed], totals: Any) -> Any:
    if spec.plan == "before":
        return unpack(received[0], totals[0].terms.den)
    return FirstPass(None, None, totals) if spec.plan == "replay" else None


def _on(device: torch.device, sums: Any) -> Any:
    return tree.map(lambda leaf: leaf.to(device), sums)


def _fsdp_window(
    spec: Spec,
    loss_fn: LossFn,
    module: Any,
    window: Iterable[Any],
    group: c10d.ProcessGroup,
    *,
    equal_steps: bool,
) -> WindowGrad:
    """One window on an FSDP2 module, which gathers and reduces in its own passes."""
    sum_gradients(module)
    reshard(module)
    _refuse_dtypes(spec, module)
    spec = replace(spec, max_columns=0)
    collectives = WindowCollectives(group, _sum_ignored(group), num_totals=_num_totals(spec))
    spec = replace(spec, reduction=collectives.reduction, den_fn=_of_live(spec.den_fn))
    steps = neutral_when_idle(loss_fn, module, reduce_each=spec.plan == "columns")
    try:
        return run(spec, steps, module, even_window(window, group, equal_steps=equal_steps))
    except Exception as error:
        if collectives.over:
            raise  # found at the end, from what all ranks know
        abort_with(error, group)
        raise
    finally:
        module.set_requires_gradient_sync(True)


def _sum_ignored(group: c10d.ProcessGroup) -> ReduceGrads:
    """Sum the gradients of parameters that FSDP2 was told to ignore, if there are any."""

    def reduce(grads: Any, flag: Tensor) -> Any:
        done, ignored = split_by_reducer(grads)
        if ignored:
            ignored = sum_replicated(group)(ignored, flag)
        return {name: done[name] if name in done else ignored[name] for name in grads}

    return reduce


def _of_live(den_fn: DenFn | None) -> DenFn | None:
    """``den_fn`` on the ``MicroStep`` of an FSDP2 window."""
    if den_fn is None:
        return None

    def dens(step: Any) -> Any:
        counted = den_fn(step.batch)
        return counted if step.live else tree.map(lambda leaf: leaf * 0, counted)

    return dens


def _refuse_dtypes(spec: Spec, module: nn.Module) -> None:
    if spec.accumulate_dtype is not None:
        raise ValueError(
            f"window_grad: FSDP2 accumulates and reduces in its own dtype, got accumulate_dtype="
            f"{spec.accumulate_dtype}. Give fully_shard MixedPrecisionPolicy(reduce_dtype=...)."
        )
    if spec.plan in ("after", "auto") and any(
        p.dtype == torch.float16 for p in module.parameters()
    ):
        raise pure.PlanError(
            "window_grad: FSDP2 would reduce raw sums of float16 gradients, which overflow. Use "
            "plan='before' with a den_fn, or bfloat16."
        )


def window_value(
    loss_fn: LossFn,
    objective: Objective = term_mean(),
    *,
    mesh: DeviceMesh | None = None,
    group: c10d.ProcessGroup | None = None,
    on_empty: OnEmpty = "raise",
) -> Callable[[Any, Iterable[Any]], WindowValue]:
    """The loss of a window over all ranks, for evaluation: ``(params, window) -> WindowValue``.

    As ``numden.pure.window_value``, with one all-reduce of all sums. Ranks may have different
    numbers of batches, also none, except with an FSDP2 module, whose forward passes must be the
    same number on all ranks.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        objective: from totals to the loss.
        mesh: see ``window_grad``.
        group: see ``window_grad``.
        on_empty: see ``window_grad``.

    Raises:
        RankError: by the result, when a loss function raised on some rank.

    Examples:
        >>> from numden.pure import LossTerms
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> window_value(loss_fn)(torch.tensor(1.0), [torch.tensor([8.0, 4.0])]).loss
        tensor(6., dtype=torch.float64)
    """
    require_on_empty(on_empty)

    def value(params: Any, window: Iterable[Any]) -> WindowValue:
        ranks = data_group(mesh, group)
        if ranks is None:
            return pure.window_value(loss_fn, objective, on_empty=on_empty)(params, window)
        _refuse_transforms()
        collectives = WindowCollectives(ranks, None)
        evaluate = pure.window_value(
            loss_fn, objective, reduction=collectives.reduction, on_empty=on_empty
        )
        try:
            batches = iter(window)
            for first in batches:
                result = evaluate(params, itertools.chain([first], batches))
                if on_empty == "skip":
                    collectives.settle()
                return result
            spec = Spec(objective, "after", on_empty=on_empty)
            loss, _, terms, metrics = _empty_window(spec, {}, collectives)
            return WindowValue(loss, terms, metrics)
        except Exception as error:
            collectives.abandon(error, dict)
            raise

    return value
