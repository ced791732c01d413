"""A window on each of several processes, and one result of what they made."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...dist import run_local
from ...pure import tree
from ..violation import LawViolation, check_equal
from ..worlds.world import StepResult, World
from ._module import load, make_step, named_params, require_ranks, values_of
from ._reading import Window, rank_windows

__all__ = [
    "ReplicasDiffer",
    "agreed",
    "leave_group_of_one",
    "make_process_step",
    "on_each_rank",
]


class ReplicasDiffer(LawViolation):
    """Ranks end a step with different gradients or params, so they no longer train one model.

    Attributes:
        results: the result of each rank.
    """

    def __init__(self, found: LawViolation, results: Sequence[StepResult]):
        super().__init__(found.law, found.rule, found.differences, found.cause)
        self.results = tuple(results)


class _Left(NamedTuple):
    """What a rank leaves: its result, and its own part of each ``.grad``."""

    result: StepResult
    grads: dict[str, Tensor | None]


def make_process_step(
    run: Callable[[nn.Module, Any, Window], StepResult],
    module: nn.Module,
    name: str,
    num_ranks: int | None,
    *,
    subject: Any,
    wrap: Callable[[nn.Module, Window], nn.Module] | None = None,
    require: Callable[[str, World], None] | None = None,
    timeout: float,
) -> Any:
    """A step that has a new process for each rank, which knows of earlier calls ``.grad`` alone.

    Args:
        run: ``(module, params, window) -> result``, on each rank.
        module: gets the params at each call.
        name: of the adapter.
        num_ranks: the number of ranks that the step runs on; any number if None.
        subject: what the adapter was given.
        wrap: makes of the module what ``run`` gets.
        require: ``(name, world)`` raises for a world that cannot be run.
        timeout: seconds for one call.
    """
    left: dict[int, list[_Left]] = {}

    def step(params: Any, world: World) -> StepResult:
        require_ranks(name, world, num_ranks)
        if require is not None:
            require(name, world)
        before = left.get(len(world))

        def on_rank(window: Window) -> _Left:
            load(module, params)
            ours = wrap(module, window) if wrap else module
            _restore_grads(ours, params, before[window.rank].grads if before else {})
            result = run(ours, params, window)
            return _Left(result, _own_grads(ours, params))

        left[len(world)] = ranks = on_each_rank(on_rank, world, timeout=timeout)
        return agreed([rank.result for rank in ranks])

    return make_step(step, name, subject, num_ranks)


def on_each_rank(fn: Callable[[Window], Any], world: World, *, timeout: float) -> list[Any]:
    """``fn(window)`` on a process for each rank of ``world``, in a group of gloo; by rank."""
    windows = rank_windows(world)

    def on_rank() -> Any:
        gc.freeze()  # trainers collect garbage at each start; let them leave the caller's alone
        return fn(windows[c10d.get_rank()])

    return run_local(on_rank, len(windows), timeout=timeout)


def leave_group_of_one() -> None:
    """Be a process that no launcher started, if this rank is the only one."""
    if c10d.get_world_size() == 1:
        c10d.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def agreed(results: Sequence[StepResult]) -> StepResult:
    """The result of rank 0, after all ranks were found to have its gradients and params.

    The loss may differ: rank 0 is the one that logs.

    Raises:
        ReplicasDiffer: they differ.
    """
    first, *others = map(_values, results)
    for rank, other in enumerate(others, start=1):
        try:
            check_equal(
                "replicas",
                f"rank {rank} must end with the gradients and the params of rank 0.",
                "a gradient that is not reduced over the ranks, as that of the last micro-step.",
                first,
                other,
            )
        except LawViolation as found:
            raise ReplicasDiffer(found, results) from None
    return results[0]


def _values(result: StepResult) -> dict[str, Tensor]:
    fields = {"grads": result.grads, "params": result.params}
    values = {}
    for root, field in fields.items():
        values |= {n: torch.as_tensor(leaf) for n, leaf in tree.named(field, root).items()}
    return {name: value.nan_to_num() for name, value in values.items()}


def _own_grads(module: nn.Module, params: Any) -> dict[str, Tensor | None]:
    return {name: _local(p.grad) for name, p in named_params(module, values_of(params)).items()}


def _local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _restore_grads(module: nn.Module, params: Any, grads: Mapping[str, Tensor | None]) -> None:
    for name, param in named_params(module, values_of(params)).items():
        grad = grads.get(name, param.grad)
        if isinstance(grad, Tensor) and isinstance(param, DTensor):
            grad = DTensor.from_local(
                grad,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        param.grad = grad
