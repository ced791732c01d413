"""The sums of gradients that are still partial at the end of a window, by the rules of a layout."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ..pure import tree
from ._data_axes import DataAxes
from .layout import By, Rule
from .reduction import ReduceGrads
from .sharding import local_part

__all__ = ["sum_partial"]

_Kind = tuple[tuple[str, ...], torch.dtype]
"""Over which mesh dimensions, and in which dtype."""


def sum_partial(
    rules: Sequence[Rule], axes: DataAxes, *, first: Callable[[Any], Any] | None = None
) -> ReduceGrads:
    """Sum gradients in place: one coalesced all-reduce for each set of ranks and dtype.

    Args:
        rules: in the order of the leaves of gradients.
        axes: of the window.
        first: what is done to the tree before, such as ``scatter``.
    """

    def reduce(grads: Any, flag: Tensor) -> Any:
        grads = first(grads) if first else grads
        parts: dict[_Kind, list[Tensor]] = defaultdict(list)
        for leaf, rule in zip(tree.leaves(grads), rules, strict=True):
            if over := rule.over(By.WINDOW):
                parts[over, leaf.dtype].append(local_part(leaf))
        rider = _with_flag(parts, axes.names, flag)
        for (over, _), tensors in parts.items():
            group = axes.group_over(over)
            group.allreduce_coalesced(tensors, c10d.AllreduceCoalescedOptions()).wait()
        flag.copy_(rider)
        return grads

    return reduce


def _with_flag(parts: dict[_Kind, list[Tensor]], names: tuple[str, ...], flag: Tensor) -> Tensor:
    """The flag in the dtype of some gradients that go to all ranks, beside them, or alone."""
    # In the dtype of gradients the flag costs no collective of its own.
    kind = next((kind for kind in parts if kind[0] == names), (names, flag.dtype))
    rider = flag.to(parts[kind][0]) if parts[kind] else flag.clone()
    parts[kind].append(rider)
    return rider
