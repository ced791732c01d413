"""The smallest wrong window, for a reader: counts, losses of tokens, expected, got, ratio."""

from typing import Any

import torch
from torch import Tensor

from ...pure import tree
from ..diagnosis.compare import Leaf, Quantity
from ..evaluation import forward
from ..worlds.counts import IGNORED
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
    worst = int((expected - got).abs().nan_to_num(nan=torch.inf).argmax())
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
    fields = [_passes(leaf) for leaf in tree.leaves(batch) if _is_mask(leaf)]
    if not fields or any(field.shape != fields[0].shape for field in fields):
        return None
    return torch.stack(fields).any(0).nonzero()


def _only(batch: Any, place: list[int]) -> Any:
    """``batch`` with all masked but one place."""

    def mask(leaf: Any) -> Any:
        if not _is_mask(leaf):
            return leaf
        here = torch.zeros_like(leaf, dtype=torch.bool)
        here[tuple(place)] = True
        return leaf & here if leaf.dtype == torch.bool else torch.where(here, leaf, IGNORED)

    return tree.map(mask, batch)


def _passes(leaf: Tensor) -> Tensor:
    return leaf if leaf.dtype == torch.bool else leaf != IGNORED


def _is_mask(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.ndim != 2:
        return False
    return leaf.dtype == torch.bool or bool((leaf == IGNORED).any())


def _show(value: Any) -> str:
    value = torch.as_tensor(value).detach()
    return _short(float(value)) if value.numel() == 1 else str(value.tolist())


def _short(value: float) -> str:
    return f"{value:.6g}"
