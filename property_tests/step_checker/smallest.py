"""The search for worlds: the smallest on which something holds."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from hypothesis.strategies import SearchStrategy

from ..diagnosis.compare import Observation, wrong_leaves
from ..reports.report import Progress
from ..rows import has_rows, num_elements, num_rows, take_rows
from ..worlds.draw import OutOfTime, first_that
from ..worlds.problems import Problem
from ..worlds.reference import reference_of
from ..worlds.world import World
from .run import Deadline, Runner, StepFailed

__all__ = ["Search", "counts_something", "size_of", "smallest_wrong"]

_MAX_TRIED = 150


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
        """The smallest world that counts something and meets ``condition``, of a few hundred."""
        tried = 0

        def checked(world: World) -> bool:
            nonlocal tried
            tried += 1
            # A number of tries gives the same world each time; a time limit would not.
            if tried > _MAX_TRIED or self.deadline.is_over():
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


def smallest_wrong(search: Search, name: str) -> Observation | None:
    """The smallest world on which the quantity is wrong, run once more."""

    def is_wrong(world: World) -> bool:
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
        if counts_something(search.runner.problem, smaller) and is_wrong(smaller):
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
            rows = range(num_rows(batch) if has_rows(batch) else 0)
            for row in rows if len(rows) > 1 else ():
                windows = [list(window) for window in world]
                windows[rank][index] = take_rows(batch, [each for each in rows if each != row])
                yield World(windows, mesh=world.mesh, accumulation=world.accumulation)


def size_of(seen: Observation) -> tuple[int, int, int]:
    """The size of a world: its ranks, micro-steps and numbers."""
    batches = [batch for window in seen.world for batch in window]
    return len(seen.world), len(batches), num_elements(batches)
