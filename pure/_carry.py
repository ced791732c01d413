"""The state of a window between micro-steps, what goes into it and what comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._status import OnEmpty
from ._sums import Sums
from .objective import Objective
from .plans import MAX_COLUMNS, DenFn
from .terms import LossTerms
from .tree import PyTree

__all__ = ["LOCAL", "Carry", "FirstPass", "Reduction", "Spec", "WindowGrad"]


def _same(values: PyTree) -> PyTree:
    return values


def _one_rank(report: str | None) -> Sequence[tuple[int | None, str | None]]:
    return [(None, report)]


class Reduction(NamedTuple):
    """How sums and gradients are summed over ranks.

    Attributes:
        totals: sums a pytree of small float64 tensors over ranks; called once per window, as soon
            as the last sum exists. It gets None on a rank whose window is empty.
        grads: sums a pytree of gradients over ranks; called once per window.
        reports: gathers, once a fault is known on each rank, what each rank says of its own:
            pairs of rank and text, both None where there is nothing to say.
        agree: from whether the window is good on this rank to whether it is on all; called once
            per window under ``on_empty="skip"``, where no rank raises what it alone has seen.

    Examples:
        >>> LOCAL.totals({"num": 3.0})
        {'num': 3.0}
    """

    totals: Callable[[PyTree], PyTree]
    grads: Callable[[PyTree], PyTree]
    reports: Callable[[str | None], Sequence[tuple[int | None, str | None]]] = _one_rank
    agree: Callable[[Tensor], Tensor] = _same


LOCAL = Reduction(totals=_same, grads=_same)
"""One rank: sums are totals already."""


class WindowGrad(NamedTuple):
    """The loss of a window and its gradient, detached.

    Attributes:
        loss: the objective of the total terms, a float64 scalar: the logged loss is the optimised.
        grads: like ``params``, or a dict by parameter name for a module.
        terms: the total loss terms, float64.
        metrics: the ratios of the total metrics, by name.
    """

    loss: Tensor
    grads: PyTree
    terms: LossTerms
    metrics: dict[str, Any]

    @property
    def valid(self) -> Tensor:
        """Whether to apply the gradients, a bool scalar on the device of the loss.

        False only under ``on_empty="skip"``, for a window that had nothing to learn from or in
        which something is wrong that would be an error else. An optimizer's
        ``update(..., valid=...)`` honours it without a host sync.
        """
        return torch.isfinite(self.loss)


class FirstPass(NamedTuple):
    """What ``replay`` knows when its second pass starts.

    Attributes:
        sums: the sums of this rank, None when its window is empty.
        faults: the first micro-step at which each sum was bad, or -1.
        totals: the sums and the fault counts of all ranks; None when no rank had a micro-step.
    """

    sums: Sums | None
    faults: Tensor | None
    totals: tuple[Sums, Tensor] | None


class Carry(NamedTuple):
    """The state of an unfinished window: a pytree of tensors, to be checkpointed as it is.

    Attributes:
        grads: a gradient buffer for each direction, like ``params`` or a dict by parameter name.
        directions: one tree like the loss terms for each buffer: what the sums were weighted with.
        sums: the sums of the micro-steps so far on this rank, float64; None before the first.
        faults: the first micro-step at which each sum was bad, or -1.
        step: the number of micro-steps so far, int64.
        known: the den totals for ``before``, a ``FirstPass`` for ``replay``, else None.
        totals: the reduction of ``sums`` once it was started.
    """

    grads: tuple[PyTree, ...]
    directions: tuple[LossTerms, ...]
    sums: Sums | None
    faults: Tensor | None
    step: Tensor
    known: Any
    totals: tuple[Sums, Tensor] | None = None


@dataclass(frozen=True)
class Spec:
    """The options of an accumulator, checked."""

    objective: Objective
    plan: str
    reduction: Reduction = LOCAL
    accumulate_dtype: torch.dtype | None = None
    on_empty: OnEmpty = "raise"
    donate: bool = True
    den_fn: DenFn | None = None
    max_columns: int = MAX_COLUMNS
    settle_plan: Callable[[str], str] = _same  # of what "auto" took, where ranks must take one
