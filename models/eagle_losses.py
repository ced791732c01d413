"""Losses of drafters that learn a target's distribution over a part of its vocabulary.

Of the teacher's distribution over all V tokens two numbers are needed at each position, its
likeliest token and the logarithm of its normaliser; they are found from slices of the vocabulary.
The loss itself has logits of the D tokens that can be drafted only.

A position is supervised where its next token is a label that the drafter has to guess, and taught
where besides the teacher's likeliest token can be drafted: what the map misses cannot be learned,
and still counts as an error of the drafter.

Shapes: B rows, S tokens in a row, H width, V tokens of the target, D tokens of the drafter.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .block_drafter import output_head
from .draft_vocabulary import can_draft
from .eagle_layer import Config
from .layers import linear

__all__ = [
    "Values",
    "distillation_losses",
    "label_mask",
    "require_batch",
    "summarise_teacher",
    "taught",
    "teacher_logits",
    "with_teacher",
]

Params = Any
Batch = dict[str, Tensor]
Values = dict[str, Tensor]
"""Values ``[...]`` by name."""

_SLICE = 32_768  # tokens of the vocabulary


def distillation_losses(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    teacher_token: Tensor,
    teacher_logsumexp: Tensor,
    draft_ids: Tensor | None = None,
) -> tuple[Values, Values]:
    """The losses of each position, and what else its logits tell.

    With q the draft, t the teacher over all tokens, and p = t / sum(t) over those of the drafter,
    all in float32 or wider::

        kl        = -sum_v p_v log q_v       nats; KL(p, q) and the entropy of p, which is constant
        rejection = 1 - sum_v min(t_v, q_v)  in [0, 1]
        lk        = -log sum_v min(t_v, q_v)  nats; 0 where the sum is 0

    One minus rejection is the probability that speculative sampling accepts the draft. No gradient
    flows to the teacher.

    Args:
        draft_logits: ``[..., D]``.
        teacher_logits: ``[..., D]``, of the tokens of the drafter, broadcast against the draft's.
        teacher_token: ``[...]`` int64, the teacher's likeliest token of all V.
        teacher_logsumexp: ``[...]``, of the teacher's logits of all V tokens.
        draft_ids: ``[D]``, the target's ids; None for all.

    Returns:
        ``(losses, measures)``; the measures, without gradient, are ``correct`` and ``acceptance``.

    Examples:
        >>> q, t = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
        >>> losses, measures = distillation_losses(q, t, torch.tensor(0), torch.tensor(0.0))
        >>> losses["kl"], losses["rejection"], measures["correct"]
        (tensor(0.6931), tensor(0.2500), tensor(True))

    References:
        Li et al., EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
        Training-Time Test, 2025.
    """
    log_q, teacher = _wide(draft_logits).log_softmax(-1), _wide(teacher_logits.detach())
    full = (teacher - teacher_logsumexp[..., None]).exp()
    accepted = torch.minimum(full, log_q.exp()).sum(-1)
    possible = accepted > 0
    losses = {
        "kl": -(teacher.softmax(-1) * log_q).sum(-1),
        "rejection": 1 - accepted,
        "lk": -torch.where(possible, accepted, 1).log(),
    }
    drafted = log_q.detach().argmax(-1)
    drafted = drafted if draft_ids is None else draft_ids[drafted]
    return losses, {"correct": drafted == teacher_token, "acceptance": accepted.detach()}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def summarise_teacher(
    final: Tensor, head: Tensor, *, slice_size: int = _SLICE
) -> tuple[Tensor, Tensor]:
    """The likeliest token and the logsumexp of the logits ``head @ final``, without all of them.

    Args:
        final: ``[..., H]``.
        head: ``[V, H]``.
        slice_size: tokens of the vocabulary that have logits at one time.

    Returns:
        ``(token, logsumexp)``: ``[...]`` int64, of equal logits the lowest id, and ``[...]`` in
        float32 or wider. Neither carries a gradient.

    Examples:
        >>> summarise_teacher(torch.ones(1), torch.tensor([[1.0], [3.0], [3.0]]), slice_size=2)
        (tensor(1), tensor(3.7586))
    """
    final, head = final.detach(), head.detach()
    slices = head.split(slice_size)
    best, token, total = None, None, None
    for i, part in enumerate(slices):
        logits = _wide(linear(final, part))
        top, here = logits.max(-1).values, logits.argmax(-1) + i * slice_size
        mass = logits.logsumexp(-1)
        if best is None or token is None or total is None:
            best, token, total = top, here, mass
        else:
            token = torch.where(top > best, here, token)
            best, total = torch.maximum(best, top), torch.logaddexp(total, mass)
    if token is None or total is None:
        raise ValueError(
            f"summarise_teacher: head must have a row for each token, got {head.shape}."
        )
    return token, total


def with_teacher(batch: Batch, config: Config, target: Params) -> Batch:
    """The batch with what the loss needs of the teacher; what it has already stays.

    It depends on the frozen target alone: done once, it can be kept with the features.

    Args:
        batch: a dict with ``final`` ``[B, S, H]``: the input of the target's head, whose row t
            predicts token t + 1.
        config: gives the positions that have logits at one time.
        target: the frozen head.

    Returns:
        The batch with ``teacher_token`` int64 and ``teacher_logsumexp``, each ``[B, S]``.
    """
    if "teacher_token" in batch and "teacher_logsumexp" in batch:
        return batch
    shape, head = batch["final"].shape[:2], output_head(target)
    with torch.no_grad():
        flat = batch["final"].flatten(0, 1)
        parts = flat.split(config.chunk_tokens or max(1, len(flat)))
        pairs = [summarise_teacher(part, head) for part in parts]
        token, total = (torch.cat(each).unflatten(0, shape) for each in zip(*pairs, strict=True))
    return {**batch, "teacher_token": token, "teacher_logsumexp": total}


def teacher_logits(final: Tensor, target: Params) -> Tensor:
    """The target's logits of the tokens that can be drafted, ``[..., D]`` of ``[..., H]``."""
    head, draft_ids = output_head(target), target.get("draft_ids")
    return linear(final, head if draft_ids is None else head[draft_ids])


