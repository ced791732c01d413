"""Laws of a window: the loss and the gradient do not depend on how the rows were dealt out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pure import tree
from ..pure.terms import LossFn, LossTerms, split_metrics
from .violation import check_equal

__all__ = ["WindowGradFn", "WorldGradFn", "homogeneity", "results", "split_invariance"]

WindowGradFn = Callable[[Any, Iterable[Any]], Sequence[Any]]
"""``(params, window) -> (loss, grads, …)``, as ``window_grad(loss_fn)`` returns it."""

WorldGradFn = Callable[[Any, Sequence[Sequence[Any]]], Sequence[Any]]
"""``(params, windows by rank) -> (loss, grads, …)``."""


def homogeneity(
    grad_of: Callable[[LossFn], WindowGradFn],
    loss_fn: LossFn,
    params: Any,
    window: Sequence[Any],
    *,
    factor: float = 2.0,
    degree: int = 1,
    exact: bool = True,
    rtol: float | None = None,
) -> None:
    """The objective is a ratio: of degree 0 in num and den together, of degree -1 in den.

    All sums times ``factor`` change nothing; denominators times ``factor`` divide the loss and
    the gradient by exactly ``factor``. A missing or a second division breaks the law.

    Args:
        grad_of: makes ``(params, window) -> (loss, grads, …)`` of a loss function;
            ``window_grad``, for instance.
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors.
        window: micro-batches.
        factor: a power of two scales floats exactly.
        degree: how many dens the objective divides by; 2 for the balancing loss of experts.
        exact: every bit must agree.
        rtol: see ``check_equal``.

    Raises:
        LawViolation: the loss or a gradient does not scale.

    Examples:
        >>> from numden.pure import window_grad
        >>> def loss_fn(w, x):
        ...     return LossTerms((w * x).sum(), x.numel())
        >>> window = [torch.tensor([8.0]), torch.tensor([2.0, 2.0, 2.0])]
        >>> homogeneity(window_grad, loss_fn, torch.tensor(1.0), window)
    """
    as_is = results(grad_of(loss_fn)(params, window))
    both = results(grad_of(_scaled(loss_fn, factor, factor))(params, window))
    only_den = results(grad_of(_scaled(loss_fn, 1.0, factor))(params, window))
    cause = (
        "a division that is missing, or done twice: by the number of micro-steps or ranks, or by "
        "a count where the sums are divided already. Divide once, by the total den."
    )
    same = f"all sums times {factor} must change nothing."
    check_equal("homogeneity", same, cause, as_is, both, exact=exact, rtol=rtol)
    smaller = {name: value / factor**degree for name, value in as_is.items()}
    scaled = f"dens times {factor} must divide the loss and the gradient by {factor**degree}."
    check_equal("homogeneity", scaled, cause, smaller, only_den, exact=exact, rtol=rtol)


def split_invariance(
    world_grad: WorldGradFn,
    params: Any,
    worlds: Sequence[Sequence[Sequence[Any]]],
    *,
    exact: bool = False,
    rtol: float | None = None,
) -> None:
    """The loss and the gradient are the same for each cut of the rows into micro-steps and ranks.

    Args:
        world_grad: ``(params, world) -> (loss, grads, …)``, where a world is a list of windows,
            one for each rank, and a window is a list of micro-batches. ``over_ranks`` makes one
            of ``window_grad``.
        params: a pytree of tensors.
        worlds: worlds of the same rows. What the first gives is expected of the others: let it be
            one rank with one micro-step, ``[[batch]]``.
        exact: every bit must agree.
        rtol: see ``check_equal``.

    Raises:
        LawViolation: a world gives another loss or gradient.

    Examples:
        >>> def mean_of_means(w, world):
        ...     means = [x.mean() for window in world for x in window]
        ...     return w * sum(means) / len(means), sum(means) / len(means)
        >>> long, short = torch.tensor([2.0, 2.0, 2.0]), torch.tensor([8.0])
        >>> worlds = [[[torch.cat([long, short])]], [[long, short]]]
        >>> split_invariance(mean_of_means, torch.tensor(1.0), worlds)
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: split_invariance: micro-steps by rank [2] ...
          loss: expected 3.5, got 5.0
          grads: expected 3.5, got 5.0
        Usual cause: ...
    """
    first, *others = worlds
    expected = results(world_grad(params, first))
    for world in others:
        steps = [len(window) for window in world]
        check_equal(
            "split_invariance",
            f"micro-steps by rank {steps} must give what {[len(w) for w in first]} gives.",
            "a mean of micro-step or rank means, a division by the number of micro-steps or "
            "ranks, or a local count. Sum nums and dens over all micro-steps and ranks, then "
            "divide once.",
            expected,
            results(world_grad(params, world)),
            exact=exact,
            rtol=rtol,
        )


def results(result: Sequence[Any]) -> dict[str, Tensor]:
    """The loss and the gradients by name."""
    loss, grads = result[:2]
    return {"loss": torch.as_tensor(loss)} | tree.named(grads, "grads")


def _scaled(loss_fn: LossFn, num_factor: float, den_factor: float) -> LossFn:
    def scaled(params: Any, batch: Any) -> Any:
        terms, metrics = split_metrics(loss_fn(params, batch))
        num = tree.map(lambda leaf: leaf * num_factor, terms.num)
        den = tree.map(lambda leaf: leaf * den_factor, terms.den)
        return LossTerms(num, den), metrics

    return scaled
