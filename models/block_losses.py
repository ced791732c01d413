"""Losses of drafted blocks: first one value a slot, then sums over slots.

The values of a slot need its logits, which are computed for a few blocks at a time; the sums need
no logits, so that they are the same however the blocks were grouped.

Shapes: ``...`` any leading dims of blocks, Q slots in a block, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..pure.terms import LossTerms, Metrics
from .anchors import slot_weights

__all__ = [
    "SlotValues",
    "accepted_length",
    "renyi_divergence",
    "slot_losses",
    "slot_means",
    "slot_metrics",
    "slot_terms",
]

SlotValues = dict[str, Tensor]
"""Values ``[..., Q]`` by name."""


def slot_losses(
    draft_logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None = None,
    confidence_logits: Tensor | None = None,
) -> tuple[SlotValues, SlotValues]:
    """The losses of each slot, and what else its logits tell.

    With p the softmax of the draft and t that of the teacher, all in float32 or wider::

        ce         = -log p[label]                    nats
        l1         = sum_v |p_v - t_v|                in [0, 2]
        acceptance = 1 - l1 / 2                       sum_v min(p_v, t_v)
        confidence = BCE(sigmoid(confidence_logit), acceptance)

    Acceptance is the probability that speculative sampling accepts the slot. No gradient flows
    to it, nor to the teacher.

    Args:
        draft_logits: ``[..., Q, V]``.
        labels: ``[..., Q]`` int64 in ``[0, V)``, also where a slot does not count.
        teacher_logits: ``[..., Q, V]``; without them there is no l1 and no confidence.
        confidence_logits: ``[..., Q]``; without them there is no confidence.

    Returns:
        ``(losses, measures)``: ``ce``, ``l1`` and ``confidence``; and, without gradient,
        ``correct``, ``draft_top1_prob``, ``teacher_agreement``, ``teacher_top1_prob``,
        ``acceptance``, ``confidence_abs_error``.

    Examples:
        >>> draft, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
        >>> losses, measures = slot_losses(draft, torch.tensor([0]), teacher)
        >>> losses["ce"], losses["l1"], measures["acceptance"]
        (tensor([0.6931]), tensor([0.5000]), tensor([0.7500]))

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
    """
    log_p = _wide(draft_logits).log_softmax(-1)
    top = log_p.detach().max(-1)
    losses = {"ce": -log_p.gather(-1, labels[..., None]).squeeze(-1)}
    measures = {"correct": top.indices == labels, "draft_top1_prob": top.values.exp()}
    if teacher_logits is None:
        return losses, measures
    teacher = _wide(teacher_logits.detach()).softmax(-1)
    teacher_top = teacher.max(-1)
    losses["l1"] = (log_p.exp() - teacher).abs().sum(-1)
    acceptance = (1 - losses["l1"].detach() / 2).clamp(0, 1)
    measures["acceptance"] = acceptance
    measures["teacher_agreement"] = top.indices == teacher_top.indices
    measures["teacher_top1_prob"] = teacher_top.values
    if confidence_logits is not None:
        score = _wide(confidence_logits)
        losses["confidence"] = functional.binary_cross_entropy_with_logits(
            score, acceptance.to(score.dtype), reduction="none"
        )
        measures["confidence_abs_error"] = (score.detach().sigmoid() - acceptance).abs()
    return losses, measures


def renyi_divergence(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Rényi's divergence of order 1/2 of two distributions: ``-2 log sum_v sqrt(p_v t_v)``.

    No gradient flows to the teacher.

    Args:
        draft_logits: ``[..., V]``, those of p.
        teacher_logits: ``[..., V]``, those of t.

    Returns:
        ``[...]``, nats in float32 or wider.

    Examples:
        >>> p, t = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
        >>> renyi_divergence(p, t)  # -2 log sqrt(1 / 2)
        tensor(0.6931)
    """
    log_p = _wide(draft_logits).log_softmax(-1)
    log_t = _wide(teacher_logits.detach()).log_softmax(-1)
    return -2 * ((log_p + log_t) / 2).logsumexp(-1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def slot_terms(losses: SlotValues, supervised: Tensor, decay_gamma: float | None) -> LossTerms:
    """Weighted sums of slot losses, over the one sum of weights.

    ``num[name] = sum w * losses[name]`` and ``den = sum w``, in float64, with the weights w of
    ``slot_weights``. Slots that do not count add exact zeros, whatever their values.

    Args:
        losses: ``[..., Q]`` by name.
        supervised: ``[..., Q]`` bool, the slots that count.
        decay_gamma: see ``slot_weights``.

    Returns:
        ``num`` a dict of scalars, ``den`` a scalar that all share.

    Examples:
        >>> losses = {"ce": torch.tensor([2.0, 3.0, float("nan")])}
        >>> slot_terms(losses, torch.tensor([True, True, False]), None)
        LossTerms(num={'ce': tensor(5., dtype=torch.float64)}, den=tensor(2., dtype=torch.float64))
    """
    weights = slot_weights(supervised, decay_gamma)
    return LossTerms(
        num={name: _total(values, supervised, weights) for name, values in losses.items()},
        den=weights.sum(),
    )


def slot_metrics(
    losses: SlotValues, measures: SlotValues, supervised: Tensor, decay_gamma: float | None
) -> Metrics:
    """What is reported of drafted blocks, as sums over sums, without gradient.

    Over the sum of weights: ``ce_loss``, ``l1_loss``, ``confidence_loss`` and
    ``confidence_abs_error``. Over the number of supervised slots: ``accuracy``,
    ``draft_top1_prob``, ``teacher_top1_prob``, ``teacher_agreement``; ``ce_position`` and
    ``accuracy_position`` are vectors ``[Q]``, one ratio a slot. ``accepted_length`` is explained
    there. ``tau_probabilistic`` is the
    expected number of tokens that a block of speculative sampling yields, over the number of
    blocks with a supervised slot: ``1 + sum_j prod_{i<=j} acceptance_i``.

    Args:
        losses: from ``slot_losses``.
        measures: from ``slot_losses``.
        supervised: ``[..., Q]`` bool.
        decay_gamma: see ``slot_weights``.

    Returns:
        ``LossTerms`` by name; those that need a teacher or a confidence head only with it.

    Examples:
        >>> logits, labels = torch.zeros(1, 2, 5), torch.tensor([[0, 3]])
        >>> losses, measures = slot_losses(logits, labels, teacher_logits=logits)
        >>> metrics = slot_metrics(losses, measures, torch.tensor([[True, True]]), None)
        >>> metrics["teacher_agreement"]
        LossTerms(num=tensor(2., dtype=torch.float64), den=tensor(2., dtype=torch.float64))
    """
    values = {name: value.detach().double() for name, value in (losses | measures).items()}
    weights, count = slot_weights(supervised, decay_gamma), supervised.double()
    metrics = {
        "accepted_length": accepted_length(measures["correct"], supervised),
        "accuracy": _mean(values["correct"], supervised, count),
        "accuracy_position": slot_means(values["correct"], supervised),
        "ce_loss": _mean(values["ce"], supervised, weights),
        "ce_position": slot_means(values["ce"], supervised),
        "draft_top1_prob": _mean(values["draft_top1_prob"], supervised, count),
    }
    if "l1" in values:
        metrics |= {
            "l1_loss": _mean(values["l1"], supervised, weights),
            "tau_probabilistic": _expected_tokens(values["acceptance"], supervised),
            "teacher_agreement": _mean(values["teacher_agreement"], supervised, count),
            "teacher_top1_prob": _mean(values["teacher_top1_prob"], supervised, count),
        }
    if "confidence" in values:
        error = values["confidence_abs_error"]
        metrics["confidence_loss"] = _mean(values["confidence"], supervised, weights)
        metrics["confidence_abs_error"] = _mean(error, supervised, weights)
    return metrics


def accepted_length(correct: Tensor, supervised: Tensor) -> LossTerms:
    """The tokens that a block yields in greedy decoding, if labels are what the target says.

    One, and one for each slot before the first that is wrong or unsupervised; over the number of
    blocks whose first slot is supervised.

    Args:
        correct: ``[..., Q]``, bool or 0 and 1.
        supervised: ``[..., Q]`` bool.

    Examples:
        >>> accepted_length(torch.tensor([[1, 1, 0, 1]]), torch.ones(1, 4, dtype=torch.bool))
        LossTerms(num=tensor(3., dtype=torch.float64), den=tensor(1., dtype=torch.float64))
    """
    return _expected_tokens(correct.double(), supervised)


def slot_means(values: Tensor, supervised: Tensor) -> LossTerms:
    """For each place in a block, the sum of values there, over the number of supervised slots.

    Args:
        values: ``[..., Q]``.
        supervised: ``[..., Q]`` bool.

    Returns:
        Two vectors ``[Q]``.

    Examples:
        >>> slot_means(torch.tensor([[2.0, 5.0]]), torch.tensor([[True, False]]))
        LossTerms(num=tensor([2., 0.]), den=tensor([1., 0.], dtype=torch.float64))
    """
    kept = torch.where(supervised, values, 0).flatten(0, -2)
    return LossTerms(kept.sum(0), supervised.flatten(0, -2).double().sum(0))


def _total(values: Tensor, supervised: Tensor, weights: Tensor) -> Tensor:
    # `where` first: 0 * inf is no zero.
    return (torch.where(supervised, values, 0) * weights).sum()


def _mean(values: Tensor, supervised: Tensor, weights: Tensor) -> LossTerms:
    return LossTerms(_total(values, supervised, weights), weights.sum())


def _expected_tokens(acceptance: Tensor, supervised: Tensor) -> LossTerms:
    drafted = torch.where(supervised, acceptance, 0).cumprod(-1).sum(-1)
    counted = supervised[..., 0].double()
    return LossTerms(((1 + drafted) * counted).sum(), counted.sum())
