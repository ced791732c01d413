"""The exactness receipt: one window's gradient, cut in different ways, in float64.

The gradient is computed from the whole batch at once, from micro-steps, and by whoever is to be
checked; beside them stands what the mean of the micro-steps' own means would have given.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..pure import LossFn, Objective, WindowGrad, tree, window_grad

__all__ = ["apart", "mean_of_means", "receipt", "whole_batch"]

_FLAT_INDICES = {"supervised", "predictions"}


def receipt(
    loss_fn: LossFn,
    objective: Objective,
    params: Any,
    window: Sequence[dict[str, Tensor]],
    others: dict[str, WindowGrad],
) -> dict[str, dict[str, float]]:
    """How far each way of cutting a window is from the whole batch.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or with metrics.
        objective: from totals to the loss.
        params: a pytree of float64 tensors.
        window: the micro-batches.
        others: results for the same window computed elsewhere, by name: on ranks, say.

    Returns:
        By name ``loss`` and ``gradient``, the largest difference relative to the largest gradient;
        the last entry is the mean of the micro-steps' own means.
    """
    grad = window_grad(loss_fn, objective)
    whole = grad(params, [whole_batch(window)])
    results = {f"1 rank x {len(window)}": grad(params, window), **others}
    results["mean of means"] = mean_of_means(loss_fn, objective, params, window)
    said = {"1 rank x 1": {"loss": float(whole.loss), "gradient": 0.0}}
    for name, result in results.items():
        distance = apart(result.grads, whole.grads)
        said[name] = {"loss": float(result.loss), "gradient": distance}
    return said


def whole_batch(window: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The micro-batches of a window as one batch, its rows padded on the right by zeros.

    Args:
        window: dicts of tensors ``[B, S, ...]`` or ``[B]``. Fields of flat indices are left out:
            they count within their own batch.

    Examples:
        >>> window = [{"tokens": torch.tensor([[1, 2]])}, {"tokens": torch.tensor([[3]])}]
        >>> whole_batch(window)
        {'tokens': tensor([[1, 2],
                [3, 0]])}
    """
    names = [name for name in window[0] if name not in _FLAT_INDICES]
    return {name: _stack([batch[name] for batch in window]) for name in names}


def _stack(parts: list[Tensor]) -> Tensor:
    if parts[0].dim() == 1:
        return torch.cat(parts)
    longest = max(part.shape[1] for part in parts)
    # `pad` counts dims from the last: those behind dim 1 stay, dim 1 grows at its end.
    behind = [0, 0] * (parts[0].dim() - 2)
    return torch.cat([pad(part, [*behind, 0, longest - part.shape[1]]) for part in parts])


def mean_of_means(
    loss_fn: LossFn, objective: Objective, params: Any, window: Sequence[Any]
) -> WindowGrad:
    """What a loop gives that divides in each micro-step: wrong when they are ragged.

    A micro-step without anything to learn from counts as a loss of zero.

    Examples:
        >>> from numden.pure import LossTerms, term_mean
        >>> ragged = [torch.tensor([1.0]), torch.tensor([3.0, 3.0, 3.0])]
        >>> loss_fn = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> mean_of_means(loss_fn, term_mean(), torch.tensor(1.0), ragged).grads  # in truth 2.5
        tensor(2.)
    """
    grad = window_grad(loss_fn, objective, on_empty="zero")
    each = [grad(params, [batch]) for batch in window]
    grads = tree.map(lambda *leaves: torch.stack(leaves).mean(0), *(r.grads for r in each))
    loss = torch.stack([result.loss for result in each]).mean()
    return each[0]._replace(loss=loss, grads=grads)


def apart(grads: Any, expected: Any) -> float:
    """The largest difference of two gradients, relative to the largest element expected.

    Examples:
        >>> apart({"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])})
        0.25
    """
    differences = tree.map(lambda got, want: got - want, grads, expected)
    return float(_largest(differences) / _largest(expected))


def _largest(values: Any) -> Tensor:
    # Of stacked tensors, whose max is NaN where one is: Python's max may pass over it.
    return torch.stack([leaf.abs().max() for leaf in tree.leaves(values)]).max()
