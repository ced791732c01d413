"""Worlds to try a step on, and searches among them."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import DrawFn, SearchStrategy

from ..rows import batch_list, has_rows, num_rows, take_rows
from .world import REPLICATED, World

__all__ = [
    "OutOfTime",
    "batches_of",
    "drawn",
    "first_that",
    "quiet_settings",
    "step_worlds",
    "tiled",
]

T = TypeVar("T")


class OutOfTime(BaseException):
    """Raised by a condition to leave a search at once; Hypothesis would catch an Exception."""


@st.composite
def step_worlds(
    draw: DrawFn,
    batches: SearchStrategy[Any],
    meshes: SearchStrategy[dict[str, int]],
    *,
    max_micro_steps: int = 4,
    uneven: bool = False,
) -> World:
    """Worlds of batches: ranks, micro-steps, partial windows, generation batches.

    Args:
        draw: given by Hypothesis.
        batches: draws a micro-batch.
        meshes: draws the mesh.
        max_micro_steps: the longest window.
        uneven: whether ranks may differ in their number of micro-steps, down to none.
    """
    mesh = draw(meshes)
    num_data = math.prod(size for axis, size in mesh.items() if axis not in REPLICATED)
    length = draw(st.integers(1, max_micro_steps))
    lengths = [length] * num_data
    if uneven:
        lengths[1:] = [draw(st.integers(0, length)) for _ in lengths[1:]]
    windows = [[draw(batches) for _ in range(length)] for length in lengths]
    rest = [[draw(batches) for _ in range(draw(st.integers(0, 1)))] for _ in lengths]
    accumulation = draw(st.integers(length, max_micro_steps))
    return _spread(windows, rest, mesh, accumulation)


def _spread(
    windows: Sequence[Any], rest: Sequence[Any], mesh: dict[str, int], accumulation: int
) -> World:
    """The windows of the data ranks, and copies of them on the ranks that see the same data."""
    empty = [()] * math.prod(mesh.values())
    places = World(empty, mesh=mesh, accumulation=0).coordinates
    data = [tuple(v for axis, v in place.items() if axis not in REPLICATED) for place in places]
    index = {place: i for i, place in enumerate(dict.fromkeys(data))}
    return World(
        [windows[index[place]] for place in data],
        mesh=mesh,
        accumulation=accumulation,
        rest=[rest[index[place]] for place in data],
    )


def batches_of(batches: Any) -> SearchStrategy[Any]:
    """A strategy as it is; of one batch or several: some rows of one of them."""
    if isinstance(batches, SearchStrategy):
        return batches
    return st.sampled_from(batch_list(batches)).flatmap(_some_rows)


def _some_rows(batch: Any) -> SearchStrategy[Any]:
    if not has_rows(batch):
        return st.just(batch)
    size = num_rows(batch)
    rows = st.lists(st.integers(0, size - 1), min_size=1, max_size=min(size, 4), unique=True)
    return rows.map(lambda rows: take_rows(batch, rows))


def tiled(world: World, times: int) -> World:
    """``world`` with the rows of each micro-batch repeated: counts that a short dtype rounds."""

    def repeat(batch: Any) -> Any:
        return take_rows(batch, [*range(num_rows(batch))] * times)

    return World(
        [[repeat(batch) for batch in window] for window in world],
        mesh=world.mesh,
        accumulation=world.accumulation,
    )


def drawn(
    strategy: SearchStrategy[T], num: int, seed: int, that: Callable[[T], bool] = lambda _: True
) -> list[T]:
    """``num`` examples of ``strategy`` that meet a condition, if there are; the simplest first."""
    examples: list[T] = []

    def keep(example: T) -> bool:
        if len(examples) == num:
            raise OutOfTime
        if that(example):
            examples.append(example)
        return False

    first_that(strategy, keep, seed=seed, max_examples=4 * num)
    return examples


def first_that(
    strategy: SearchStrategy[T],
    condition: Callable[[T], bool],
    *,
    seed: int,
    max_examples: int = 200,
) -> T | None:
    """The simplest example that meets ``condition``, or the simplest seen before OutOfTime."""
    met: list[T] = []

    def recorded(example: T) -> bool:
        found = condition(example)
        if found:
            met.append(example)
        return found

    try:
        chosen = quiet_settings(max_examples)
        return find(strategy, recorded, settings=chosen, random=random.Random(seed))
    except NoSuchExample:
        return None
    except OutOfTime:
        return met[-1] if met else None


def quiet_settings(max_examples: int) -> settings:
    """Settings of a search that prints nothing, keeps nothing, and is as slow as it is."""
    return settings(
        max_examples=max_examples,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=_HEALTH_CHECKS,
    )


_HEALTH_CHECKS = [
    HealthCheck.data_too_large,
    HealthCheck.differing_executors,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
    HealthCheck.nested_given,
    HealthCheck.too_slow,
]
