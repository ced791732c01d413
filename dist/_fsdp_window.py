"""Windows on an FSDP2 module, which gathers and reduces in its own passes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .. import pure
from ..pure import LossFn, PlanError, WindowGrad, WindowValue, tree
from ..pure._carry import Spec
from ..pure.plans import DenFn
from ..pure.window import run
from ._micro_steps import MicroStep, equal_window, even_window, neutral_when_idle
from ._ranks import require_ranks
from ._whole_window import collectives_of, empty_window
from .fsdp import abort_with, reshard, sum_gradients
from .reduction import ReduceGrads, WindowCollectives, sum_replicated

__all__ = ["fsdp_value", "fsdp_window", "is_fsdp"]


def is_fsdp(params: Any) -> bool:
    """Whether FSDP2 gathers and reduces parameters of ``params``."""
    return isinstance(params, nn.Module) and any(
        isinstance(each, FSDPModule) for each in params.modules()
    )


def fsdp_window(
    spec: Spec,
    loss_fn: LossFn,
    module: Any,
    window: Iterable[Any],
    group: c10d.ProcessGroup,
    *,
    equal_steps: bool,
) -> WindowGrad:
    """The loss of a window over ranks and its gradient."""
    _prepare(module, group)
    _refuse_dtypes(spec, module)
    spec = replace(spec, max_columns=0)
    collectives = collectives_of(spec, group, _sum_ignored(group))
    spec = replace(spec, reduction=collectives.reduction, den_fn=_of_live(spec.den_fn))
    even = None if equal_steps else even_window(window, group)
    with _or_abort(module, collectives):
        steps = equal_window(window) if even is None else even
        if not steps:
            return empty_window(spec, module, collectives)
        neutral = neutral_when_idle(loss_fn, module, reduce_each=spec.plan == "columns")
        result = run(spec, neutral, module, steps)
        collectives.settle()
        return result


def fsdp_value(
    spec: Spec, loss_fn: LossFn, module: Any, window: Iterable[Any], group: c10d.ProcessGroup
) -> WindowValue:
    """The loss of a window over ranks."""
    _prepare(module, group)
    collectives = collectives_of(spec, group, None)
    steps = even_window(window, group)
    with _or_abort(module, collectives):
        if not steps:
            loss, _, terms, metrics = empty_window(spec, {}, collectives)
            return WindowValue(loss, terms, metrics)
        evaluate = pure.window_value(
            neutral_when_idle(loss_fn, module, reduce_each=False),
            spec.objective,
            reduction=collectives.reduction,
            on_empty=spec.on_empty,
        )
        result = evaluate(module, steps)
        collectives.settle()
        return result


def _prepare(module: nn.Module, group: c10d.ProcessGroup) -> None:
    if not isinstance(module, FSDPModule):
        raise TypeError(
            f"window: a module with FSDP2 modules in it must be one, got {type(module).__name__}. "
            "Call fully_shard on the whole module after its blocks."
        )
    sum_gradients(module)
    reshard(module)
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    for mesh in meshes:  # of several dimensions, one may be a dimension that cuts tensors
        require_ranks("an FSDP2 module", mesh, group, or_more=mesh.ndim > 1)


@contextmanager
def _or_abort(module: Any, collectives: WindowCollectives) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if collectives.over:
            raise  # found at the end, from what all ranks know
        abort_with(error, collectives.group)
    finally:
        module.set_requires_gradient_sync(True)


def _sum_ignored(group: c10d.ProcessGroup) -> ReduceGrads:
    """Sum the gradients of parameters that FSDP2 was told to ignore, if there are any."""

    def reduce(grads: dict[str, Tensor], flag: Tensor) -> dict[str, Tensor]:
        ignored = {name: grad for name, grad in grads.items() if not isinstance(grad, DTensor)}
        return grads | sum_replicated(group)(ignored, flag) if ignored else grads

    return reduce


def _of_live(den_fn: DenFn | None) -> DenFn | None:
    """``den_fn`` on the ``MicroStep`` of an FSDP2 window."""
    if den_fn is None:
        return None

    def dens(step: MicroStep) -> Any:
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
        raise PlanError(
            "window_grad: FSDP2 would reduce raw sums of float16 gradients, which overflow. Use "
            "plan='before' with a den_fn, or bfloat16."
        )
