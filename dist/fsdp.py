"""SUM in place of AVG: FSDP2 and DDP modules, and the neutral micro-steps that FSDP2 needs."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..pure import LossFn, tree
from ._ranks import RankError, group_device

__all__ = ["MicroStep", "abort_with", "even_window", "neutral_when_idle", "sum_gradients"]

_SETTERS = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")


def sum_gradients(module: nn.Module) -> nn.Module:
    """Make a module's gradient reduction a plain SUM over ranks; safe to call again.

    FSDP2 gets a divide factor of 1 and a forced SUM on each of its sub-modules, since neither
    setter is recursive and either alone is wrong: the first fails on gloo and gives zeros in
    bfloat16 on NCCL, the second still averages. DDP gets a SUM communication hook.

    Args:
        module: an FSDP2 module (or one with FSDP2 modules in it), or a ``DistributedDataParallel``.

    Returns:
        ``module``.

    Raises:
        TypeError: nothing in ``module`` reduces gradients.
        RuntimeError: this torch build lacks a setter.

    Examples:
        >>> sum_gradients(torch.nn.Linear(1, 1))
        Traceback (most recent call last):
            ...
        TypeError: sum_gradients: needs an FSDP2 or DDP module, got Linear. ...

    References:
        torch.distributed.fsdp.FSDPModule; pytorch/pytorch#155915 and #190745 on the two setters.
    """
    if isinstance(module, DistributedDataParallel):
        if not hasattr(module, "_numden_sums"):
            module.register_comm_hook(None, _sum_hook)
            module._numden_sums = True  # pyright: ignore[reportArgumentType]
        return module
    sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
    if not sharded:
        raise TypeError(
            f"sum_gradients: needs an FSDP2 or DDP module, got {type(module).__name__}. Wrap it by "
            "fully_shard or DistributedDataParallel first."
        )
    for each in sharded:
        for name, value in zip(_SETTERS, (1.0, True), strict=True):
            if not hasattr(each, name):
                raise RuntimeError(
                    f"sum_gradients: torch {torch.__version__} has no FSDPModule.{name}, so FSDP2 "
                    "cannot sum here. Use torch >= 2.10."
                )
            getattr(each, name)(value)
    return module


def _sum_hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    work = c10d.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


class MicroStep(NamedTuple):
    """A micro-step of an FSDP2 module, whose forward passes are the same number on all ranks.

    Attributes:
        batch: the micro-batch.
        live: whether its sums count; an idle one is there for the sake of the other ranks.
        last: whether gradients are reduced in its backward pass.
    """

    batch: Any
    live: bool
    last: bool


def even_window(
    window: Iterable[Any], group: c10d.ProcessGroup, *, equal_steps: bool
) -> list[MicroStep]:
    """The window with idle micro-steps at its end, so that all ranks have the same number.

    One small all-reduce, or none with ``equal_steps``. A rank without any batch is sent one.
    """
    batches = list(window)
    most, least, sender = len(batches), len(batches), 0
    if not equal_steps:
        rank = group.rank() if batches else -1
        counts = torch.tensor([most, -least, rank], device=group_device(group))
        c10d.all_reduce(counts, c10d.ReduceOp.MAX, group=group)
        most, least, sender = counts.tolist()
    filler = batches[-1:]
    if most and least == 0:
        sent = filler or [None]
        c10d.broadcast_object_list(sent, c10d.get_global_rank(group, sender), group=group)
        filler = filler or sent
    padded = batches + filler * (most - len(batches))
    return [MicroStep(batch, i < len(batches), i == most - 1) for i, batch in enumerate(padded)]


def neutral_when_idle(loss_fn: LossFn, module: Any, *, reduce_each: bool) -> LossFn:
    """The loss function on ``MicroStep``s: an idle one gives sums of zero and zero gradients.

    It also tells the module when to reduce: in the last micro-step, or in each.
    """

    def loss_terms(params: Any, step: MicroStep) -> Any:
        module.set_requires_gradient_sync(step.last or reduce_each)
        sums = loss_fn(params, step.batch)
        return sums if step.live else tree.map(lambda leaf: leaf * 0, sums)

    return loss_terms


def abort_with(error: Exception, group: c10d.ProcessGroup) -> None:
    """Raise on this rank what went wrong on any, and let go of ranks that wait for this one.

    A rank that fails inside a forward or backward pass of an FSDP2 module leaves its peers in a
    collective that it cannot join any more: it leaves word in the store and aborts the group.
    """
    store = c10d.distributed_c10d._get_default_store()
    key = f"numden/fault/{group.group_name}"
    own = f"window_grad: the loss failed on rank {group.rank()}: {type(error).__name__}: {error}"
    said = store.compare_set(key, "", f"{own}. Nothing was updated on any rank.").decode()
    c10d.distributed_c10d._abort_process_group()
    raise RankError(said) from error


def is_fsdp(params: Any) -> bool:
    """Whether FSDP2 gathers and reduces the parameters of ``params``."""
    return isinstance(params, nn.Module) and any(
        isinstance(each, FSDPModule) for each in params.modules()
    )


def reshard(module: nn.Module) -> None:
    """Free what a forward pass without a backward pass left gathered, as evaluation does."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def split_by_reducer(grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients that FSDP2 has reduced, and those of parameters that it was told to ignore."""
    done = {name: grad for name, grad in grads.items() if hasattr(grad, "device_mesh")}
    return done, {name: grad for name, grad in grads.items() if name not in done}
