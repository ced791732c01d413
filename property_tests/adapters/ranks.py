"""A loop over ranks as a step: local processes that speak gloo, wrapped by DDP, FSDP2 or you."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..worlds.world import REPLICATED, StepResult, World
from ._module import make_step, require_ranks
from ._processes import agreed, make_process_step, on_each_rank
from ._reading import Loop, Window, read_gradients, read_update

__all__ = ["ddp", "fsdp2", "on_ranks"]

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]
"""``(module, mesh) -> module``, on each rank, with the mesh of the world."""


def on_ranks(
    loop: Loop,
    module: nn.Module | None = None,
    num_ranks: int | None = None,
    *,
    wrap: Wrap | None = None,
    updates: bool = False,
    timeout: float = 60.0,
) -> Any:
    """A step of several ranks: ``loop(module, window)`` on each, in a process of its own.

    The processes are those of ``numden.dist.run_local``, whose docstring says what can be run in
    them. They share a default group, gloo on CPU. Each call starts new ones with the module as it
    is in the caller; of what a call changes on a rank, only ``.grad`` goes on to the next.

    Args:
        loop: as for ``from_loop``, on each rank with the window of that rank. The loss of rank 0
            counts as the one that is logged. A function that returns gradients, such as
            ``numden.dist.window_grad(loss_fn)``, is one too.
        module: what the loop gets, or None: then it gets the params, whatever pytree they are.
        num_ranks: the number of ranks that the step runs on; any number if None.
        wrap: makes of the module what the loop gets, on each rank.
        updates: as for ``from_loop``.
        timeout: seconds for one call.

    Returns:
        ``(params, world) -> StepResult``: that of rank 0, with whole tensors for DTensors.

    Raises:
        ReplicasDiffer: by the step, when ranks end with other gradients or params than rank 0. Its
            ``results`` are those of all ranks.
        ValueError: by the step, as by that of ``from_loop``.
        TimeoutError: by the step, when a rank hangs.
        Exception: by the step, what a rank raised.

    Examples:
        >>> import torch
        >>> from numden.dist import window_grad
        >>> from numden.pure import LossTerms
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> step = on_ranks(window_grad(loss_fn))
        >>> short, long = torch.tensor([8.0]), torch.tensor([2.0, 2.0, 2.0])
        >>> step(torch.tensor(1.0), World([[short], [long]])).grads
        tensor(3.5000)
    """
    if module is None:
        return _on_params(loop, num_ranks, timeout)
    read = read_update if updates else read_gradients
    return make_process_step(
        partial(read, loop),
        module,
        "on_ranks",
        num_ranks,
        subject=loop,
        wrap=None if wrap is None else partial(_wrapped, wrap),
        timeout=timeout,
    )


def ddp(loop: Loop, module: nn.Module, num_ranks: int | None = None, **options: Any) -> Any:
    """``on_ranks`` of a ``DistributedDataParallel`` module over the data axes of the mesh.

    Examples:
        >>> import torch
        >>> def loop(module, window):  # on each rank a mean of its own
        ...     module.zero_grad()
        ...     module(torch.cat(window)).mean().backward()
        >>> step = ddp(loop, nn.Linear(1, 1, bias=False))
        >>> short, long = torch.tensor([[8.0]]), torch.tensor([[2.0], [2.0], [2.0]])
        >>> step({"weight": torch.ones(1, 1)}, World([[short], [long]])).grads
        {'weight': tensor([[5.]])}
    """

    def wrap(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(module, process_group=_over_data(mesh).get_group())

    return on_ranks(loop, module, num_ranks, wrap=wrap, **options)


def fsdp2(loop: Loop, module: nn.Module, num_ranks: int | None = None, **options: Any) -> Any:
    """``on_ranks`` of a module that ``fully_shard`` shards over the data axes of the mesh.

    As in ``fully_shard`` itself, gradients are averaged over the ranks unless the loop says
    otherwise.

    Examples:
        >>> import torch
        >>> def loop(module, window):  # on each rank a mean of its own
        ...     module.zero_grad()
        ...     module(torch.cat(window)).mean().backward()
        >>> step = fsdp2(loop, nn.Linear(1, 1, bias=False))
        >>> short, long = torch.tensor([[8.0]]), torch.tensor([[2.0], [2.0], [2.0]])
        >>> step({"weight": torch.ones(1, 1)}, World([[short], [long]])).grads
        {'weight': tensor([[5.]])}
    """

    def wrap(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(module, mesh=_over_data(mesh))
        return module

    return on_ranks(loop, module, num_ranks, wrap=wrap, **options)


def _on_params(loop: Loop, num_ranks: int | None, timeout: float) -> Any:
    def step(params: Any, world: World) -> StepResult:
        require_ranks("on_ranks", world, num_ranks)
        run = partial(read_gradients, loop, params, params)
        return agreed(on_each_rank(run, world, timeout=timeout))

    return make_step(step, "on_ranks", loop, num_ranks)


def _wrapped(wrap: Wrap, module: nn.Module, window: Window) -> nn.Module:
    mesh = init_device_mesh("cpu", tuple(window.mesh.values()), mesh_dim_names=tuple(window.mesh))
    return wrap(module, mesh)


def _over_data(mesh: DeviceMesh) -> DeviceMesh:
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis not in REPLICATED)
    if not axes:
        raise ValueError(
            f"ranks: the mesh must have a data axis, got {mesh.mesh_dim_names}. "
            "Use on_ranks with a wrap of your own."
        )
    return mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten("data")
