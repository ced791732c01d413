"""The acceptance rule of speculative sampling: what is kept of a draft, and what follows it.

A drafted token x that was drawn from q is kept with probability ``min(1, p(x) / q(x))``, where p is
the target's distribution; else one is drawn from ``max(0, p - q)``, normalised. Whatever q is, the
result is distributed like p.

References:
    Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, section 2.3;
    Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..pure import random

__all__ = ["Verified", "acceptance", "acceptance_rate", "draw", "residual", "verify"]


class Verified(NamedTuple):
    """What the target makes of a draft of Q tokens.

    Attributes:
        num_accepted: ``[...]`` int64, how many are kept, from 0 to Q.
        token: ``[...]`` int64, the one behind those that are kept.
    """

    num_accepted: Tensor
    token: Tensor


def acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """``min(1, p / q)``: with which probability each token is kept, if it is drafted.

    Args:
        target: ``[..., V]`` probabilities p.
        draft: ``[..., V]`` probabilities q.

    Returns:
        ``[..., V]``; 1 where q is 0, since that token is never drafted.

    Examples:
        >>> acceptance(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.75, 0.0]))
        tensor([1.0000, 0.6667, 1.0000])
    """
    never = draft == 0
    return torch.where(never, 1.0, target / torch.where(never, 1.0, draft)).clamp(max=1)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """``max(0, p - q)``, normalised: what is drawn from where a drafted token is not kept.

    Args:
        target: ``[..., V]`` probabilities p.
        draft: ``[..., V]`` probabilities q.

    Returns:
        ``[..., V]``; p itself where p equals q, and every token is kept.

    Examples:
        >>> residual(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    left = (target - draft).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / torch.where(total > 0, total, 1.0), target)


def acceptance_rate(target: Tensor, draft: Tensor) -> Tensor:
    """``Σ min(p, q)``: with which probability a token drawn from q is kept, one minus half the L1.

    Args:
        target: ``[..., V]`` probabilities p.
        draft: ``[..., V]`` probabilities q.

    Returns:
        ``[...]``, from 0 to 1.

    Examples:
        >>> acceptance_rate(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
        tensor(0.7500)
    """
    return torch.minimum(target, draft).sum(-1)


def draw(probs: Tensor, key: Tensor) -> Tensor:
    """A token from each distribution, by its key.

    Args:
        probs: ``[..., V]``.
        key: int64 ``[..., 2]``.

    Returns:
        ``[...]`` int64, never a token of probability 0.

    Examples:
        >>> draw(torch.tensor([0.0, 1.0, 0.0]), random.key(0))
        tensor(1)
    """
    ends = probs.double().cumsum(-1)
    last = ends[..., -1:]
    at = random.uniform(key, (1,), dtype=torch.float64) * last
    # Below the last end, also when rounded, it lies in one of the intervals, and in no empty one.
    at = torch.minimum(at, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(ends, at, right=True).squeeze(-1)


def verify(drafted: Tensor, draft: Tensor, target: Tensor, key: Tensor) -> Verified:
    """Keep drafted tokens up to the first that is not accepted, and draw the next.

    Args:
        drafted: ``[..., Q]`` int64, drawn from ``draft``.
        draft: ``[..., Q, V]`` probabilities q, each given the drafted tokens before.
        target: ``[..., Q + 1, V]`` probabilities p, likewise; the last behind all of them.
        key: int64 ``[..., 2]``, not used for the draft.

    Examples:
        >>> drafted, q = torch.tensor([1, 0]), torch.eye(3)[[1, 0]]
        >>> p = torch.eye(3)[[1, 2, 2]]
        >>> verify(drafted, q, p, random.key(0))
        Verified(num_accepted=tensor(1), token=tensor(2))
    """
    num_drafted = drafted.shape[-1]
    keep_key, next_key = random.split(key, 2).unbind(-2)
    chances = acceptance(target[..., :-1, :], draft).gather(-1, drafted[..., None]).squeeze(-1)
    kept = random.uniform(keep_key, (num_drafted,), dtype=torch.float64) < chances
    num_accepted = kept.long().cumprod(-1).sum(-1)
    # Behind all of the draft nothing was rejected: the residual of a draft of nothing is p itself.
    nothing = torch.zeros_like(target[..., :1, :])
    following = residual(target, torch.cat([draft, nothing], -2))
    at = num_accepted[..., None, None].expand(*num_accepted.shape, 1, target.shape[-1])
    return Verified(num_accepted, draw(following.gather(-2, at).squeeze(-2), next_key))
