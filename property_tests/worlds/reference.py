"""What is right for a world: the objective at the total sums, and its gradient."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...pure import add, tree
from ..evaluation import Forward, forward
from .problems import Problem
from .world import World

__all__ = ["Reference", "as_tree", "leaf_names", "micro_batches", "reference_of"]


class Reference(NamedTuple):
    """The right values.

    Attributes:
        loss: the objective at the totals, a scalar.
        grads: its gradient by the name of the leaf.
        dens: the total dens.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    dens: list[Tensor]


def reference_of(problem: Problem, world: World) -> Reference:
    """``f(Σ s)`` over all the data of ``world``, differentiated through one graph, by no plan.

    Examples:
        >>> from numden.property_tests.worlds.problems import token_batch, tokens
        >>> world = World([[token_batch([[8.0]]), token_batch([[2.0, 2.0, 2.0]])]])
        >>> reference_of(tokens(), world).loss
        tensor(3.5000, dtype=torch.float64)
    """
    passes = [
        forward(problem.loss_fn, problem.params, batch)
        for window in micro_batches(world)
        for batch in window
    ]
    totals = reduce(add, [each.terms for each in passes])
    with torch.enable_grad():
        loss = problem.objective(totals)
    grads = _gradient(loss, passes)
    names = leaf_names(problem.params)
    return Reference(
        loss.detach(),
        dict(zip(names, grads, strict=True)),
        [torch.as_tensor(den).detach() for den in tree.leaves(totals.den)],
    )


def micro_batches(world: World) -> list[Sequence[Any]]:
    """The windows of the ranks that hold data of their own."""
    return [world[rank] for rank in world.data_ranks]


def as_tree(params: Any) -> Any:
    """A pytree as it is; the parameters of a module by their names."""
    return dict(params.named_parameters()) if isinstance(params, nn.Module) else params


def leaf_names(params: Any) -> list[str]:
    """The place of each differentiable leaf as code, behind the name of the tree."""
    if isinstance(params, nn.Module):
        return [f"[{name!r}]" for name, leaf in params.named_parameters() if leaf.requires_grad]
    named = tree.named(params).items()
    return [name for name, leaf in named if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _gradient(loss: Tensor, passes: Sequence[Forward]) -> list[Tensor]:
    """The gradient by each leaf; a pytree of params has fresh leaves in each pass."""
    columns = list(zip(*[each.leaves.values() for each in passes], strict=True))
    if not loss.requires_grad:
        return [torch.zeros_like(column[0]) for column in columns]
    inputs = [list({id(leaf): leaf for leaf in column}.values()) for column in columns]
    flat = [leaf for column in inputs for leaf in column]
    grads = iter(torch.autograd.grad(loss, flat, materialize_grads=True))
    return [torch.stack([next(grads) for _ in column]).sum(0) for column in inputs]
