"""Losses as sums over what they count: each returns ``LossTerms`` of a num and a den.

All of them take sums in float32 or wider, keep masked places out of value and gradient exactly,
and read nothing on the host.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ._balance import balance_loss as balance_loss
from ._balance import balance_per_micro_step as balance_per_micro_step
from ._balance import balance_stats as balance_stats
from ._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from ._masked import keep, keep_rows, require_mask, require_shape, sum_terms, wide_dtype, widen
from ._supervision import Weighting as Weighting
from ._supervision import supervise
from .terms import LossTerms

__all__ = [
    "Weighting",
    "balance_loss",
    "balance_per_micro_step",
    "balance_stats",
    "binary_cross_entropy",
    "cross_entropy",
    "kl_divergence",
    "linear_cross_entropy",
    "squared_error",
    "total_variation",
    "z_loss",
]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    where: Tensor | None = None,
    ignore_index: int = -100,
    weighting: Weighting = "token",
    sample_ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossTerms:
    """``Σ w_t · (logsumexp(z_t) - z_t[y_t])`` over the supervised tokens t, and ``Σ w_t``.

    With ``n_s`` the number of supervised tokens of the sample s that t belongs to:

    ========= ============ ============================ ==================================
    weighting w_t          den                          ratio
    ========= ============ ============================ ==================================
    token     1            number of tokens             mean over tokens
    sample    1 / n_s      samples with n_s ≥ 1         mean over samples of sample means
    square    1 / √n_s     Σ_s √n_s                     sample means weighted by √n_s
    ========= ============ ============================ ==================================

    ``n_s`` is counted in this batch: with sample and square weighting a sample must not be cut
    over micro-batches or ranks. Labels are used as they are; shift them before.

    Args:
        logits: ``[..., V]`` unnormalised log-probabilities.
        labels: ``[...]`` int64 in ``[0, V)`` at supervised tokens (what is out of range there
            fails as ``Tensor.gather`` does), anything at others. Each row along the last dim is a
            sample.
        where: ``[...]`` bool, tokens to count; None counts all whose label is to be counted.
        ignore_index: the label of tokens that are not supervised.
        weighting: "token", "sample" or "square".
        sample_ids: ``[...]`` int64 of any values: tokens with one id are one sample, wherever in
            the batch they are. For packed rows whose ids start anew in each row, make them
            distinct first.
        weights: ``[...]`` float constants that multiply w_t in num and den.

    Returns:
        ``num``, a scalar sum of nats in float32 or wider; ``den``, a scalar without gradient:
        int64 for token and sample weighting without ``weights``, else with the dtype of ``num``.

    Raises:
        ValueError: shapes do not fit, or ``weighting`` is unknown.
        TypeError: ``where`` is not bool.

    Examples:
        >>> logits = torch.zeros(2, 3, 4)
        >>> labels = torch.tensor([[1, 2, 3], [0, -100, -100]])
        >>> cross_entropy(logits, labels)
        LossTerms(num=tensor(5.5452), den=tensor(4))
        >>> cross_entropy(logits, labels, weighting="sample")
        LossTerms(num=tensor(2.7726), den=tensor(2))
    """
    require_shape("cross_entropy", "labels", labels, logits.shape[:-1])
    mask, token_weights, den = supervise(
        labels,
        function="cross_entropy",
        dtype=wide_dtype(logits.dtype),
        where=where,
        ignore_index=ignore_index,
        weighting=weighting,
        sample_ids=sample_ids,
        weights=weights,
    )
    log_probs = torch.log_softmax(keep_rows(logits, mask), dim=-1)
    picked = log_probs.gather(-1, keep(labels, mask).unsqueeze(-1)).squeeze(-1)
    return LossTerms(-(picked * token_weights).sum(), den)


def kl_divergence(
    logits: Tensor,
    target_logits: Tensor,
    *,
    where: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossTerms:
    """``Σ w KL(q ‖ p) = Σ w Σ_v q_v (log q_v - log p_v)``, p of ``logits`` and q of the target.

    The gradient flows into both; detach a teacher's logits. Entries that the target excludes by
    ``-inf`` add nothing.

    Args:
        logits: ``[..., V]``.
        target_logits: ``[..., V]``; probabilities are given as their logarithm.
        where: ``[...]`` bool, tokens to count.
        weights: ``[...]`` float constants that multiply num and den.

    Returns:
        ``num``, a scalar sum of nats; ``den``, the int64 count of tokens, or the sum of weights.

    Raises:
        ValueError: shapes do not fit, or ``weights`` require grad.
        TypeError: ``where`` is not bool.

    Examples:
        >>> target = torch.tensor([[0.5, 0.5, 0.0]]).log()
        >>> kl_divergence(torch.zeros(1, 3), target)
        LossTerms(num=tensor(0.4055), den=tensor(1))
    """
    name = "kl_divergence"
    require_shape(name, "target_logits", target_logits, logits.shape)
    mask = require_mask(name, where, logits.shape[:-1])
    log_p, log_q = (
        torch.log_softmax(keep_rows(each, mask), dim=-1) for each in (logits, target_logits)
    )
    q = log_q.exp()
    difference = keep(log_q, q > 0) - keep(log_p, q > 0)
    return sum_terms(name, (q * difference).sum(dim=-1), mask, weights)


def total_variation(
    logits: Tensor,
    target_logits: Tensor,
    *,
    where: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossTerms:
    """``Σ w ½ Σ_v |p_v - q_v|``, p of ``logits`` and q of the target: half of the L1 distance.

    One token's value is in [0, 1]. One minus it is the chance that a draft from p is accepted by
    speculative sampling for q.

    Args:
        logits: ``[..., V]``.
        target_logits: ``[..., V]``; the gradient flows into both.
        where: ``[...]`` bool, tokens to count.
        weights: ``[...]`` float constants that multiply num and den.

    Returns:
        ``num``, a scalar sum of distances; ``den``, the int64 count of tokens, or the sum of
        weights.

    Raises:
        ValueError: shapes do not fit, or ``weights`` require grad.
        TypeError: ``where`` is not bool.

    Examples:
        >>> p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.25, 0.75]])
        >>> total_variation(p.log(), q.log())
        LossTerms(num=tensor(0.5000), den=tensor(1))

    References:
        Leviathan et al., "Fast inference from transformers via speculative decoding", 2023.
    """
    name = "total_variation"
    require_shape(name, "target_logits", target_logits, logits.shape)
    mask = require_mask(name, where, logits.shape[:-1])
    p, q = (torch.softmax(keep_rows(each, mask), dim=-1) for each in (logits, target_logits))
    return sum_terms(name, (p - q).abs().sum(dim=-1) / 2, mask, weights)


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    where: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossTerms:
    """``Σ w (-t log σ(z) - (1 - t) log σ(-z))`` over all elements.

    Args:
        logits: ``[...]`` the z, before the sigmoid.
        targets: ``[...]`` the t in [0, 1], float or bool.
        where: ``[...]`` bool, elements to count.
        weights: ``[...]`` float constants that multiply num and den.

    Returns:
        ``num``, a scalar sum of nats; ``den``, the int64 count of elements, or the sum of weights.

    Raises:
        ValueError: shapes do not fit, or ``weights`` require grad.
        TypeError: ``where`` is not bool.

    Examples:
        >>> binary_cross_entropy(torch.zeros(3), torch.tensor([0.0, 0.5, 1.0]))
        LossTerms(num=tensor(2.0794), den=tensor(3))
    """
    name = "binary_cross_entropy"
    require_shape(name, "targets", targets, logits.shape)
    mask = require_mask(name, where, logits.shape)
    z = widen(keep(logits, mask))
    t = keep(targets, mask).to(z.dtype)
    loss = F.binary_cross_entropy_with_logits(z, t, reduction="none")
    return sum_terms(name, loss, mask, weights)


def squared_error(
    pred: Tensor,
    target: Tensor,
    *,
    where: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossTerms:
    """``Σ w (pred - target)²`` over all elements.

    Args:
        pred: ``[...]``.
        target: ``[...]``.
        where: ``[...]`` bool, elements to count; what is smaller, like ``[..., 1]``, broadcasts.
        weights: ``[...]`` float constants that multiply num and den; broadcasts too.

    Returns:
        ``num``, a scalar sum of squares; ``den``, the int64 count of elements, or the sum of
        weights.

    Raises:
        ValueError: shapes do not fit, or ``weights`` require grad.
        TypeError: ``where`` is not bool.

    Examples:
        >>> squared_error(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 4.0]))
        LossTerms(num=tensor(5.), den=tensor(2))
    """
    name = "squared_error"
    require_shape(name, "target", target, pred.shape)
    mask = require_mask(name, where, pred.shape)
    error = widen(keep(pred, mask)) - widen(keep(target, mask))
    return sum_terms(name, error.square(), mask, weights)


def z_loss(
    logits: Tensor, *, where: Tensor | None = None, weights: Tensor | None = None
) -> LossTerms:
    """``Σ w logsumexp(z)²``, which keeps the logits of a head or a router from drifting.

    Args:
        logits: ``[..., V]``.
        where: ``[...]`` bool, tokens to count.
        weights: ``[...]`` float constants that multiply num and den.

    Returns:
        ``num``, a scalar sum of squared nats; ``den``, the int64 count of tokens, or the sum of
        weights.

    Raises:
        ValueError: shapes do not fit, or ``weights`` require grad.
        TypeError: ``where`` is not bool.

    Examples:
        >>> z_loss(torch.zeros(3, 4))
        LossTerms(num=tensor(5.7654), den=tensor(3))

    References:
        Zoph et al., "ST-MoE: designing stable and transferable sparse expert models", 2022.
    """
    mask = require_mask("z_loss", where, logits.shape[:-1])
    loss = keep_rows(logits, mask).logsumexp(dim=-1).square()
    return sum_terms("z_loss", loss, mask, weights)
