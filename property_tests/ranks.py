"""Ranks of a window in one process: a thread for each, sums added by hand, nothing installed."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from threading import Barrier, BrokenBarrierError
from typing import Any

from torch import Tensor

from ..pure import Reduction, add, tree
from ._window_laws import WindowGradFn, WorldGradFn, results
from .violation import check_equal

__all__ = ["on_simulated_ranks", "over_ranks"]

_TIMEOUT_S = 60


def over_ranks(grad_of: Callable[[Reduction], WindowGradFn]) -> WorldGradFn:
    """A function of the windows of all ranks, for ``laws.split_invariance``.

    Args:
        grad_of: makes ``(params, window) -> WindowGrad`` of a reduction.

    Returns:
        ``(params, windows by rank) -> WindowGrad``: the result of rank 0, after all ranks were
        found to have the same loss and gradients, bit by bit.

    Raises:
        LawViolation: by the result, when a rank has another loss or gradient than rank 0.

    Examples:
        >>> import torch
        >>> from numden.pure import LossTerms, window_grad
        >>> def loss_fn(w, x):
        ...     return LossTerms((w * x).sum(), x.numel())
        >>> step = over_ranks(lambda reduction: window_grad(loss_fn, reduction=reduction))
        >>> long, short = torch.tensor([2.0, 2.0, 2.0]), torch.tensor([8.0])
        >>> step(torch.tensor(1.0), [[long], [short], []]).grads
        tensor(3.5000)
    """

    def world_grad(params: Any, windows: Sequence[Sequence[Any]]) -> Any:
        def on_rank(reduction: Reduction, window: Sequence[Any]) -> Any:
            return grad_of(reduction)(params, window)

        first, *others = on_simulated_ranks(on_rank, windows)
        for rank, other in enumerate(others, start=1):
            check_equal(
                "over_ranks",
                f"rank {rank} must have the loss and the gradients of rank 0.",
                "a result made of local sums, after those of all ranks were known.",
                results(first),
                results(other),
                exact=True,
            )
        return first

    return world_grad


def on_simulated_ranks(fn: Callable[[Reduction, Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """Run ``fn(reduction, input)`` on one rank for each of ``inputs``; the results by rank.

    An exception of a rank is raised again, the lowest rank's first, and ends the others.

    Examples:
        >>> on_simulated_ranks(lambda reduction, x: reduction.totals(x), [1.0, 2.0, 4.0])
        [7.0, 7.0, 7.0]
    """
    barrier = Barrier(len(inputs), timeout=_TIMEOUT_S)
    places: list[Any] = [None] * len(inputs)

    def run(rank: int, each: Any) -> Any:
        try:
            return fn(_reduction(rank, places, barrier), each)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(inputs)) as pool:
        ranks = [pool.submit(run, rank, each) for rank, each in enumerate(inputs)]
    failures = [failure for rank in ranks if (failure := rank.exception())]
    # A broken barrier is the echo of a failure on another rank.
    for failure in sorted(failures, key=lambda each: isinstance(each, BrokenBarrierError)):
        raise failure
    return [rank.result() for rank in ranks]


def _reduction(rank: int, places: list[Any], barrier: Barrier) -> Reduction:
    def meet(value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        places[rank] = value
        barrier.wait()
        combined = combine(places)
        barrier.wait()  # No one may go on, and write over its value, before all have read it.
        return combined

    def gather(report: str | None) -> list[tuple[int | None, str | None]]:
        return meet(report, lambda reports: list(enumerate(reports)))

    return Reduction(lambda sums: meet(sums, _sum), lambda grads: meet(grads, _sum), gather)


def _sum(addends: list[Any]) -> Any:
    present = [tree.map(_own, each) for each in addends if each is not None]
    return reduce(add, present) if present else None


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf  # A sum of one must be no alias.
