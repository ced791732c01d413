"""Windows on an FSDP2 module, which gathers and reduces in its own passes."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..pure import LossFn, WindowGrad, WindowValue
from ..pure._carry import Spec
from ._data_axes import DataAxes
from ._lockstep import lockstep_value, lockstep_window
from ._micro_steps import MicroStep
from ._sum_partial import sum_partial
from .fsdp import reshard, sum_gradients
from .layout import By, reduction_rules
from .reduction import ReduceGrads

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
    axes: DataAxes,
    *,
    owned_over: tuple[str, ...],
    equal_steps: bool,
) -> WindowGrad:
    """The loss of a window over ranks and its gradient."""
    _prepare(module)
    _refuse_dtype(spec)
    reduce = _sum_the_rest(module, axes, owned_over)
    reduce_each = spec.plan == "columns"

    def on_step(step: MicroStep) -> None:
        module.set_requires_gradient_sync(step.last or reduce_each)

    try:
        return lockstep_window(
            replace(spec, max_columns=0),
            loss_fn,
            module,
            window,
            axes.group,
            reduce,
            equal_steps=equal_steps,
            on_step=on_step,
        )
    finally:
        module.set_requires_gradient_sync(True)


def fsdp_value(
    spec: Spec, loss_fn: LossFn, module: Any, window: Iterable[Any], axes: DataAxes
) -> WindowValue:
    """The loss of a window over ranks."""
    _prepare(module)
    return lockstep_value(spec, loss_fn, module, window, axes.group)


def _prepare(module: nn.Module) -> None:
    if not isinstance(module, FSDPModule):
        raise TypeError(
            f"window: a module with FSDP2 modules in it must be one, got {type(module).__name__}. "
            "Call fully_shard on the whole module after its blocks."
        )
    sum_gradients(module)
    reshard(module)


def _sum_the_rest(module: nn.Module, axes: DataAxes, owned_over: tuple[str, ...]) -> ReduceGrads:
    """Sum what FSDP2 has not: parameters that it ignores, and dimensions that it does not know."""
    rules = reduction_rules(module, axes, owned_over)
    if any(rule.over(By.WINDOW) for rule in rules):
        return sum_partial(rules, axes)
    return lambda grads, flag: grads


def _refuse_dtype(spec: Spec) -> None:
    if spec.accumulate_dtype is not None:
        raise ValueError(
            f"window_grad: FSDP2 accumulates and reduces in its own dtype, got accumulate_dtype="
            f"{spec.accumulate_dtype}. Give fully_shard MixedPrecisionPolicy(reduce_dtype=...)."
        )
