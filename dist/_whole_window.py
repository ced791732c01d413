"""Windows on params that each rank holds in whole, with or without a micro-step of its own."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d

from .. import pure
from ..pure import FirstPass, LossFn, WindowGrad, WindowValue, tree
from ..pure._carry import Spec
from ..pure._finish import finish
from ..pure._leaves import attach, zero_grads
from ..pure._micro_step import init
from ..pure.window import batches_of, run
from ._packed import Packed, pack, unpack
from .reduction import ReduceGrads, WindowCollectives

__all__ = ["collectives_of", "empty_window", "whole_value", "whole_window"]


def collectives_of(
    spec: Spec, group: c10d.ProcessGroup, reduce_grads: ReduceGrads | None
) -> WindowCollectives:
    """The collectives of a window; ``reduce_grads`` is None where there are no gradients."""
    return WindowCollectives(
        group, reduce_grads, num_totals=_num_totals(spec), on_empty=spec.on_empty
    )


def _num_totals(spec: Spec) -> int:
    return 2 if spec.plan == "before" else 1


def whole_window(
    spec: Spec,
    loss_fn: LossFn,
    params: Any,
    window: Iterable[Any],
    group: c10d.ProcessGroup,
    reduce_grads: ReduceGrads,
) -> WindowGrad:
    """The loss of a window over ranks and its gradient."""
    collectives = collectives_of(spec, group, reduce_grads)
    spec = replace(spec, reduction=collectives.reduction)
    try:
        batches = batches_of(window)
        for first in batches:
            result = run(spec, loss_fn, params, itertools.chain([first], batches))
            collectives.settle()
            return result
        return empty_window(spec, params, collectives)
    except Exception as error:
        collectives.abandon(error, lambda: _zeros(spec, params))
        raise


def whole_value(
    spec: Spec, loss_fn: LossFn, params: Any, window: Iterable[Any], group: c10d.ProcessGroup
) -> WindowValue:
    """The loss of a window over ranks."""
    collectives = collectives_of(spec, group, None)
    evaluate = pure.window_value(
        loss_fn, spec.objective, reduction=collectives.reduction, on_empty=spec.on_empty
    )
    try:
        batches = batches_of(window)
        for first in batches:
            result = evaluate(params, itertools.chain([first], batches))
            collectives.settle()
            return result
        loss, _, terms, metrics = empty_window(spec, {}, collectives)
        return WindowValue(loss, terms, metrics)
    except Exception as error:
        collectives.abandon(error, dict)
        raise


def _zeros(spec: Spec, params: Any) -> Any:
    leaves = attach(params)
    return tree.unflatten(leaves.structure, zero_grads(leaves, spec.accumulate_dtype))


def empty_window(spec: Spec, params: Any, collectives: WindowCollectives) -> WindowGrad:
    """Take part without a micro-step: zeros to each sum, whose structure the others tell."""
    if collectives.unheard():
        raise ValueError(
            "window: on_empty='skip' reads nothing on the host, so a rank without a batch "
            "cannot learn the terms of the others. Give each rank a batch, or use 'zero'."
        )
    nothing = [
        pack(None, failed=False, device=collectives.device) for _ in range(_num_totals(spec))
    ]
    received = [collectives.start(packed)() for packed in nothing]
    grads = collectives.grads(_zeros(spec, params))
    agreed = torch.ones((), dtype=torch.bool)
    if spec.on_empty == "skip":
        agreed = collectives.agree(agreed)
    gathered = collectives.gather((None, None, None)) if collectives.in_trouble() else {}
    like = next((like for _, _, like in gathered.values() if like is not None), None)
    told = pure.Reduction(
        totals=lambda sums: sums,
        grads=lambda _: grads,
        reports=lambda _: [(rank, text) for rank, (_, text, _) in gathered.items()],
        agree=lambda good: good & agreed,
    )
    carry = init(replace(spec, plan="after"), attach(params))
    if like is not None:
        sums, faults = tree.map(
            lambda leaf: leaf.to(collectives.device), unpack(received[-1], like)
        )
        totals = sums, torch.cat([faults, torch.ones_like(faults[:1])])  # one more, to hear reports
        carry = carry._replace(totals=totals, known=_known(spec, received, totals))
    return finish(replace(spec, reduction=told), carry)


def _known(spec: Spec, received: list[Packed], totals: Any) -> Any:
    if spec.plan == "before":
        return unpack(received[0], totals[0].terms.den)
    return FirstPass(None, None, totals) if spec.plan == "replay" else None
