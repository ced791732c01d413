"""Map a function over slices of items, so that what it makes inside exists for one slice only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..pure import tree
from ..pure.tree import PyTree

__all__ = ["map_chunks", "recompute"]

ChunkFn = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""``(inputs, constants) -> (outputs, aux)``; outputs are differentiated, by inputs alone."""


def map_chunks(
    fn: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    params: PyTree,
    items: PyTree,
    constants: PyTree,
    *,
    chunk_size: int,
) -> tuple[PyTree, PyTree]:
    """``fn(params, items, constants)`` over slices of the items, with recomputation.

    Values and gradients are those of one call on all items, whatever ``chunk_size``: each output
    belongs to one item.

    Args:
        fn: returns ``(outputs, aux)``, trees of tensors with one row an item. ``aux`` is not
            differentiated.
        params: a tree of float tensors that each slice shares.
        items: a tree of float tensors ``[n, ...]``, differentiated like ``params``.
        constants: a tree of tensors ``[n, ...]`` that no gradient flows to.
        chunk_size: items in a slice; 0 makes one slice of all and recomputes nothing.

    Returns:
        ``(outputs, aux)``, their rows in the order of the items.

    Examples:
        >>> double = lambda params, items, constants: (params * items, constants + 1)
        >>> map_chunks(double, torch.tensor(2.0), torch.arange(3.0), torch.arange(3), chunk_size=2)
        (tensor([0., 2., 4.]), tensor([1, 2, 3]))
    """
    if not chunk_size:
        return fn(params, items, constants)

    on_slice = lambda inputs, constants: fn(inputs[0], inputs[1], constants)
    slices = zip(_split(items, chunk_size), _split(constants, chunk_size), strict=True)
    parts = [recompute(on_slice, (params, part), constant) for part, constant in slices]
    return tree.map(lambda *rows: torch.cat(rows), *parts)


def _split(items: PyTree, size: int) -> list[PyTree]:
    leaves, structure = tree.flatten(items)
    return [
        tree.unflatten(structure, list(part))
        for part in zip(*(leaf.split(size) for leaf in leaves), strict=True)
    ]


def recompute(fn: ChunkFn, inputs: PyTree, constants: PyTree) -> tuple[PyTree, PyTree]:
    """``fn(inputs, constants)``, keeping only its arguments and computing it anew in the backward.

    Unlike ``torch.utils.checkpoint`` it works under ``torch.func`` transforms and by ``backward``.

    Args:
        fn: a pure function that returns ``(outputs, aux)``, two trees of new tensors, none of
            them an argument as it is.
        inputs: a tree of float tensors, differentiated.
        constants: a tree of tensors; no gradient flows to them.

    Returns:
        ``(outputs, aux)``; ``aux`` carries no gradient.

    Examples:
        >>> square = lambda inputs, constants: (inputs**2, ())
        >>> torch.func.grad(lambda x: recompute(square, x, ())[0])(torch.tensor(3.0))
        tensor(6.)
    """
    if torch.compiler.is_compiling():  # the compiler has a recomputation of its own
        return checkpoint(fn, inputs, constants, use_reentrant=False)
    call = _FlatCall(fn, (inputs, constants))
    flat = _Recompute.apply(call, *tree.leaves((inputs, constants)))
    return call.unflatten(flat)


class _FlatCall:
    """``fn`` from tensors to a flat tuple of tensors; learns the tree of its result when called."""

    def __init__(self, fn: ChunkFn, arguments: tuple[PyTree, PyTree]):
        self.fn = fn
        self.num_inputs = len(tree.leaves(arguments[0]))
        self.structure = tree.structure(arguments)

    def __call__(self, *flat: Tensor) -> tuple[Tensor, ...]:
        result = self.fn(*tree.unflatten(self.structure, list(flat)))
        leaves, self.output_structure = tree.flatten(result)
        self.num_outputs = len(tree.leaves(result[0]))
        self.num_aux = len(leaves) - self.num_outputs
        return tuple(leaves)

    def outputs(self, constants: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *inputs: self(*inputs, *constants)[: self.num_outputs]

    def unflatten(self, flat: tuple[Tensor, ...]) -> tuple[PyTree, PyTree]:
        return tree.unflatten(self.output_structure, list(flat))


class _Recompute(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: _FlatCall, *flat: Tensor) -> tuple[Tensor, ...]:
        return call(*flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *flat = inputs
        ctx.save_for_backward(*flat)
        ctx.save_for_forward(*flat)
        ctx.mark_non_differentiable(*output[ctx.call.num_outputs :])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        num_inputs = ctx.call.num_inputs
        inputs, constants = ctx.saved_tensors[:num_inputs], ctx.saved_tensors[num_inputs:]
        vjp = torch.func.vjp(ctx.call.outputs(constants), *inputs)[1]
        return None, *vjp(cotangents[: ctx.call.num_outputs]), *(None for _ in constants)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        num_inputs = ctx.call.num_inputs
        inputs, constants = ctx.saved_tensors[:num_inputs], ctx.saved_tensors[num_inputs:]
        filled = tuple(
            torch.zeros_like(x) if t is None else t
            for x, t in zip(inputs, tangents[1 : 1 + num_inputs], strict=True)
        )
        out = torch.func.jvp(ctx.call.outputs(constants), inputs, filled)[1]
        return *out, *(None for _ in range(ctx.call.num_aux))
