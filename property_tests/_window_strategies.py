"""Strategies for windows: counts, cuts into micro-steps, deals to ranks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from ._value_strategies import require_interval
from .rows import num_rows, take_rows

__all__ = ["meshes", "partitions", "ragged_counts", "windows", "worlds"]


def ragged_counts(
    *,
    min_size: int = 1,
    max_size: int = 8,
    min_value: int = 0,
    max_value: int = 16,
    min_total: int = 0,
) -> SearchStrategy[list[int]]:
    """The token counts of the micro-steps of a window.

    Args:
        min_size: least number of micro-steps.
        max_size: greatest number of them.
        min_value: least count of a micro-step.
        max_value: greatest count.
        min_total: least count of a window; 1 excludes windows with nothing to learn from.

    Raises:
        InvalidArgument: no window has these counts.

    Examples:
        >>> from hypothesis import find
        >>> find(ragged_counts(min_size=2), lambda counts: sum(counts) > 3)
        [0, 4]
    """
    require_interval("ragged_counts", "size", min_size, max_size)
    require_interval("ragged_counts", "value", min_value, max_value)
    if min_size < 0 or min_value < 0:
        raise InvalidArgument(f"ragged_counts: must be at least 0, got {min_size=}, {min_value=}.")
    if min_total > max_size * max_value:
        raise InvalidArgument(
            f"ragged_counts: {min_total=} is more than {max_size=} micro-steps of {max_value=}."
        )
    counts = st.lists(st.integers(min_value, max_value), min_size=min_size, max_size=max_size)
    return counts.filter(lambda counts: sum(counts) >= min_total)


def partitions(
    n: int, *, min_size: int = 1, max_size: int = 8, allow_empty: bool = True
) -> SearchStrategy[list[range]]:
    """Cuts of ``n`` rows into consecutive micro-steps.

    Args:
        n: number of rows.
        min_size: least number of micro-steps.
        max_size: greatest number of them; there are at most ``n`` without empty ones.
        allow_empty: whether a micro-step may have no rows.

    Raises:
        InvalidArgument: there is no such cut.

    Examples:
        >>> from hypothesis import find
        >>> find(partitions(5), lambda cut: len(cut) == 3)
        [range(0, 0), range(0, 0), range(0, 5)]
    """
    require_interval("partitions", "size", min_size, max_size)
    if n < 0 or min_size < 1:
        raise InvalidArgument(f"partitions: needs n >= 0 and min_size >= 1, got {n=}, {min_size=}.")
    if not allow_empty and min_size > n:
        raise InvalidArgument(f"partitions: {n=} rows make no {min_size=} micro-steps with rows.")
    places = st.integers(0, n) if allow_empty else st.integers(1, max(1, n - 1))
    most = max_size if allow_empty else min(n, max_size)
    cuts = st.lists(places, min_size=min_size - 1, max_size=most - 1, unique=not allow_empty)
    return cuts.map(lambda cuts: [range(a, b) for a, b in pairwise([0, *sorted(cuts), n])])


def worlds(
    n: int, *, min_ranks: int = 1, max_ranks: int = 4, allow_idle: bool = True
) -> SearchStrategy[list[list[int]]]:
    """Deals of ``n`` micro-steps to ranks.

    Args:
        n: number of micro-steps.
        min_ranks: least number of ranks.
        max_ranks: greatest number of ranks.
        allow_idle: whether a rank may have no micro-step.

    Returns:
        For each rank the numbers of its micro-steps, ascending.

    Raises:
        InvalidArgument: there is no such deal.

    Examples:
        >>> from hypothesis import find
        >>> find(worlds(3), lambda world: len(world) == 2)
        [[0, 1, 2], []]
    """
    require_interval("worlds", "ranks", min_ranks, max_ranks)
    if n < 0 or min_ranks < 1:
        raise InvalidArgument(f"worlds: needs n >= 0 and min_ranks >= 1, got {n=}, {min_ranks=}.")
    if not allow_idle and min_ranks > n:
        raise InvalidArgument(f"worlds: {n=} micro-steps leave one of {min_ranks=} ranks idle.")
    most = max_ranks if allow_idle else min(n, max_ranks)
    return st.integers(min_ranks, most).flatmap(lambda size: _deals(n, size, allow_idle))


def meshes(
    axes: Sequence[str] = ("dp", "tp"), *, max_ranks: int = 4
) -> SearchStrategy[dict[str, int]]:
    """Sizes of the axes of a device mesh.

    Args:
        axes: the names, from the slowest axis to the fastest.
        max_ranks: greatest number of ranks: the product of the sizes.

    Returns:
        The size of each axis by name, in the order of ``axes``; what ``init_device_mesh`` takes
        as ``tuple(mesh.values())`` and ``tuple(mesh)``.

    Raises:
        InvalidArgument: a name occurs twice, or there is no rank.

    Examples:
        >>> from hypothesis import find
        >>> find(meshes(("dp", "tp")), lambda mesh: mesh["tp"] > 1)
        {'dp': 1, 'tp': 2}
    """
    if max_ranks < 1 or len(set(axes)) < len(axes):
        raise InvalidArgument(
            f"meshes: needs axes of different names and max_ranks >= 1, got {axes=}, {max_ranks=}."
        )
    return _meshes(list(axes), max_ranks)


def windows(
    batches: SearchStrategy[Any],
    *,
    min_size: int = 1,
    max_size: int = 4,
    allow_empty: bool = True,
) -> SearchStrategy[list[Any]]:
    """Windows: the rows of a batch, cut into micro-batches.

    Args:
        batches: draws the batch, a pytree of tensors with rows on the leading axis.
        min_size: least number of micro-steps.
        max_size: greatest number of them.
        allow_empty: whether a micro-batch may have no rows.

    Examples:
        >>> from hypothesis import find
        >>> from numden.property_tests.strategies import dyadic_tensors
        >>> rows = dyadic_tensors((3,)).map(lambda x: {"x": x})
        >>> window = find(windows(rows), lambda window: len(window) == 2)
        >>> [list(batch["x"].shape) for batch in window]
        [[0], [3]]
    """
    require_interval("windows", "size", min_size, max_size)

    def cut(batch: Any) -> SearchStrategy[list[Any]]:
        cuts = partitions(
            num_rows(batch), min_size=min_size, max_size=max_size, allow_empty=allow_empty
        )
        return cuts.map(lambda cut: [take_rows(batch, rows) for rows in cut])

    return batches.flatmap(cut)


@st.composite
def _meshes(draw: DrawFn, axes: list[str], max_ranks: int) -> dict[str, int]:
    mesh = {}
    for axis in axes:
        mesh[axis] = draw(st.integers(1, max_ranks))
        max_ranks //= mesh[axis]
    return mesh


def _deals(n: int, num_ranks: int, allow_idle: bool) -> SearchStrategy[list[list[int]]]:
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=n, max_size=n)
    if not allow_idle:  # One micro-step for each rank, the others anywhere.
        rest = st.lists(
            st.integers(0, num_ranks - 1), min_size=n - num_ranks, max_size=n - num_ranks
        )
        ranks = rest.flatmap(lambda rest: st.permutations([*range(num_ranks), *rest]))
    return ranks.map(
        lambda ranks: [[i for i, r in enumerate(ranks) if r == rank] for rank in range(num_ranks)]
    )
