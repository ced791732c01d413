"""The leaves that gradients are taken with respect to, and buffers lent to them as ``.grad``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import tree
from .tree import PyTree

__all__ = ["Leaves", "attach", "lend_grads", "refuse_reducing", "zero_grads"]


class Leaves(NamedTuple):
    """Leaves of an autograd graph.

    Attributes:
        tensors: what a backward pass accumulates into.
        params: what the loss function is called with: a tree of these tensors, or the module.
        structure: of the gradients: like the tree, or a dict by parameter name.
    """

    tensors: list[Tensor]
    params: Any
    structure: tree.Structure


def attach(params: PyTree | nn.Module) -> Leaves:
    """Leaves for ``params``: fresh ones on the storage of a tree, a module's own parameters.

    A tree's tensors are detached, so that neither their ``.grad`` nor the graph they came from is
    touched, and no second copy of them is made.

    Raises:
        TypeError: a leaf of the tree is no floating-point tensor.
    """
    if isinstance(params, nn.Module):
        own = {name: p for name, p in params.named_parameters() if p.requires_grad}
        tensors, structure = tree.flatten(own)
        return Leaves(tensors, params, structure)
    tensors, structure = tree.flatten(params)
    for name, leaf in zip(tree.names(params, "params"), tensors, strict=True):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"window: params are floating-point tensors, got {name} of type {got}. Give "
                "it to the loss function by functools.partial or in the batch."
            )
    fresh = [leaf.detach().requires_grad_() for leaf in tensors]
    return Leaves(fresh, tree.unflatten(structure, list(fresh)), structure)


def refuse_reducing(params: Any) -> None:
    """Refuse a module whose own backward pass averages gradients over ranks.

    Raises:
        TypeError: ``params`` is or holds an FSDP2 or DDP module.
    """
    if not isinstance(params, nn.Module):
        return
    marks = ("set_requires_gradient_sync", "require_backward_grad_sync")
    if any(hasattr(part, mark) for part in params.modules() for mark in marks):
        raise TypeError(
            "window: an FSDP2 or DDP module averages gradients over ranks in its backward passes, "
            f"got {type(params).__name__}. Use numden.dist.window_grad, which sums them once."
        )


def zero_grads(leaves: Leaves, dtype: torch.dtype | None) -> list[Tensor]:
    """One zero buffer for each leaf, in ``dtype`` or the leaf's own.

    Raises:
        TypeError: ``dtype`` cannot hold the gradient of a leaf.
    """
    for leaf in leaves.tensors:
        if dtype is not None and not torch.can_cast(leaf.dtype, dtype):
            raise TypeError(
                f"window: accumulate_dtype must be one that gradients can be added in, got {dtype} "
                f"for a parameter of {leaf.dtype}. Use torch.float32, or leave it out."
            )
    return [torch.zeros_like(leaf, dtype=dtype, requires_grad=False) for leaf in leaves.tensors]


@contextmanager
def lend_grads(leaves: Leaves, buffers: list[Tensor]) -> Iterator[None]:
    """Let backward passes add into ``buffers``; afterwards each ``.grad`` is what it was.

    Where a buffer has another dtype than its leaf, each gradient is added and dropped as soon as
    the backward pass has it, so that there is never a second full set of gradients.
    """
    saved = [leaf.grad for leaf in leaves.tensors]
    hooks = []
    try:
        for leaf, buffer in zip(leaves.tensors, buffers, strict=True):
            if buffer.dtype == leaf.dtype:
                leaf.grad = buffer
            else:
                leaf.grad = None
                hooks.append(leaf.register_post_accumulate_grad_hook(_mover(buffer)))
        yield
        for leaf, buffer in zip(leaves.tensors, buffers, strict=True):
            # Autograd adds in place, except where the gradient's layout forbids it.
            if leaf.grad is not None and leaf.grad is not buffer:
                buffer.copy_(leaf.grad)
    finally:
        for hook in hooks:
            hook.remove()
        for leaf, grad in zip(leaves.tensors, saved, strict=True):
            leaf.grad = grad


def _mover(buffer: Tensor) -> Any:
    def move(leaf: Tensor) -> None:
        assert leaf.grad is not None
        buffer.add_(leaf.grad)
        leaf.grad = None

    return move
