"""The sums of a world, cut as finely as a wrong formula may cut them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pure import tree
from ...pure.objective import TermMean
from ..evaluation import Forward, forward
from ..mask_fields import MaskField, mask_fields
from ..rows import has_rows, num_rows, take_rows
from ..worlds.counts import counts
from ..worlds.problems import Problem
from ..worlds.reference import micro_batches
from ..worlds.world import World

__all__ = [
    "CLAMPED",
    "COUNTED_ROWS",
    "DEN",
    "ROOTS",
    "Facts",
    "Reading",
    "facts_of",
    "is_of_den",
    "read",
]

DEN = "den"
CLAMPED = "den, at least 1 in each row"
COUNTED_ROWS = "den, rows that have one"
ROOTS = "den, its root in each row"


def is_of_den(name: str) -> bool:
    """Whether a count is the den, otherwise read; others are made of the batch's own fields."""
    return name.startswith(f"{DEN}, ")


class Facts(NamedTuple):
    """What each micro-step of each data rank adds, and all that may be counted in it.

    ``K`` terms, ``R`` data ranks, ``M`` micro-steps of the longest window, ``D`` values: the num
    itself, then its gradient, leaf by leaf. All float64.

    Attributes:
        terms: the name of each term.
        weights: the weight of each term in the objective, ``[K]``.
        nums: ``[K, R, M, D]`` by how the batch was read: ``""``, as it is; ``"unmasked"``;
            ``"unweighted"``; ``"row means"``, where each row is divided by its own den, and
            ``"row roots"``, by the root of it.
        counts: ``[K, R, M]`` by name: the den, what is made of the dens of rows, and what
            ``counts`` finds in the batch, by its code.
        rest: the same of the generation batch outside of the window, ``[K]``.
        kinds: what kind of count a name stands for.
        present: which micro-steps there are, ``[R, M]``, bool.
        sizes: ``"ranks"`` that hold data, ``"accumulation"``, the mesh axes, and ``"processes"``
            where some of them hold copies.
    """

    terms: tuple[str, ...]
    weights: Tensor
    nums: dict[str, Tensor]
    counts: dict[str, Tensor]
    rest: dict[str, Tensor]
    kinds: dict[str, str]
    present: Tensor
    sizes: dict[str, int]


class Reading(NamedTuple):
    """What one micro-batch adds: ``nums`` ``[K, D]`` and ``counts`` ``[K]``, by name."""

    terms: tuple[str, ...]
    nums: dict[str, Tensor]
    counts: dict[str, Tensor]
    kinds: dict[str, str]


def facts_of(problem: Problem, world: World) -> Facts:
    """Evaluate ``problem`` on each micro-batch of ``world`` in all the ways that Facts has.

    Raises:
        TypeError: the objective is no ``term_mean``, so that there is no mean to get wrong.

    Examples:
        >>> from numden.property_tests.worlds.problems import token_batch, tokens
        >>> world = World([[token_batch([[8.0]]), token_batch([[2.0, 2.0, 2.0]])]])
        >>> facts = facts_of(tokens(), world)
        >>> facts.nums[""][0, 0].tolist(), facts.counts["den"][0, 0].tolist()
        ([[8.0, 8.0], [6.0, 6.0]], [1.0, 3.0])
    """
    windows = [[read(problem, batch) for batch in window] for window in micro_batches(world)]
    first = next(reading for window in windows for reading in window)
    rest = [read(problem, batch) for rank in world.data_ranks for batch in world.rest[rank]]
    length = max(map(len, windows))
    nums = {name: _grid(windows, length, lambda r, n=name: r.nums[n]) for name in first.nums}
    found = {name: _grid(windows, length, lambda r, n=name: r.counts[n]) for name in first.counts}
    return Facts(
        first.terms,
        _weights(problem, len(first.terms)),
        nums,
        found,
        {n: sum((r.counts[n] for r in rest), torch.zeros_like(c)) for n, c in first.counts.items()},
        first.kinds,
        torch.tensor([[m < len(window) for m in range(length)] for window in windows]),
        _sizes(world),
    )


def _sizes(world: World) -> dict[str, int]:
    sizes = {"ranks": len(world.data_ranks), "accumulation": world.accumulation} | world.mesh
    return sizes if len(world) == sizes["ranks"] else sizes | {"processes": len(world)}


