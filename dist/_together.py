"""What one rank does for all, and what all ranks do or none: nobody is left waiting."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as c10d

__all__ = ["by_each", "by_first", "num_ranks", "rank"]

T = TypeVar("T")


def rank() -> int:
    """This rank among all there are."""
    return c10d.get_rank() if c10d.is_initialized() else 0


def num_ranks() -> int:
    """How many ranks there are."""
    return c10d.get_world_size() if c10d.is_initialized() else 1


def by_first(call: Callable[[], T]) -> T:
    """What ``call`` gives or raises on rank 0, on all ranks."""
    if not c10d.is_initialized():
        return call()
    sent: list[Any] = list(_outcome(call)) if rank() == 0 else [None, None]
    c10d.broadcast_object_list(sent, src=0)
    value, error = sent
    if error is not None:
        raise error
    return value


def by_each(call: Callable[[], T]) -> list[T]:
    """What ``call`` gives on each rank; when it raises on some, each rank raises the first error.

    What it gives must be small: it is sent to all ranks.
    """
    outcomes: list[Any] = [_outcome(call)]
    if c10d.is_initialized():
        outcomes = outcomes * num_ranks()
        c10d.all_gather_object(outcomes, outcomes[rank()])
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def _outcome(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error
