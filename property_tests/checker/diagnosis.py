"""Which wrong formula gives the wrong numbers: the smallest set of faults that explains all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compare import Observation, close
from .facts import Facts, facts_of
from .faults import Fault, apply, catalogue
from .problems import Problem
from .recipe import Finish, Recipe, TermRecipe, evaluator
from .report import Diagnosis

__all__ = ["Sighting", "diagnosed", "sighting_of"]

_MAX_FAULTS = 3
_MAX_ROUNDS = 12


class Sighting(NamedTuple):
    """Wrong (or right) numbers on one world, with all that a formula may use.

    Attributes:
        facts: the sums of the world.
        value: what a recipe gives there, ``[1 + P]``.
        got: what was seen, ``[1 + P]``; only ``places`` of it count.
        places: the indices that are explained.
        eps: how exact they are.
        expected: what is right, ``[1 + P]``.
    """

    facts: Facts
    value: Callable[[Recipe], Tensor]
    got: Tensor
    places: Tensor
    eps: float
    expected: Tensor


class Candidate(NamedTuple):
    """A recipe and the faults that made it, each with the terms that it is in."""

    recipe: Recipe
    faults: tuple[tuple[Fault, tuple[int, ...]], ...]

    @property
    def cost(self) -> int:
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
    return Sighting(facts, evaluator(facts, finish), got, start + places, values.eps, expected)


def diagnosed(
    sightings: Sequence[Sighting],
    ask: Callable[[Callable[[Sighting], bool]], Sighting | None],
    where: str,
    finish: Finish,
    rtol: float | None = None,
) -> Diagnosis:
    """The smallest set of faults that gives what was seen on all ``sightings``, and on new ones.

    Args:
        sightings: the one to explain first, then others.
        ask: finds a world on which a condition holds (its ``got`` is not looked at), runs the
            step there, and returns what was seen; None if there is no such world.
        where: what is explained, such as ``grads['w']``.
        finish: what happens to a gradient before it is seen.
        rtol: the tolerance, relative; by the epsilon of the values if None.
    """
    seen = list(sightings)
    faults = _distinct(seen, finish)
    for size in range(1, _MAX_FAULTS + 1):
        left = [c for c in _candidates(seen[0].facts, faults, size) if _fits(c, seen, rtol)]
        left = _told_apart(sorted(left, key=lambda c: c.cost), seen, ask, rtol)
        if left:
            return _in_words_of(where, _named(left, seen, where))
    return _unnamed(seen, where)


def _fits(candidate: Candidate, seen: Iterable[Sighting], rtol: float | None) -> bool:
    return all(_agrees(each, each.value(candidate.recipe), rtol) for each in seen)


def _agrees(seen: Sighting, value: Tensor, rtol: float | None) -> bool:
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
    for code in facts.counts:
        key = tuple(
            tuple(each.facts.counts[code].flatten().tolist() + each.facts.rest[code].tolist())
            for each in seen
        )
        known.setdefault(key, code)
    codes = set(known.values())
    return [
        fault
        for fault in faults
        if fault.change.get("count", "den") in codes
        and fault.change.get("weigh", "den") in codes
        and not ("nums" in fault.change and _reads_alike(seen, fault.change["nums"]))
    ]


def _reads_alike(seen: Sequence[Sighting], nums: str) -> bool:
    return all(torch.equal(each.facts.nums[nums], each.facts.nums[""]) for each in seen)


def _told_apart(
    left: list[Candidate],
    seen: list[Sighting],
    ask: Callable[[Callable[[Sighting], bool]], Sighting | None],
    rtol: float | None,
) -> list[Candidate]:
    """The candidates that survive worlds on which they differ; ``seen`` grows by these worlds."""
    for _ in range(_MAX_ROUNDS):
        if len(left) < 2:
            break
        few = left[:40]
        new = ask(lambda sighting, few=few: _differ(few, sighting, rtol))
        if new is None:
            break
        seen.append(new)
        left = [c for c in left if _fits(c, [new], rtol)]
    return left


def _differ(candidates: Sequence[Candidate], sighting: Sighting, rtol: float | None) -> bool:
    first, *others = [sighting.value(c.recipe)[sighting.places] for c in candidates]
    return not all(close(first, other, sighting.eps, rtol) for other in others)


def _named(left: Sequence[Candidate], seen: Sequence[Sighting], where: str) -> Diagnosis:
    best = left[0]
    terms = seen[0].facts.terms
    names = tuple(_name(fault, at, seen) for fault, at in best.faults)
    words = [f"{fault.says}{_in(at, terms)}" for fault, at in best.faults]
    first = seen[0]
    value = first.value(best.recipe)[first.places]
    worst = _worst(first.expected[first.places], value)
    numbers = (
        f"On the window below that gives {_number(value[worst])}, where "
        f"{_number(first.expected[first.places][worst])} is right."
    )
    others = [tuple(_name(f, at, seen) for f, at in each.faults) for each in left[1:]]
    return Diagnosis(
        names,
        f"{_sentence('; and '.join(words))} {numbers}",
        " ".join(dict.fromkeys(fault.remedy for fault, _ in best.faults)),
        where,
        tuple(dict.fromkeys(other for other in others if other != names)),
        len(seen),
    )


def _in_words_of(where: str, diagnosis: Diagnosis) -> Diagnosis:
    """An evaluation has batches, and no micro-steps."""
    if where != "evaluation loss":
        return diagnosis
    faults = tuple(name.replace("micro-step", "batch") for name in diagnosis.faults)
    said = diagnosis.explanation.replace("micro-step", "batch")
    return diagnosis._replace(faults=faults, explanation=said)


def _name(fault: Fault, at: Sequence[int], seen: Sequence[Sighting]) -> str:
    """The name of a fault; where it is in one of several terms, said of that term."""
    terms = seen[0].facts.terms
    if fault.whole or len(at) == len(terms):
        return fault.name
    name = fault.name
    if all(_is_per_micro_step(each.facts, at[0]) for each in seen):
        # Its den is 1 in each micro-step, so what is not divided is multiplied.
        name = name.replace("missing division by", "times")
    for start, said in (("times ", "multiplied by "), ("divided ", "divided ")):
        if name.startswith(start):
            return f"term {said}{name.removeprefix(start)}"
    return f"term {name}" if name.startswith("counted") else name


def _is_per_micro_step(facts: Facts, index: int) -> bool:
    return torch.equal(facts.counts["den"][index], facts.present.double())


def _in(at: Sequence[int], terms: Sequence[str]) -> str:
    return f", in the term {terms[at[0]]}" if at and len(at) < len(terms) else ""


def _unnamed(seen: Sequence[Sighting], where: str) -> Diagnosis:
    """What can be said where no formula matches: whether the ratio is the same everywhere."""
    ratios = torch.cat([_ratios(each) for each in seen])
    size = float(ratios.mean()) if len(ratios) else float("nan")
    if len(ratios) and bool(((ratios - size).abs() <= 1e-3 * abs(size)).all()):
        return Diagnosis(
            ("constant factor",),
            f"The value is {size:.6g} times the right one on each of {len(seen)} windows, "
            "whatever the number of tokens, micro-steps and ranks.",
            "Look for a constant: a coefficient or a learning rate that is applied twice or not "
            "at all, a mean over a dimension of fixed size.",
            where,
            (),
            len(seen),
        )
    spread = (
        f" The ratio to the right value lies between {float(ratios.min()):.4g} and "
        f"{float(ratios.max()):.4g}."
        if len(ratios)
        else ""
    )
    return Diagnosis(
        (),
        f"No formula of the catalogue gives these numbers on all of {len(seen)} windows.{spread}",
        "Compare the smallest window below by hand.",
        where,
        (),
        len(seen),
    )


def _ratios(seen: Sighting) -> Tensor:
    expected, got = seen.expected[seen.places], seen.got[seen.places]
    return (got / expected)[expected != 0]


def _worst(expected: Tensor, got: Tensor) -> int:
    gap = (expected - got).abs().nan_to_num(nan=torch.inf)
    return int(gap.argmax())


def _number(value: Tensor) -> str:
    return f"{float(value):.6g}"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
