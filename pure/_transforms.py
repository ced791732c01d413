"""Windows inside ``torch.func`` transforms: the definition itself, ``grad`` of ``f(Σ s)``."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import tree
from ._carry import WindowGrad
from ._finish import ratios
from ._status import EmptyWindowError
from ._sums import Sums, evaluate
from .objective import Objective
from .terms import LossFn, add

__all__ = ["grad_of_sums", "inside", "refuse_sharded", "sums_of_window"]


def inside() -> bool:
    """Whether the caller is being transformed by ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


def sums_of_window(loss_fn: LossFn, params: Any, window: Iterable[Any]) -> Sums:
    """``Σ loss_fn(params, batch)``, attached to the graph."""
    total = None
    for batch in window:
        sums = evaluate(loss_fn, params, batch)
        total = sums if total is None else add(total, sums)
    if total is None:
        raise EmptyWindowError(
            "window: inside torch.func a window needs a batch to know its terms, got none."
        )
    return total


def refuse_sharded(params: Any) -> None:
    """Refuse what torch.func would differentiate wrongly without a word.

    Raises:
        TypeError: ``params`` is an FSDP2 module, or holds sharded tensors; the message says where.
    """
    if isinstance(params, nn.Module):
        # While an FSDP2 module's parameters are gathered, they are no DTensors.
        if any(hasattr(part, "set_requires_gradient_sync") for part in params.modules()):
            raise TypeError(
                f"window: inside torch.func params may not be an FSDP2 module, got a "
                f"{type(params).__name__}, whose gradients would be local to its rank. Call the "
                "window outside of transforms."
            )
        return
    for name, leaf in tree.named(params, "params").items():
        if type(_unwrapped(leaf)).__name__ == "DTensor":
            raise TypeError(
                f"window: {name} is a DTensor, whose gradient under torch.func is local to "
                "its rank. Gather it first (numden.dist.gather), or leave the transform."
            )


def _unwrapped(leaf: Any) -> Any:
    """``leaf`` without the wrappers of transforms, which hide its class."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    while isinstance(leaf, torch.Tensor) and functorch.is_functorch_wrapped_tensor(leaf):
        leaf = functorch.get_unwrapped(leaf)
    return leaf


def _refuse_modules(params: Any) -> None:
    if isinstance(params, nn.Module):
        raise TypeError(
            f"window: inside torch.func params must be a pytree of tensors, got a "
            f"{type(params).__name__}. Use torch.func.functional_call with a dict of parameters."
        )


def grad_of_sums(
    loss_fn: LossFn, objective: Objective, params: Any, window: Iterable[Any]
) -> WindowGrad:
    """``grad`` of ``f(Σ s(params, batch))``: slower than a plan, and differentiable once more.

    No value is read, so that it works under ``vmap``: an empty window gives what the objective
    makes of zeros.
    """
    refuse_sharded(params)
    _refuse_modules(params)

    def loss_and_sums(params: Any) -> Any:
        sums = sums_of_window(loss_fn, params, window)
        return objective(sums.terms), sums

    grads, (loss, sums) = torch.func.grad_and_value(loss_and_sums, has_aux=True)(params)
    return WindowGrad(loss, grads, sums.terms, ratios(sums))
