"""Refinement of DSpine: a choice among the k likeliest tokens of a slot, given the one before it.

Shapes: ``...`` any leading dims, k candidates, H width, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .layers import embed

__all__ = ["Refinement", "candidates", "refinement", "scores"]


class Refinement(NamedTuple):
    """The losses of refinement, one value a slot.

    Attributes:
        ce: ``[...]``, nats; 0 where the label is no candidate.
        l1: ``[...]``, distance to the target's distribution over the candidates, in [0, 2]; 0
            where the target hardly gives them any mass.
        covered: ``[...]`` bool, whether the label is a candidate.
        correct: ``[...]`` bool, whether it is chosen.
    """

    ce: Tensor
    l1: Tensor
    covered: Tensor
    correct: Tensor


def candidates(draft_logits: Tensor, top_k: int) -> Tensor:
    """The k likeliest tokens, ``[..., k]`` int64, the likeliest first.

    Examples:
        >>> candidates(torch.tensor([0.0, 3.0, 1.0]), 2)
        tensor([1, 2])
    """
    return draft_logits.detach().topk(top_k, dim=-1).indices


def scores(refined: Tensor, chosen: Tensor, head: Tensor) -> Tensor:
    """The logits of some tokens alone.

    Args:
        refined: ``[..., H]``.
        chosen: ``[..., k]`` int64 tokens.
        head: ``[V, H]``.

    Returns:
        ``[..., k]``.

    Examples:
        >>> scores(torch.tensor([1.0, 2.0]), torch.tensor([1, 0]), torch.eye(2))
        tensor([2., 1.])
    """
    return (embed(chosen, head) @ refined[..., None]).squeeze(-1)


def refinement(
    logits: Tensor, chosen: Tensor, labels: Tensor, teacher_logits: Tensor, threshold: float
) -> Refinement:
    """The losses of logits over candidates.

    With q their softmax, p the target's distribution and mass the part of it on the candidates::

        ce = -log q[label]                      where the label is a candidate
        l1 = sum_c |q_c - p_c / mass|           where mass > threshold

    Args:
        logits: ``[..., k]``, see ``scores``.
        chosen: ``[..., k]`` int64, the candidates.
        labels: ``[...]`` int64.
        teacher_logits: ``[..., V]``; no gradient flows to them.
        threshold: of mass.

    Examples:
        >>> teacher = torch.tensor([0.25, 0.25, 0.5]).log()
        >>> chosen = torch.tensor([2, 0])
        >>> found = refinement(torch.zeros(2), chosen, torch.tensor(0), teacher, threshold=1e-4)
        >>> found.ce, found.l1
        (tensor(0.6931), tensor(0.3333))
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_q = logits.to(wide).log_softmax(-1)
    is_label = chosen == labels[..., None]
    log_p = teacher_logits.detach().to(wide).log_softmax(-1)
    p = log_p.gather(-1, chosen).exp()
    mass = p.sum(-1, keepdim=True)
    l1 = (log_q.exp() - p / mass.clamp_min(torch.finfo(wide).tiny)).abs().sum(-1)
    return Refinement(
        ce=-torch.where(is_label, log_q, 0).sum(-1),
        l1=torch.where(mass.squeeze(-1) > threshold, l1, 0),
        covered=is_label.any(-1),
        correct=chosen.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1) == labels,
    )
