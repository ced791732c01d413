"""Routers of a mixture of experts: from router logits to the chosen experts and their weights.

A router decides once. What is dispatched, what is counted and what weighs the outputs all come
from its ``Routing``, and none of it is found again from the probabilities.

Shapes: E experts, k of them selected for each token.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "GroupRule",
    "RouterKind",
    "Routing",
    "max_violation",
    "route",
    "update_bias",
]

RouterKind = Literal["softmax", "sigmoid", "biased"]
"""How experts are scored; see ``route``."""

GroupRule = Literal["best", "each"]
"""What groups of experts are for; see ``route``."""


class Routing(NamedTuple):
    """A router's decision on each token.

    Attributes:
        logits: ``[..., E]``, what the z-loss is of.
        probs: ``[..., E]``, what the balancing loss is of, in float32 or wider.
        selected: ``[..., k]`` int64, the experts.
        weights: ``[..., k]``, factors of their outputs, in float32 or wider.
    """

    logits: Tensor
    probs: Tensor
    selected: Tensor
    weights: Tensor


def route(
    logits: Tensor,
    *,
    num_selected: int,
    kind: RouterKind = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    num_best_groups: int = 1,
    group_rule: GroupRule = "best",
    normalize: bool = True,
    scale: float = 1.0,
    selected: Tensor | None = None,
) -> Routing:
    """The k experts of each token, their weights, and the probabilities to balance.

    ======= ================ ==================== =====================
    kind    scores s         choice by u          probs
    ======= ================ ==================== =====================
    softmax softmax(z)       s                    s
    sigmoid sigmoid(z)       s                    s, which need not add up to 1
    biased  sigmoid(z)       s + bias             u / Σ u
    ======= ================ ==================== =====================

    Weights are scores of the chosen, never u: for a given choice they do not depend on the bias.
    The balancing loss of "sigmoid" pushes all logits down and not only those of full experts;
    "biased" without a bias has the same choice and a balancing loss that keeps their sum.

    Groups are ``num_groups`` equal blocks of experts. By the rule "each" the k / num_groups best of
    each are chosen. By the rule "best" the choice is among the ``num_best_groups`` groups of which
    the two best u have the largest sum; where these are fewer than all, u is 0 outside of them.

    Args:
        logits: ``[..., E]``.
        num_selected: k.
        kind: "softmax", "sigmoid" or "biased".
        bias: ``[E]``, for "biased": what ``update_bias`` learns; it has no gradient.
        num_groups: 1 for no groups.
        num_best_groups: how many groups the rule "best" keeps, for "biased" alone.
        group_rule: "best" or "each".
        normalize: divide the weights of a token by their sum.
        scale: factor of all weights.
        selected: ``[..., k]`` int64, a choice that was made before, e.g. when the text was sampled,
            and takes the place of this one.

    Examples:
        >>> routing = route(torch.tensor([4.0, 3, 2, 1]).log(), num_selected=2)
        >>> routing.selected.tolist(), routing.weights
        ([0, 1], tensor([0.5714, 0.4286]))

    References:
        Fedus et al., "Switch Transformers", 2021; DeepSeek-AI, "DeepSeek-V3", 2024, equations 12
        to 20.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if kind == "softmax" else wide.sigmoid()
    biased = scores if bias is None else scores + bias.detach().to(scores.dtype)
    kept = None
    if group_rule == "best" and num_best_groups < num_groups:
        kept = _best_groups(biased.detach(), num_groups, num_best_groups)
    if selected is None:
        spread = num_groups if group_rule == "each" else 1
        selected = _choose(biased.detach(), kept, num_selected, spread)
    weights = scale * _weights(scores.gather(-1, selected), normalize)
    return Routing(logits, _probs(biased, kept, kind), selected, weights)


def _best_groups(scores: Tensor, num_groups: int, num_best: int) -> Tensor:
    """Whether each expert is in one of the best groups, ``[..., E]`` bool."""
    groups = scores.unflatten(-1, (num_groups, -1))
    value = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = value.topk(num_best, dim=-1).indices
    kept = torch.zeros_like(value, dtype=torch.bool).scatter(-1, best, True)
    return kept.unsqueeze(-1).expand(groups.shape).flatten(-2)


def _choose(scores: Tensor, kept: Tensor | None, num_selected: int, num_groups: int) -> Tensor:
    if kept is not None:
        # Below any score: zeros would win over scores that a bias makes negative.
        scores = scores.masked_fill(~kept, -torch.inf)
    groups = scores.unflatten(-1, (num_groups, -1))
    best = groups.topk(num_selected // num_groups, dim=-1).indices
    first = groups.shape[-1] * torch.arange(num_groups, device=scores.device).unsqueeze(-1)
    return (best + first).flatten(-2)


def _weights(chosen: Tensor, normalize: bool) -> Tensor:
    if not normalize:
        return chosen
    # Sigmoids of very negative logits are all 0, and so are their weights.
    tiny = torch.finfo(chosen.dtype).tiny
    return chosen / chosen.sum(dim=-1, keepdim=True).clamp_min(tiny)


def _probs(biased: Tensor, kept: Tensor | None, kind: RouterKind) -> Tensor:
    if kind != "biased":
        return biased
    if kept is not None:
        biased = biased.masked_fill(~kept, 0.0)
    total = biased.sum(dim=-1, keepdim=True)
    return biased / torch.where(total == 0, 1.0, total)


def update_bias(bias: Tensor, counts: Tensor, *, speed: float = 1e-3) -> Tensor:
    """The bias of a router after a window: up for experts below the mean load, else down.

    ``b_e + speed · sign(mean(C) - C_e)``. It balances without a loss.

    Args:
        bias: ``[..., E]``.
        counts: ``[..., E]``, tokens given to each expert in the whole window, over all ranks.
        speed: how far a bias moves at a time.

    Examples:
        >>> update_bias(torch.zeros(3), torch.tensor([5, 1, 3]), speed=0.5)
        tensor([-0.5000,  0.5000,  0.0000])

    References:
        Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.
    """
    # E times the difference from the mean, exactly.
    below = counts.sum(dim=-1, keepdim=True) - counts.shape[-1] * counts
    return bias + speed * below.sign().to(bias.dtype)


def max_violation(counts: Tensor) -> Tensor:
    """``(max C - mean C) / mean C``, mean over layers: 0 in balance; 0 without tokens.

    Args:
        counts: ``[..., E]``, tokens given to each expert.

    Examples:
        >>> max_violation(torch.tensor([[2, 2], [3, 1]]))
        tensor(0.2500, dtype=torch.float64)
    """
    loads = counts.to(torch.float64)
    mean = loads.mean(dim=-1)
    excess = (loads.amax(dim=-1) - mean) / mean
    return torch.where(mean > 0, excess, 0.0).mean()
