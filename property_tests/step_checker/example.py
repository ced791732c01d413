"""The smallest wrong window, for a reader: counts, losses of tokens, expected, got, ratio."""

from typing import Any

import torch
from torch import Tensor

from ...pure import tree
from ..diagnosis.compare import Leaf, Quantity
from ..evaluation import forward
from ..mask_fields import MaskField, mask_fields, mask_out
from ..violation import worst_place
from ..worlds.problems import Problem
from ..worlds.world import World

__all__ = ["as_example", "worst_of"]

_MAX_LOSSES = 12


def as_example(problem: Problem, world: World, quantity: Quantity | None, leaf: Leaf | None) -> str:
    """What is in each micro-step of ``world``, then the worst value of ``leaf``, as lines.

    Examples:
        >>> from numden.property_tests.worlds.problems import token_batch, tokens
        >>> world = World([[token_batch([[8.0]]), token_batch([[2.0, 2.0, 2.0]])]])
        >>> print(as_example(tokens(), world, None, None))
        1 rank, window of 2 micro-steps (2 configured)
          rank 0, micro-step 0: count 1, losses 8
          rank 0, micro-step 1: count 3, losses 2 2 2
    """
    longest = max(map(len, world), default=0)
    ranks = f"{len(world)} rank{'s' * (len(world) != 1)}"
    if len(world.mesh) > 1:
        ranks += f" {world.mesh}"
    steps = f"window of {longest} micro-step{'s' * (longest != 1)}"
    lines = [f"{ranks}, {steps} ({world.accumulation} configured)"]
    for rank, window in enumerate(world):
        lines += [
            f"  rank {rank}, micro-step {index}: {_micro_batch(problem, batch)}"
            for index, batch in enumerate(window)
        ] or [f"  rank {rank}: no micro-step"]
    if quantity is not None and leaf is not None:
        name, expected, got = worst_of(quantity, leaf)
        ratio = f", ratio {_short(got / expected)}" if expected else ""
        lines.append(f"{name}: expected {_short(expected)}, got {_short(got)}{ratio}")
    return "\n".join(lines)


def worst_of(quantity: Quantity, leaf: Leaf) -> tuple[str, float, float]:
    """The name of the worst element of a leaf, and what is expected and got there."""
    expected, got = quantity.expected[leaf.place], quantity.got[leaf.place]
    worst = worst_place(expected, got)
    name = leaf.name if len(expected) == 1 else f"{leaf.name}, element {worst} of {len(expected)}"
    return name, float(expected[worst]), float(got[worst])


def _micro_batch(problem: Problem, batch: Any) -> str:
    passed = forward(problem.loss_fn, problem.params, batch)
    nums = tree.leaves(passed.terms.num)
    dens = tree.broadcast_prefix(passed.terms.den, passed.terms.num)
    names = tree.names(passed.terms.num)
    tokens = _token_losses(problem, batch)
    words = []
    for index, (name, num, den) in enumerate(zip(names, nums, dens, strict=True)):
        losses = [values[index] for values in tokens]
        told = f"losses {' '.join(map(_short, losses))}" if losses else f"sum {_show(num)}"
        words.append(f"{name.strip('[]')}{' ' * bool(name)}count {_show(den)}, {told}")
    return "; ".join(words)


def _token_losses(problem: Problem, batch: Any) -> list[list[float]]:
    """The terms of each token on its own, where masking all the others is known to be possible."""
    places = _counted(batch)
    if places is None or not 0 < len(places) <= _MAX_LOSSES:
        return []
    alone = [_nums(problem, _only(batch, place)) for place in places.tolist()]
    whole = _nums(problem, batch)
    if any(each is None for each in (*alone, whole)):
        return []
    adds = torch.allclose(torch.tensor(alone).double().sum(0), torch.tensor(whole).double())
    return [values for values in alone if values is not None and any(values)] if adds else []


def _nums(problem: Problem, batch: Any) -> list[float] | None:
    nums = tree.leaves(forward(problem.loss_fn, problem.params, batch).terms.num)
    return [float(num.detach()) for num in nums] if all(num.numel() == 1 for num in nums) else None


def _counted(batch: Any) -> Tensor | None:
    """The places ``[n, 2]`` that a mask or a label of the batch lets through."""
    leaves = tree.leaves(batch)
    counted = [leaves[field.leaf] != field.neutral for field in _loss_fields(batch)]
    if not counted or any(each.shape != counted[0].shape for each in counted):
        return None
    return torch.stack(counted).any(0).nonzero()


def _only(batch: Any, place: list[int]) -> Any:
    """``batch`` with all masked but one place."""
    fields = _loss_fields(batch)
    others = torch.ones_like(tree.leaves(batch)[fields[0].leaf], dtype=torch.bool)
    others[tuple(place)] = False
    return mask_out(batch, fields, others)


def _loss_fields(batch: Any) -> list[MaskField]:
    """The fields ``[B, T]`` that say which positions are scored."""
    leaves = tree.leaves(batch)
    fields = [field for field in mask_fields(batch) if field.kind in ("labels", "mask")]
    return [field for field in fields if leaves[field.leaf].ndim == 2]


def _show(value: Any) -> str:
    value = torch.as_tensor(value).detach()
    return _short(float(value)) if value.numel() == 1 else str(value.tolist())


def _short(value: float) -> str:
    return f"{value:.6g}"