def read(problem: Problem, batch: Any) -> Reading:
    """All that one micro-batch adds, and all that may be counted in it."""
    passed = forward(problem.loss_fn, problem.params, batch)
    dens, nums = _sums_of(passed)
    found, named, kinds = {DEN: dens}, {"": nums}, {DEN: DEN}
    for name, masks in (("unmasked", ("mask", "attention")), ("unweighted", ("weights",))):
        fields = [field for field in mask_fields(batch) if field.kind in masks]
        read_so = _sums(problem, _with_ones(batch, fields)) if fields else (dens, nums)
        found[f"{DEN}, {name}"], named[name] = read_so
        kinds[f"{DEN}, {name}"] = name
    by_row = _rows(problem, batch)
    if by_row and _add_up([row for _, row in by_row], nums):
        dens_of_rows = torch.stack([den for den, _ in by_row])
        found[CLAMPED] = dens_of_rows.clamp(min=1).sum(0)
        found[COUNTED_ROWS] = (dens_of_rows > 0).double().sum(0)
        found[ROOTS] = dens_of_rows.clamp(min=0).sqrt().sum(0)
        named["row means"] = torch.stack([_ratio(nums, den) for den, nums in by_row]).sum(0)
        named["row roots"] = torch.stack([_ratio(nums, den.sqrt()) for den, nums in by_row]).sum(0)
    else:
        found |= dict.fromkeys((CLAMPED, COUNTED_ROWS, ROOTS), dens)
        named |= dict.fromkeys(("row means", "row roots"), nums)
    kinds |= {CLAMPED: "clamped", COUNTED_ROWS: "rows", ROOTS: "roots"}
    for count in counts(batch):
        found[count.code] = count.by_row.sum().expand(len(dens))
        kinds[count.code] = f"{count.kind} shifted" if count.shifted else count.kind
        if count.kind == "documents":
            less = f"den - ({count.code} - len(batch))"
            found[less] = dens - (count.by_row - 1).sum()
            kinds[less] = "less boundaries"
    return Reading(_term_names(passed), named, found, kinds)


def _sums(problem: Problem, batch: Any) -> tuple[Tensor, Tensor]:
    """The dens ``[K]`` and the nums with their gradients ``[K, D]`` of one batch."""
    return _sums_of(forward(problem.loss_fn, problem.params, batch))


def _sums_of(passed: Forward) -> tuple[Tensor, Tensor]:
    nums = [num for leaf in tree.leaves(passed.terms.num) for num in leaf.reshape(-1)]
    dens = tree.broadcast_prefix(passed.terms.den, passed.terms.num)
    sizes = [leaf.numel() for leaf in tree.leaves(passed.terms.num)]
    flat = [_expand(den, size) for den, size in zip(dens, sizes, strict=True)]
    leaves = list(passed.leaves.values())
    return torch.cat(flat), torch.stack([_with_gradient(num, leaves) for num in nums])


def _with_gradient(num: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    if not (num.requires_grad and leaves):
        grads = [torch.zeros_like(leaf) for leaf in leaves]
    else:
        grads = torch.autograd.grad(num, leaves, retain_graph=True, materialize_grads=True)
    return torch.cat([each.detach().double().reshape(-1).cpu() for each in (num, *grads)])


def _rows(problem: Problem, batch: Any) -> list[tuple[Tensor, Tensor]]:
    """The sums of each row, if there are rows and not too many of them."""
    size = num_rows(batch) if has_rows(batch) else 0
    if size > _MAX_ROWS:
        return []
    return [_sums(problem, take_rows(batch, [row])) for row in range(size)]


_MAX_ROWS = 16


def _add_up(rows: Sequence[Tensor], nums: Tensor) -> bool:
    return torch.allclose(torch.stack(list(rows)).sum(0), nums, equal_nan=True)


def _ratio(nums: Tensor, den: Tensor) -> Tensor:
    return torch.where(den.unsqueeze(-1) > 0, nums / den.unsqueeze(-1), 0.0)


def _with_ones(batch: Any, fields: Sequence[MaskField]) -> Any:
    """``batch`` with everything counted, and with a weight of one."""
    leaves, structure = tree.flatten(batch)
    for field in fields:
        leaves[field.leaf] = torch.ones_like(leaves[field.leaf])
    return tree.unflatten(structure, leaves)


def _expand(den: Any, size: int) -> Tensor:
    return torch.as_tensor(den).detach().double().reshape(-1).cpu().expand(size)


def _grid(
    windows: Sequence[Sequence[Reading]], length: int, pick: Callable[[Reading], Tensor]
) -> Tensor:
    """One value of each micro-step as ``[K, R, M, …]``, zeros where there is no micro-step."""
    like = next(pick(reading) for window in windows for reading in window)
    rows = []
    for window in windows:
        values = [pick(reading) for reading in window]
        rows.append(torch.stack([*values, *[torch.zeros_like(like)] * (length - len(window))]))
    return torch.stack(rows).movedim(2, 0)


def _term_names(passed: Forward) -> tuple[str, ...]:
    named = tree.named(passed.terms.num).items()
    return tuple(
        name.strip("[]'\"") + (f"[{place}]" if leaf.numel() > 1 else "")
        for name, leaf in named
        for place in range(leaf.numel())
    )


def _weights(problem: Problem, num_terms: int) -> Tensor:
    if not isinstance(problem.objective, TermMean):
        raise TypeError(
            f"facts_of: knows the wrong formulas of term_mean, got objective={problem.objective}."
        )
    weights = problem.objective.weights
    if weights is None:
        return torch.ones(num_terms, dtype=torch.float64)
    flat = torch.tensor([float(weight) for weight in tree.leaves(weights)], dtype=torch.float64)
    return flat if len(flat) == num_terms else torch.ones(num_terms, dtype=torch.float64)
