"""The search among wrong formulas: which of them give the numbers seen, and on which worlds not."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..worlds.problems import Problem
from .compare import Observation, close
from .facts import DEN, Facts, facts_of, is_of_den
from .faults import Fault, apply, catalogue
from .recipe import Finish, Recipe, TermRecipe, evaluator

__all__ = ["Ask", "Candidate", "Sighting", "sighting_of", "surviving"]

_MAX_FAULTS = 3
_MAX_ROUNDS = 12
_MAX_PREDICTED = 40
_AT_A_TIME = 200


class Sighting(NamedTuple):
    """Wrong (or right) numbers on one world, with all that a formula may use.

    Attributes:
        facts: the sums of the world.
        value: what a recipe gives there, ``[1 + P]``.
        got: what was seen, ``[1 + P]``; only ``places`` of it count.
        places: the indices that are explained.
        eps: how exact they are.
        expected: what is right, ``[1 + P]``.
        pivot: the place where most is expected: who is off there need not be looked at elsewhere.
        size: the largest value that was seen.
    """

    facts: Facts
    value: Callable[[Recipe], Tensor]
    got: Tensor
    places: Tensor
    eps: float
    expected: Tensor
    pivot: int
    size: float


Ask = Callable[[Callable[[Sighting], bool]], Sighting | None]
"""Finds a world on which a condition holds, whose ``got`` is not looked at; runs the step there."""


class Candidate(NamedTuple):
    """A recipe and the faults that made it, each with the terms that it is in."""

    recipe: Recipe
    faults: tuple[tuple[Fault, tuple[int, ...]], ...]

    @property
    def cost(self) -> int:
        """How far-fetched it is."""
        return sum(fault.cost for fault, _ in self.faults)


def sighting_of(
    problem: Problem, seen: Observation, quantity: str, places: Tensor, finish: Finish
) -> Sighting:
    """What was seen of ``quantity`` at ``places`` of its vector."""
    facts = facts_of(problem, seen.world)
    values = seen.quantities[quantity]
    start = 0 if quantity.endswith("loss") else 1  # The loss comes first, then the gradient.
    got, expected = torch.zeros(2, facts.nums[""].shape[-1], dtype=torch.float64)
    got[start : start + len(values.got)] = values.got
    expected[start : start + len(values.got)] = values.expected
    at = start + places
    pivot = int(at[expected[at].abs().argmax()])
    size = float(got[at].nan_to_num().abs().max())
    return Sighting(facts, evaluator(facts, finish), got, at, values.eps, expected, pivot, size)


def surviving(
    seen: list[Sighting],
    ask: Ask,
    finish: Finish,
    *,
    rtol: float | None = None,
    hints: Sequence[Candidate] = (),
    time_is_up: Callable[[], bool] = lambda: False,
) -> tuple[list[Candidate], bool]:
    """The recipes of as few faults as possible that give what was seen, the likeliest first.

    Those that agree on all that was seen are told apart by new worlds.

    Args:
        seen: what was seen; grows by the new worlds.
        ask: runs the step on such a world.
        finish: what happens to a gradient before it is seen.
        rtol: the tolerance, relative; by the epsilon of the values if None.
        hints: candidates that explained another value; tried after the single faults.
        time_is_up: whether to try no more; single faults are tried all the same.

    Returns:
        Recipes that agree on each world that was found; none if no formula fits. And whether all
        were tried.
    """
    faults = _distinct(seen, finish)
    for size in range(1, _MAX_FAULTS + 1):
        left = [c for c in hints if len(c.faults) == size > 1 and _fits(c, seen, rtol)]
        candidates = iter(()) if left else _candidates(seen[0].facts, faults, size)
        while some := list(islice(candidates, _AT_A_TIME)):
            if size > 1 and time_is_up():
                return [], False
            left += [c for c in some if _fits(c, seen, rtol)]
        left = _told_apart(sorted(left, key=lambda c: c.cost), seen, ask, rtol)
        if left:
            return left, True
    return [], True


def _fits(candidate: Candidate, seen: Iterable[Sighting], rtol: float | None) -> bool:
    return all(_agrees(each, each.value(candidate.recipe), rtol) for each in seen)


def _agrees(seen: Sighting, value: Tensor, rtol: float | None) -> bool:
    a, b = float(value[seen.pivot]), float(seen.got[seen.pivot])
    tolerance = math.sqrt(seen.eps) if rtol is None else rtol
    if abs(a - b) > 2 * tolerance * max(abs(a), abs(b), seen.size):
        return False  # Most candidates are off there, and this is quick.
    return close(value[seen.places], seen.got[seen.places], seen.eps, rtol)


def _candidates(facts: Facts, faults: Sequence[Fault], size: int) -> Iterator[Candidate]:
    """All recipes with ``size`` faults, each recipe once."""
    right = Recipe((TermRecipe(),) * len(facts.terms))
    every = tuple(range(len(facts.terms)))
    targets = [every, *[(index,) for index in every]] if len(every) > 1 else [every]
    limit = 1 if size == _MAX_FAULTS else 10
    known = {right}
    for chosen in combinations([fault for fault in faults if fault.cost <= limit], size):
        for where in product(*[[()] if fault.whole else targets for fault in chosen]):
            recipe: Recipe | None = right
            for fault, terms in zip(chosen, where, strict=True):
                recipe = apply(recipe, fault, terms) if recipe is not None else None
            if recipe is not None and recipe not in known:
                known.add(recipe)
                yield Candidate(recipe, tuple(zip(chosen, where, strict=True)))


def _distinct(seen: Sequence[Sighting], finish: Finish) -> list[Fault]:
    """The catalogue, less counts that are the same as another on all that was seen."""
    facts = max((each.facts for each in seen), key=lambda facts: facts.sizes["ranks"])
    faults = catalogue(facts, clips=finish.max_norm is not None, updates=finish.update is not None)
    known: dict[tuple[Any, ...], str] = {}
    # A count of the batch's own fields says more than a den that was made up.
    for code in sorted(facts.counts, key=is_of_den):
        key = tuple(
            tuple(each.facts.counts[code].flatten().tolist() + each.facts.rest[code].tolist())
            for each in seen
        )
        known.setdefault(key, code)
    codes = set(known.values())
    return [
        fault
        for fault in faults
        if (fault.change.get("count", DEN) in codes or "nums" in fault.change)
        and fault.change.get("weigh", DEN) in codes
        and not ("nums" in fault.change and _reads_alike(seen, fault.change["nums"]))
    ]


def _reads_alike(seen: Sequence[Sighting], nums: str) -> bool:
    return all(torch.equal(each.facts.nums[nums], each.facts.nums[""]) for each in seen)


def _told_apart(
    left: list[Candidate],
    seen: list[Sighting],
    ask: Ask,
    rtol: float | None,
) -> list[Candidate]:
    """The candidates that survive worlds on which they differ; ``seen`` grows by these worlds."""
    for _ in range(_MAX_ROUNDS):
        if len(left) < 2:
            break
        few = left[:_MAX_PREDICTED]
        new = ask(lambda sighting, few=few: _differ(few, sighting, rtol))
        if new is None:
            break
        seen.append(new)
        left = [c for c in left if _fits(c, [new], rtol)]
    return left


def _differ(candidates: Sequence[Candidate], sighting: Sighting, rtol: float | None) -> bool:
    first, *others = [sighting.value(c.recipe)[sighting.places] for c in candidates]
    return not all(close(first, other, sighting.eps, rtol) for other in others)
