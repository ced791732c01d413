"""Which tokens a loss counts, and with what weight."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ._masked import keep, require_mask, require_shape, require_weights

__all__ = ["Supervision", "Weighting", "supervise"]

Weighting = Literal["token", "sample", "square"]
"""The weight of a token of a sample with n supervised tokens: 1, 1/n or 1/√n."""


class Supervision(NamedTuple):
    """What a token loss counts.

    Attributes:
        mask: ``[...]`` bool, the supervised tokens.
        weights: ``[...]`` float, the weight of each token, 0 where it is not supervised.
        den: the sum of the weights: int64 where it is a count of tokens or samples, else a float.
    """

    mask: Tensor
    weights: Tensor
    den: Tensor


def supervise(
    labels: Tensor,
    *,
    function: str,
    dtype: torch.dtype,
    where: Tensor | None,
    ignore_index: int,
    weighting: Weighting,
    sample_ids: Tensor | None,
    weights: Tensor | None,
    positions: Tensor | None = None,
) -> Supervision:
    """The supervised tokens of ``labels`` and their weights in ``dtype``; see ``cross_entropy``."""
    if weighting not in ("token", "sample", "square"):
        raise ValueError(
            f"{function}: weighting must be 'token', 'sample' or 'square', got "
            f"weighting={weighting!r}. Give weights for any other."
        )
    if sample_ids is not None:
        require_shape(function, "sample_ids", sample_ids, labels.shape)
    mask = labels != ignore_index
    counted = require_mask(function, where, labels.shape)
    if counted is not None:
        mask = mask & counted
    if positions is not None:
        mask = mask & _listed(positions, mask)
    base, den = _weigh(mask, sample_ids, weighting, dtype)
    if weights is not None:
        base = base * keep(require_weights(function, weights, labels.shape), mask).to(dtype)
        den = base.sum()
    return Supervision(mask, base, den)


def _listed(positions: Tensor, mask: Tensor) -> Tensor:
    listed = torch.zeros_like(mask).reshape(-1).index_fill(0, positions, True)
    return listed.reshape(mask.shape)


def _weigh(
    mask: Tensor, sample_ids: Tensor | None, weighting: Weighting, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weight of each token and the sum of the weights, which is not added up if it is known."""
    if weighting == "token":
        return mask.to(dtype), mask.sum()
    of_token, of_sample = _count_by_id(mask, sample_ids) if sample_ids is not None else _rows(mask)
    size = of_token.clamp_min(1).to(dtype)
    if weighting == "sample":
        return keep(1 / size, mask), (of_sample > 0).sum()
    return keep(size.rsqrt(), mask), of_sample.to(dtype).sqrt().sum()


def _rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The supervised tokens in the row of each token, and in each row."""
    counts = mask.sum(dim=-1, keepdim=True)
    return counts.expand(mask.shape), counts


def _count_by_id(mask: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The supervised tokens in the sample of each token, and in each sample.

    Sorting brings a sample together. ``torch.unique`` would do the same, but its result has a
    size that the host must wait for; here there is room for as many samples as tokens.
    """
    ids, order = sample_ids.reshape(-1).sort()
    is_first = torch.cat([torch.zeros_like(ids[:1], dtype=torch.bool), ids[1:] != ids[:-1]])
    group = torch.zeros_like(order).scatter(0, order, is_first.cumsum(0))
    counts = torch.zeros_like(order).scatter_add(0, group, mask.reshape(-1).to(order.dtype))
    return counts.gather(0, group).reshape(mask.shape), counts
