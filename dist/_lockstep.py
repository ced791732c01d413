"""Windows whose micro-steps the ranks run together, since each has collectives of its own.

FSDP2 gathers layers, experts get tokens from other ranks, attention reads keys of other shards of a
sequence. All ranks must run as many passes, and one that fails within a pass cannot go on.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d

from .. import pure
from ..pure import LossFn, PlanError, WindowGrad, WindowValue, tree
from ..pure._carry import Spec
from ..pure._leaves import attach
from ..pure.plans import DenFn
from ..pure.window import run
from ._micro_steps import MicroStep, equal_window, even_window, neutral_when_idle, one_plan
from ._whole_window import collectives_of, empty_window
from .fsdp import abort_with
from .reduction import ReduceGrads, WindowCollectives

__all__ = ["lockstep_value", "lockstep_window"]

OnStep = Callable[[MicroStep], None]


def lockstep_window(
    spec: Spec,
    loss_fn: LossFn,
    params: Any,
    window: Iterable[Any],
    group: c10d.ProcessGroup,
    reduce_grads: ReduceGrads,
    *,
    equal_steps: bool,
    on_step: OnStep | None = None,
) -> WindowGrad:
    """The loss of a window over ranks and its gradient.

    Args:
        spec: of the window.
        loss_fn: with collectives.
        params: of ``loss_fn``.
        window: of this rank.
        group: the ranks.
        reduce_grads: for what the passes have not summed.
        equal_steps: ranks have as many micro-steps, so that no counts are exchanged.
        on_step: called before the forward pass of each micro-step.
    """
    _refuse_float16(spec, params)
    collectives = collectives_of(spec, group, reduce_grads)
    spec = replace(
        spec,
        reduction=collectives.reduction,
        den_fn=_of_live(spec.den_fn),
        settle_plan=partial(one_plan, group=group),
    )
    even = None if equal_steps else even_window(window, group)
    with _or_abort(collectives):
        steps = equal_window(window) if even is None else even
        if not steps:
            return empty_window(spec, params, collectives)
        result = run(spec, neutral_when_idle(loss_fn, on_step), params, steps)
        collectives.settle()
        return result


def lockstep_value(
    spec: Spec,
    loss_fn: LossFn,
    params: Any,
    window: Iterable[Any],
    group: c10d.ProcessGroup,
) -> WindowValue:
    """The loss of a window over ranks."""
    collectives = collectives_of(spec, group, None)
    steps = even_window(window, group)
    with _or_abort(collectives):
        if not steps:
            loss, _, terms, metrics = empty_window(spec, {}, collectives)
            return WindowValue(loss, terms, metrics)
        evaluate = pure.window_value(
            neutral_when_idle(loss_fn),
            spec.objective,
            reduction=collectives.reduction,
            on_empty=spec.on_empty,
        )
        result = evaluate(params, steps)
        collectives.settle()
        return result


@contextmanager
def _or_abort(collectives: WindowCollectives) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if collectives.known_to_all(error):
            raise
        abort_with(error, collectives.group)


def _refuse_float16(spec: Spec, params: Any) -> None:
    """Each rank would keep its raw sums in range by a scale of its own, and then they are added."""
    given_after = spec.plan in ("after", "columns", "auto")
    if given_after and any(leaf.dtype == torch.float16 for leaf in attach(params).tensors):
        raise PlanError(
            "window_grad: where a micro-step has collectives, as with FSDP2, ranks would add raw "
            "sums of float16 gradients, which overflow. Use plan='before' with a den_fn, "
            "plan='replay', or bfloat16."
        )


def _of_live(den_fn: DenFn | None) -> DenFn | None:
    """``den_fn`` of a ``MicroStep``."""
    if den_fn is None:
        return None

    def dens(step: MicroStep) -> Any:
        counted = den_fn(step.batch)
        return counted if step.live else tree.map(lambda leaf: leaf * 0, counted)

    return dens
