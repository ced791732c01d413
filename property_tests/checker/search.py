"""The search for the smallest world on which a step is wrong, and for worlds that tell why."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from ...pure import tree
from ..rows import num_rows, take_rows
from ..violation import Difference, LawViolation
from .compare import Leaf, Observation, Quantity, wrong_leaves
from .diagnosis import Sighting, diagnosed, sighting_of
from .draw import OutOfTime, first_that
from .example import as_example, worst_of
from .problems import Problem
from .reference import reference_of
from .report import Diagnosis, Verdict
from .run import Deadline, Progress, Runner, StepFailed
from .world import World

__all__ = ["Search", "compared", "counts_something"]

_NUM_SIGHTINGS = 10
_SHRINK_S = 5.0


class Search(NamedTuple):
    """What a search needs.

    Attributes:
        runner: runs the step.
        worlds: draws worlds.
        fewest_ranks: how many ranks a world has at least.
        seed: of the draws.
        rtol: the tolerance, or None.
        deadline: after it no search is begun.
        progress: is told what is being done.
    """

    runner: Runner
    worlds: SearchStrategy[World]
    fewest_ranks: int
    seed: int
    rtol: float | None
    deadline: Deadline
    progress: Progress

    def smallest(
        self, condition: Callable[[World], bool], *, max_examples: int = 200
    ) -> World | None:
        """The smallest world that counts something and meets ``condition``, in a few seconds."""
        time_is_up = Deadline.after(_SHRINK_S)

        def checked(world: World) -> bool:
            if self.deadline.is_over() or time_is_up.is_over():
                raise OutOfTime
            return counts_something(self.runner.problem, world) and condition(world)

        return first_that(self.worlds, checked, seed=self.seed, max_examples=max_examples)


def counts_something(problem: Problem, world: World) -> bool:
    """Whether each total den is positive, so that there is a right value."""
    if not any(world):
        return False
    reference = reference_of(problem, world)
    dens = torch.cat([den.double().reshape(-1) for den in reference.dens])
    return bool((dens > 0).all() and reference.loss.isfinite())


def compared(search: Search, seen: Sequence[Observation], name: str) -> Verdict:
    """The verdict on the quantity ``name``, of which all runs are in ``seen``."""
    shown = [each for each in seen if name in each.quantities]
    wrong = [each for each in shown if wrong_leaves(each.quantities[name], search.rtol)]
    if not wrong:
        return Verdict(name, "holds", f"equal to Σnum/Σden on each of {len(shown)} windows")
    search.progress(f"the {name} is wrong: looking for the smallest window")
    smallest = _smallest_wrong(search, name) or min(wrong, key=_size)
    search.progress(f"the {name} is wrong: looking for the formula behind it")
    diagnoses = _diagnoses(search, smallest, shown, name)
    quantity = smallest.quantities[name]
    leaves = wrong_leaves(quantity, search.rtol)
    problem = search.runner.problem
    return Verdict(
        name,
        "broken",
        _words(name, len(wrong), shown, search.rtol),
        _violation(name, quantity, leaves, diagnoses),
        as_example(problem, smallest.world, quantity, leaves[0]),
        _code(smallest.world),
        diagnoses,
    )


def _words(name: str, num_wrong: int, shown: Sequence[Observation], rtol: float | None) -> str:
    words = f"wrong on {num_wrong} of {len(shown)} windows"
    gradients = [each.quantities[key] for each in shown for key in _UPDATES & set(each.quantities)]
    if name == "logged loss" and gradients and not any(wrong_leaves(g, rtol) for g in gradients):
        words += "; the gradient is right: what is logged is not what is optimised"
    return words


_UPDATES = {"gradient", "update"}


def _smallest_wrong(search: Search, name: str) -> Observation | None:
    """The smallest world on which the quantity is wrong, run once more."""

    def is_wrong(world: World) -> bool:
        if not counts_something(search.runner.problem, world):
            return False
        try:
            quantity = search.runner(world).quantities.get(name)
        except StepFailed:
            return False
        return quantity is not None and bool(wrong_leaves(quantity, search.rtol))

    world = search.smallest(is_wrong)
    return None if world is None else search.runner(_with_less(search, world, is_wrong))


def _with_less(search: Search, world: World, is_wrong: Callable[[World], bool]) -> World:
    """``world`` without the ranks, micro-steps and rows that it can be wrong without."""
    parts = (
        _without_a_rank(world, search.fewest_ranks),
        _without_a_micro_step(world),
        _without_a_row(world),
    )
    for smaller in chain(*parts):
        if is_wrong(smaller):
            return _with_less(search, smaller, is_wrong)
    return world


def _without_a_rank(world: World, fewest: int) -> Iterator[World]:
    if list(world.mesh) == ["dp"] and len(world) > fewest:
        for index in range(len(world)):
            windows = [*world[:index], *world[index + 1 :]]
            yield World(windows, accumulation=world.accumulation)


def _without_a_micro_step(world: World) -> Iterator[World]:
    for index in range(max(map(len, world)) if len(world) else 0):
        windows = [[*window[:index], *window[index + 1 :]] for window in world]
        yield World(windows, mesh=world.mesh, accumulation=world.accumulation)


def _without_a_row(world: World) -> Iterator[World]:
    for rank in world.data_ranks if len(world) == len(world.data_ranks) else ():
        for index, batch in enumerate(world[rank]):
            try:
                rows = range(num_rows(batch))
            except ValueError:
                continue
            for row in rows if len(rows) > 1 else ():
                windows = [list(window) for window in world]
                windows[rank][index] = take_rows(batch, [each for each in rows if each != row])
                yield World(windows, mesh=world.mesh, accumulation=world.accumulation)


def _size(seen: Observation) -> tuple[int, int, int]:
    leaves = [leaf for window in seen.world for batch in window for leaf in tree.leaves(batch)]
    numel = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
    return len(seen.world), sum(map(len, seen.world)), numel


def _diagnoses(
    search: Search, smallest: Observation, shown: Sequence[Observation], name: str
) -> tuple[Diagnosis, ...]:
    """One diagnosis for all leaves, else one for the wrong ones, else one for each of them."""
    others = shown[:: max(1, len(shown) // _NUM_SIGHTINGS)]
    leaves = smallest.quantities[name].leaves
    bad = {
        leaf.name: leaf
        for each in shown
        for leaf in wrong_leaves(each.quantities[name], search.rtol)
    }
    attempts = [[leaves], [tuple(bad.values())], [(leaf,) for leaf in bad.values()][:_MAX_LEAVES]]
    if len(leaves) == 1:
        attempts = attempts[:1]
    best: tuple[Diagnosis, ...] = ()
    for groups in attempts:
        best = tuple(_diagnose(search, [smallest, *others], name, group) for group in groups)
        if all(each.faults for each in best):
            break
    return best


_MAX_LEAVES = 6


def _diagnose(
    search: Search, seen: Sequence[Observation], name: str, leaves: Sequence[Leaf]
) -> Diagnosis:
    runner = search.runner
    places = torch.cat([torch.arange(leaf.place.start, leaf.place.stop) for leaf in leaves])

    def sighting(each: Observation) -> Sighting:
        return sighting_of(runner.problem, each, name, places, runner.finish)

    def ask(condition: Callable[[Sighting], bool]) -> Sighting | None:
        like = seen[0].quantities[name]

        def differs(world: World) -> bool:
            unseen = Observation(world, seen[0].reference, {name: like})
            return condition(sighting(unseen))

        world = search.smallest(differs, max_examples=40)
        try:
            return None if world is None else sighting(search.runner(world))
        except StepFailed:
            return None

    where = ", ".join(leaf.name for leaf in leaves)
    try:
        return diagnosed([sighting(each) for each in seen], ask, where, runner.finish, search.rtol)
    except TypeError as error:  # The objective is no term_mean.
        return Diagnosis((), f"{error}", "Compare the smallest window by hand.", where)


def _violation(
    name: str, quantity: Quantity, leaves: Sequence[Leaf], diagnoses: Sequence[Diagnosis]
) -> LawViolation:
    differences = []
    for leaf in leaves:
        place, expected, got = worst_of(quantity, leaf)
        differences.append(
            Difference(place, torch.tensor(expected).double(), torch.tensor(got).double())
        )
    causes = [f"{', '.join(each.faults)}. {each.explanation}" for each in diagnoses if each.faults]
    cause = " ".join(causes) or "no known wrong formula gives these values."
    return LawViolation(
        name, "must be Σnum/Σden over all micro-steps and ranks.", differences, cause
    )


def _code(world: World) -> str:
    from .code import as_code

    options = [f"accumulation={world.accumulation}"]
    if list(world.mesh) != ["dp"]:
        options.insert(0, f"mesh={world.mesh}")
    windows = as_code([list(window) for window in world])
    return f"world = World({windows}, {', '.join(options)})\nstep(params, world)"
