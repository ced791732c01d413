"""SUM in place of AVG for FSDP2 and DDP modules, and what else FSDP2 needs to be told."""

from typing import Any, NoReturn

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ._ranks import raise_reports, report_of

__all__ = ["abort_with", "reshard", "sum_gradients"]

_SETTERS = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")


def sum_gradients(module: nn.Module) -> nn.Module:
    """Make a module's gradient reduction a plain SUM over ranks; safe to call again.

    FSDP2 gets a divide factor of 1 and a forced SUM on each of its sub-modules, since neither
    setter is recursive and either alone is wrong: the first fails on gloo and gives zeros in
    bfloat16 on NCCL, the second still averages. DDP gets a SUM communication hook; accumulate
    under ``no_sync``, since it reduces anew what a ``.grad`` holds before a backward pass.
    (``window_grad`` reduces the gradients of a DDP module itself and needs no hook.)

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
        if hasattr(each, "set_reduce_scatter_unused_params"):  # torch >= 2.13
            # Or a parameter that one rank alone leaves out keeps the others waiting for it.
            each.set_reduce_scatter_unused_params(True, recurse=False)
    return module


def _sum_hook(
    state: Any,
    bucket: c10d.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[Tensor]:
    work = c10d.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def abort_with(error: Exception, group: c10d.ProcessGroup) -> NoReturn:
    """Raise on this rank what went wrong first on any, and leave the ranks that wait for this one.

    A rank that fails within the passes of an FSDP2 module leaves its peers in a collective that it
    cannot join any more. It leaves word in the store and aborts all process groups, so that nothing
    of NCCL keeps its process from ending. With the process the connections end (gloo knows no other
    way), and with them the waiting of the peers, who then find the word and raise the same error.
    """
    name, text, _ = report_of(error)
    rank, name, text = _first_word(f"{c10d.get_rank()}\n{name}\n{text}", group).split("\n", 2)
    c10d.distributed_c10d._abort_process_group()
    raise_reports({int(rank): (name, text, None)}, error)
    raise error


def _first_word(own: str, group: c10d.ProcessGroup) -> str:
    store = c10d.distributed_c10d._get_default_store()
    try:
        return store.compare_set(f"numden/fault/{group.group_name}", "", own).decode()
    except RuntimeError:  # the store went with the process that kept it
        return own


def reshard(module: nn.Module) -> None:
    """Free what a forward pass without a backward pass left gathered, as evaluation does."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