def label_mask(loss_mask: Tensor) -> Tensor:
    """Where the next token is a label: ``[B, S]`` bool, never at the end of a row.

    Examples:
        >>> label_mask(torch.tensor([[1, 0, 1]]))
        tensor([[False,  True, False]])
    """
    return functional.pad(loss_mask[:, 1:] > 0.5, (0, 1))


def taught(batch: Batch, config: Config, target: Params) -> Tensor:
    """Where a drafter learns from the teacher's row: ``label_mask``, and its token can be drafted.

    Args:
        batch: from ``with_teacher``, with ``loss_mask`` ``[B, S]``.
        config: the drafter.
        target: its ``draft_ids``, if it has some.

    Returns:
        ``[B, S]`` bool.
    """
    known = can_draft(target.get("draft_ids"), batch["teacher_token"], config.vocab_size)
    return label_mask(batch["loss_mask"]) & known


def require_batch(
    function: str, batch: Batch, needed: Sequence[str], config: Config, target: Params
) -> None:
    """Check what a loss reads, by names and shapes alone.

    Raises:
        ValueError: the batch lacks fields, or the target's head and draft vocabulary are not those
            of the config; the message names them.
    """
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(f"{function}: batch must have {list(needed)}, got none of {missing}.")
    num_tokens, draft_ids = len(output_head(target)), target.get("draft_ids")
    num_drafted = num_tokens if draft_ids is None else len(draft_ids)
    if (num_tokens, num_drafted) != (config.vocab_size, config.num_draft_tokens):
        raise ValueError(
            f"{function}: the target's head and draft_ids must have vocab_size={config.vocab_size} "
            f"and draft_vocab_size={config.num_draft_tokens} rows, got {num_tokens} and "
            f"{num_drafted}. Is this the target that the drafter was made for?"
        )
