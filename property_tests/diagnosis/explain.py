"""Which wrong formula gives the wrong numbers, in words."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pure.objective import Objective, term_mean
from ...pure.terms import LossFn
from ..reports.report import Diagnosis
from ..violation import worst_place
from ..worlds.draw import batches_of
from ..worlds.problems import Problem
from ..worlds.world import World, as_result, windows_of
from .compare import Leaf, Observation, observe, wrong_leaves
from .facts import Facts
from .faults import Fault
from .formulas import Candidate, Sighting, sighting_of, surviving
from .recipe import Finish

__all__ = ["Laboratory", "diagnose", "diagnosed"]

_NUM_SIGHTINGS = 10
_MAX_LEAVES = 6
_NEARLY = 1e-2
"""Half of what bfloat16 rounds by, and far less than a wrong count."""


class Laboratory(NamedTuple):
    """What a diagnosis may use.

    Attributes:
        problem: what is right.
        hints: what explained other values of the same runs; each diagnosis adds to it.
        finish: what happens to a gradient before it is seen.
        rtol: the tolerance, or None.
        run_where: finds a world on which a condition holds and runs the step there.
        time_is_up: whether to stop.
    """

    problem: Problem
    hints: list[Candidate]
    finish: Finish = Finish()
    rtol: float | None = None
    run_where: Callable[[Callable[[World], bool]], Observation | None] = lambda condition: None
    time_is_up: Callable[[], bool] = lambda: False


def diagnose(
    seen: Sequence[tuple[Any, Any]],
    loss_fn: LossFn,
    params: Any,
    *,
    objective: Objective = term_mean(),
    max_norm: float | None = None,
    rtol: float | None = None,
) -> tuple[Diagnosis, ...]:
    """Explain numbers that come from anywhere: a log, another framework, a step that ran once.

    Args:
        seen: windows and what was got there: a ``World`` (or a sequence of windows by rank), and a
            ``StepResult`` or a bare gradient. The more windows, the fewer formulas fit.
        loss_fn: the sums that are right: ``(params, batch) -> LossTerms``.
        params: a pytree of tensors or an ``nn.Module``.
        objective: from total sums to the loss, a ``term_mean``.
        max_norm: the global norm to which the gradient is clipped.
        rtol: relative tolerance; the root of the machine epsilon if not given.

    Returns:
        A diagnosis for each value that is wrong; none if all are right.

    Examples:
        >>> from numden.property_tests.worlds.problems import token_batch, tokens
        >>> problem = tokens()
        >>> window = [token_batch([[8.0]]), token_batch([[2.0, 2.0, 2.0]])]
        >>> five = {"w": torch.tensor(5.0).double()}
        >>> found = diagnose([([window], five)], problem.loss_fn, problem.params)
        >>> found[0].faults
        ('mean of micro-step means',)
    """
    problem = Problem(loss_fn, params, batches_of([]), objective)
    lab = Laboratory(problem, [], Finish(max_norm), rtol)
    runs = [
        observe(problem, windows_of(windows), as_result(result), lab.finish, lr=1.0)
        for windows, result in seen
    ]
    found: list[Diagnosis] = []
    for name in dict.fromkeys(name for each in runs for name in each.quantities):
        shown = [each for each in runs if name in each.quantities]
        wrong = [each for each in shown if wrong_leaves(each.quantities[name], rtol)]
        if wrong:
            found += diagnosed(lab, wrong[0], shown, name)
    return tuple(found)


def diagnosed(
    lab: Laboratory, smallest: Observation, shown: Sequence[Observation], name: str
) -> tuple[Diagnosis, ...]:
    """One diagnosis for all leaves, else one for the wrong ones, else one for each of them.

    Args:
        lab: what may be used.
        smallest: the run that is shown to the reader.
        shown: all runs that show the quantity.
        name: the quantity.
    """
    wrong = {
        leaf.name: leaf for each in shown for leaf in wrong_leaves(each.quantities[name], lab.rtol)
    }
    leaves = smallest.quantities[name].leaves
    attempts = [[leaves]]
    if len(leaves) > 1:
        alone = [(leaf,) for leaf in wrong.values()]
        attempts += [[tuple(wrong.values())], alone[:_MAX_LEAVES]]
    first: tuple[Diagnosis, ...] = ()
    for groups in attempts:
        found = tuple(
            _diagnosis(lab, _runs(lab, smallest, shown, name, group), name, group)
            for group in groups
        )
        if any(each.faults for each in found):
            return found
        first = first or found
    return first


def _runs(
    lab: Laboratory,
    smallest: Observation,
    shown: Sequence[Observation],
    name: str,
    leaves: Sequence[Leaf],
) -> list[Observation]:
    """The runs to explain: a small one that is wrong in these leaves, more of them, some others."""

    def is_wrong(run: Observation) -> bool:
        return any(leaf in leaves for leaf in wrong_leaves(run.quantities[name], lab.rtol))

    wrong = [run for run in shown if is_wrong(run)]
    first = smallest if is_wrong(smallest) or not wrong else wrong[0]
    return [first, *_spread(wrong, _NUM_SIGHTINGS // 2), *_spread(shown, _NUM_SIGHTINGS // 2)]


def _spread(runs: Sequence[Observation], num: int) -> Sequence[Observation]:
    return runs[:: max(1, -(-len(runs) // num))]


def _diagnosis(
    lab: Laboratory, runs: Sequence[Observation], name: str, leaves: Sequence[Leaf]
) -> Diagnosis:
    """The diagnosis of some leaves of a quantity."""
    places = torch.cat([torch.arange(leaf.place.start, leaf.place.stop) for leaf in leaves])

    def sighting(run: Observation) -> Sighting:
        return sighting_of(lab.problem, run, name, places, lab.finish)

    def ask(condition: Callable[[Sighting], bool]) -> Sighting | None:
        # What would be right on a world that has not been run is not looked at.
        run = lab.run_where(lambda world: condition(sighting(runs[0]._replace(world=world))))
        return None if run is None else sighting(run)

    where = ", ".join(leaf.name for leaf in leaves)
    try:
        seen = [sighting(run) for run in runs]
    except TypeError as error:  # The objective is no term_mean.
        return Diagnosis((), f"{error}", "Compare the smallest window by hand.", where)
    options = {"rtol": lab.rtol, "hints": lab.hints, "time_is_up": lab.time_is_up}
    left, tried_all = surviving(seen, ask, lab.finish, **options)
    if left:
        lab.hints.append(left[0])
        return _in_words_of(where, _named(left, seen, where))
    return _unnamed(seen, where, tried_all)


def _named(left: Sequence[Candidate], seen: Sequence[Sighting], where: str) -> Diagnosis:
    best = left[0]
    terms = seen[0].facts.terms
    names = tuple(_name(fault, at, seen) for fault, at in best.faults)
    words = [f"{_in(at, terms)}{fault.says}" for fault, at in best.faults]
    first = seen[0]
    value = first.value(best.recipe)[first.places]
    worst = worst_place(first.expected[first.places], value)
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
        _distinct(others, names),
        len(seen),
    )


def _distinct(
    others: Sequence[tuple[str, ...]], names: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """The sets of names among ``others`` that are not ``names``, each once."""
    by_set = {frozenset(other): other for other in others}
    return tuple(other for key, other in by_set.items() if key != frozenset(names))


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
    return f"in the term {terms[at[0]]}, " if at and len(at) < len(terms) else ""


def _unnamed(seen: Sequence[Sighting], where: str, tried_all: bool) -> Diagnosis:
    """What can be said where no formula matches: whether the ratio is the same everywhere."""
    ratios = torch.cat([_ratios(each) for each in seen])
    size = float(ratios.mean()) if len(ratios) else float("nan")
    if len(ratios) and bool(((ratios - 1).abs() <= _NEARLY).all()):
        worst = float((ratios - 1).abs().max())
        return Diagnosis(
            ("rounding",),
            f"The value is right but for rounding: off by {worst:.1e} of it at most, on each of "
            f"{len(seen)} windows. A dtype on the way is short of digits.",
            "Accumulate and divide in the dtype of the params or better; count in float64.",
            where,
            (),
            len(seen),
        )
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
    which = "formula of the catalogue" if tried_all else "single fault of the catalogue"
    more = "" if tried_all else " The time was up before all pairs of faults were tried."
    return Diagnosis(
        (),
        f"No {which} gives these numbers on all of {len(seen)} windows.{more}{spread}",
        "Compare the smallest window below by hand."
        if tried_all
        else "Give the check more time (budget_s).",
        where,
        (),
        len(seen),
    )


def _ratios(seen: Sighting) -> Tensor:
    expected, got = seen.expected[seen.places], seen.got[seen.places]
    return (got / expected)[expected != 0]


def _number(value: Tensor) -> str:
    return f"{float(value):.6g}"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
