"""Micro-steps that ranks run together: the same number on all of them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor

from ..pure import LossFn, TermStructureError, tree
from ..pure.plans import PLANS
from ..pure.terms import split_metrics
from ..pure.window import batches_of
from ._ranks import gather_reports, group_device, report_of

__all__ = ["MicroStep", "equal_window", "even_window", "neutral_when_idle", "one_plan"]


class MicroStep(NamedTuple):
    """A micro-step.

    Attributes:
        batch: the micro-batch.
        live: whether its sums count; an idle one is there for the sake of the other ranks.
        last: whether gradients are reduced in its backward pass.
    """

    batch: Any
    live: bool
    last: bool


def equal_window(window: Iterable[Any]) -> list[MicroStep]:
    """The window of a rank that has as many micro-steps as the others."""
    return _padded(list(batches_of(window)), [], 0)


def even_window(window: Iterable[Any], group: c10d.ProcessGroup) -> list[MicroStep]:
    """The window with idle micro-steps at its end, so that all ranks have the same number.

    One small all-reduce. A rank without any batch is sent one.

    Raises:
        RankError: the window of some rank raised. Each rank raises it.
    """
    batches, error = _batches(window)
    rank = group.rank() if batches else -1
    failed = int(error is not None)
    found = torch.tensor([len(batches), -len(batches), rank, failed], device=group_device(group))
    c10d.all_reduce(found, c10d.ReduceOp.MAX, group=group)
    most, minus_least, sender, failed = found.tolist()
    if failed:
        gather_reports(report_of(error), group, error)
    filler = batches[-1:]
    if most and not minus_least:
        filler = filler + _sent(filler, sender, group)
    return _padded(batches, filler, most - len(batches))


def _batches(window: Iterable[Any]) -> tuple[list[Any], Exception | None]:
    try:
        return list(batches_of(window)), None
    except Exception as error:
        return [], error


def _sent(own: list[Any], sender: int, group: c10d.ProcessGroup) -> list[Any]:
    """A batch of rank ``sender`` of the group, on the device of this rank."""
    sent = [_to(torch.device("cpu"), own[0]) if own else None]
    c10d.broadcast_object_list(sent, c10d.get_global_rank(group, sender), group=group)
    return [_to(group_device(group), sent[0])]


def _to(device: torch.device, batch: Any) -> Any:
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _padded(batches: list[Any], filler: list[Any], num_idle: int) -> list[MicroStep]:
    padded = batches + filler[:1] * num_idle
    last = len(padded) - 1
    return [MicroStep(batch, i < len(batches), i == last) for i, batch in enumerate(padded)]


def one_plan(plan: str, group: c10d.ProcessGroup) -> str:
    """The plan of all ranks where each has chosen by its own first micro-step.

    One small all-reduce. Plans differ in their passes, so that ranks of several would wait for each
    other for ever; they go by "replay" then, which can express what any of them can.
    """
    place = PLANS.index(plan)
    found = torch.tensor([place, -place], device=group_device(group))
    c10d.all_reduce(found, c10d.ReduceOp.MAX, group=group)
    last, minus_first = found.tolist()
    return plan if last == -minus_first else "replay"


def neutral_when_idle(
    loss_fn: LossFn, on_step: Callable[[MicroStep], None] | None = None
) -> LossFn:
    """The loss function on ``MicroStep``s: an idle one gives sums of zero and zero gradients.

    ``on_step`` is called before each.
    """

    def loss_terms(params: Any, step: MicroStep) -> Any:
        if on_step:
            on_step(step)
        sums = loss_fn(params, step.batch)
        _require_graph(sums)
        return sums if step.live else tree.map(lambda leaf: leaf * 0, sums)

    return loss_terms


def _require_graph(sums: Any) -> None:
    """Without a backward pass this rank would leave the others waiting in theirs."""
    nums = tree.leaves(split_metrics(sums)[0].num)
    attached = any(isinstance(num, Tensor) and num.requires_grad for num in nums)
    if torch.is_grad_enabled() and not attached:
        raise TermStructureError(
            "loss_fn: with an FSDP2 module or in lockstep each micro-step must have a backward "
            "pass, got nums that do not depend on params. Sum over no tokens rather than return a "
            "constant."
        )
