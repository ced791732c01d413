"""The balancing loss of a mixture-of-experts router, from sums over the whole window."""

from typing import Any

import torch
from torch import Tensor

from ._masked import count, keep, keep_rows, require_mask, require_shape
from .terms import LossTerms, divide

__all__ = ["balance_loss", "balance_per_micro_step", "balance_stats"]


def balance_stats(
    router_probs: Tensor, selected: Tensor, *, where: Tensor | None = None
) -> LossTerms:
    """The sums over tokens of which ``balance_loss`` is a function, for one router.

    Their ratios are the share of tokens that each expert got and its mean probability, so they
    serve as metrics too. The balancing loss of a window is that of its total sums, and not the sum
    or mean of the losses of its micro-steps.

    Args:
        router_probs: ``[..., E]`` what the router scores experts with, with gradient.
        selected: ``[..., k]`` int64, the experts that the router chose for each token.
        where: ``[...]`` bool, tokens to count: all but padding.

    Returns:
        ``num``, a dict of ``counts [E]``, int64, the tokens given to each expert, and ``probs
        [E]``, the sum of probabilities; ``den``, the int64 number of tokens.

    Raises:
        ValueError: shapes do not fit.
        TypeError: ``where`` is not bool.

    Examples:
        >>> probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> balance_stats(probs, torch.tensor([[0], [0]])).num
        {'counts': tensor([2, 0]), 'probs': tensor([1.2500, 0.7500])}
    """
    name = "balance_stats"
    tokens, num_experts = router_probs.shape[:-1], router_probs.shape[-1]
    require_shape(name, "selected", selected, torch.Size([*tokens, selected.shape[-1]]))
    mask = require_mask(name, where, tokens)
    probs = keep_rows(router_probs, mask).reshape(-1, num_experts).sum(dim=0)
    ones = torch.ones_like(selected) if mask is None else mask.unsqueeze(-1).expand(selected.shape)
    chosen = selected if mask is None else keep(selected, mask.unsqueeze(-1))
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=probs.device)
    counts = zeros.scatter_add(0, chosen.reshape(-1), ones.reshape(-1).to(torch.int64))
    return LossTerms({"counts": counts, "probs": probs}, count(mask, tokens, probs.device))


def balance_loss(totals: LossTerms, *, num_selected: int, alpha: float = 1.0) -> Tensor:
    """``α E / (k N²) Σ_e sg(C_e) S_e`` of counts C, sums of probabilities S and N tokens.

    Only S has a gradient. It is ``alpha`` where tokens are spread evenly and probabilities add
    up to 1, and ``alpha · E / k`` where all tokens go to the same k experts; 0 without tokens.

    Args:
        totals: sums of ``balance_stats``, over a window and ranks; those of several layers as
            ``[..., E]`` over one count of tokens, whose losses are added.
        num_selected: k, the experts that one token is given to.
        alpha: factor of the loss.

    Returns:
        A scalar, for an objective to add.

    Examples:
        >>> probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> balance_loss(balance_stats(probs, torch.tensor([[0], [0]])), num_selected=1)
        tensor(1.2500, dtype=torch.float64)

    References:
        Fedus et al., "Switch Transformers", 2021, equations 4 to 6.
    """
    means: dict[str, Any] = divide(totals)
    num_experts = means["probs"].shape[-1]
    return alpha * num_experts / num_selected * (means["counts"].detach() * means["probs"]).sum()


def balance_per_micro_step(stats: LossTerms, *, num_selected: int) -> LossTerms:
    """A term whose ratio is the mean over micro-steps of their own balancing losses, by tokens.

    Micro-step j with n_j tokens and the loss A_j contributes ``n_j A_j`` and ``n_j``. Unlike the
    balancing loss of the window, which is the smaller one as a rule, it depends on how the window
    is cut and asks for balance within each micro-step of each rank. Splitting a window into equal
    micro-steps does not scale it. In return it is linear in sums: any plan can express it.

    Args:
        stats: from ``balance_stats``, of one micro-step; several layers as in ``balance_loss``.
        num_selected: k, the experts that one token is given to.

    Returns:
        ``num``, a scalar; ``den``, the int64 number of tokens.

    Examples:
        >>> probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> balance_per_micro_step(balance_stats(probs, torch.tensor([[0], [0]])), num_selected=1)
        LossTerms(num=tensor(2.5000, dtype=torch.float64), den=tensor(2))
    """
    return LossTerms(stats.den * balance_loss(stats, num_selected=num_selected), stats.den)
