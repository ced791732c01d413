"""A window on each of several processes, and one result of what they made."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ...dist import run_local
from ...pure import tree
from ..checker.world import StepResult
from ..violation import LawViolation, check_equal
from ._reading import Window, rank_windows

__all__ = ["ReplicasDiffer", "agreed", "on_each_rank"]


class ReplicasDiffer(LawViolation):
    """Ranks end a step with different gradients or params, so they no longer train one model.

    Attributes:
        results: the result of each rank.
    """

    def __init__(self, found: LawViolation, results: Sequence[StepResult]):
        super().__init__(found.law, found.rule, found.differences, found.cause)
        self.results = tuple(results)


def on_each_rank(fn: Callable[[Window], Any], world: Any, *, timeout: float) -> list[Any]:
    """``fn(window)`` on a process for each rank of ``world``, in a group of gloo; by rank."""
    windows = rank_windows(world)

    def on_rank() -> Any:
        return fn(windows[c10d.get_rank()])

    return run_local(on_rank, len(windows), timeout=timeout)


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
        names = tree.names(field, root)
        values |= dict(zip(names, map(torch.as_tensor, tree.leaves(field)), strict=True))
    return {name: value.nan_to_num() for name, value in values.items()}
