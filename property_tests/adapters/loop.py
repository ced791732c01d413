"""A raw PyTorch loop as a step."""

from typing import Any

from torch import nn

from ..worlds.world import StepResult, World
from ._module import load, make_step, require_ranks
from ._reading import Loop, rank_windows, read_gradients, read_update

__all__ = ["from_loop"]


def from_loop(loop: Loop, module: nn.Module, *, updates: bool = False) -> Any:
    """A step of one rank: ``loop(module, window)`` on the window.

    Args:
        loop: ``(module, window) -> loss``. ``window`` is a tuple of micro-batches; its attribute
            ``accumulation`` is the number of micro-steps that the trainer is configured for. What
            is returned is the loss that would be logged, or None, or a ``StepResult``, whose fields
            go before what is read off the module.
        module: gets the params at each call, and its own back afterwards. All else that it holds
            goes on from call to call, ``.grad`` too: a loop that has to zero it must do so.
        updates: whether the loop takes an optimizer step. If not, the gradient that it leaves in
            ``.grad`` is the result. If so, it is the gradient that the optimizer gets, and the
            params after the step, should it be plain SGD with lr 1. The optimizer may be of the
            loop's own making, one of ``torch.optim``.

    Returns:
        ``(params, world) -> StepResult``, with ``ranks`` = 1.

    Raises:
        UnfitWorld: by the step, when there are several ranks.
        ValueError: by the step, when params do not fit the module, or when the loop changes them
            without ``updates``.

    Examples:
        >>> import torch
        >>> module = torch.nn.Linear(1, 1, bias=False)
        >>> def loop(module, window):
        ...     module.zero_grad()
        ...     for x in window:
        ...         (module(x).mean() / len(window)).backward()  # a mean of means
        >>> step = from_loop(loop, module)
        >>> window = [torch.tensor([[8.0]]), torch.tensor([[2.0], [2.0], [2.0]])]
        >>> step({"weight": torch.tensor([[1.0]])}, World([window])).grads
        {'weight': tensor([[5.]])}
    """
    read = read_update if updates else read_gradients

    def step(params: Any, world: World) -> StepResult:
        require_ranks("from_loop", world, 1)
        own = {name: param.detach().clone() for name, param in module.named_parameters()}
        load(module, params)
        try:
            return read(loop, module, params, rank_windows(world)[0])
        finally:
            load(module, own)  # it may be the very module that the checker takes params from

    return make_step(step, "from_loop", loop, 1)
