"""DSpark: a block drafter with a Markov head and a confidence head.

The backbone drafts the Q tokens behind an anchor in parallel. The Markov head corrects the logits
of each slot by the token before it, and the confidence head predicts how much of the target's
distribution the draft covers. Embedding and output head are those of the target. They are frozen,
and passed beside the params as ``target``: a dict with ``embed`` ``[V, H]`` and, unless the two are
tied, ``head`` ``[V, H]``, such as the params of ``decoder``.

Slot j of the block at anchor a predicts token ``a + 1 + j``: slot 0 holds the anchor's token, the
others the mask token. In training the Markov head reads the true previous token.

Shapes: B rows, S tokens in a row, N blocks in a row, Q slots in a block, H width, K captured layers
of the target, V vocabulary, r Markov rank.

References:
    DSpark as trained in SpecForge (sgl-project/SpecForge).
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pure import random, tree
from ..pure.objective import TermMean, term_mean
from ..pure.terms import LossTerms, Metrics
from . import backbone, markov
from .anchors import (
    anchor_width,
    block_tokens,
    sample_anchors,
    slot_weights,
    supervised_slots,
    take_slots,
)
from .block_losses import SlotValues, slot_losses, slot_metrics, slot_terms
from .chunking import map_chunks
from .dspark_config import Config
from .layers import embed, init_weight, linear

__all__ = [
    "Config",
    "Slots",
    "apply",
    "confidence_logits",
    "den",
    "init",
    "logits",
    "loss_terms",
    "objective",
    "prepare",
]

Params = Any
Batch = dict[str, Tensor]


def init(
    config: Config, key: Tensor, *, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Params:
    """Params of ``backbone``, with ``markov`` and ``confidence`` where the config has these heads.

    Args:
        config: the drafter.
        key: int64 ``[2]``, from ``random.key``; its device is that of the params.
        std: deviation of the normal weights.
        dtype: of all params.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> sorted(init(config, random.key(0)))
        ['confidence', 'context', 'layers', 'markov', 'norm']
    """
    backbone_key, markov_key, confidence_key = random.split(key, 3)
    width, rank = config.hidden_size, config.markov_rank
    params = backbone.init(config, backbone_key, std=std, dtype=dtype)
    if rank:
        sizes = {"vocab_size": config.vocab_size, "hidden_size": width, "rank": rank}
        params["markov"] = markov.init(
            config.markov_head, markov_key, **sizes, std=std, dtype=dtype
        )
    if config.confidence_alpha > 0:
        inputs = width + (rank if config.confidence_with_markov else 0)
        params["confidence"] = {
            "weight": init_weight(confidence_key, 1, inputs, std=std, dtype=dtype),
            "bias": torch.zeros(1, dtype=dtype, device=key.device),
        }
    return params


class Slots(NamedTuple):
    """What is known of each slot before its logits.

    Attributes:
        hidden: ``[..., Q, H]``.
        markov: ``[..., Q, r]``, the vector u of the Markov head, or None.
        confidence: ``[..., Q]``, logits of the confidence head, or None.
    """

    hidden: Tensor
    markov: Tensor | None
    confidence: Tensor | None


def apply(params: Params, batch: Batch, config: Config, target: Params) -> Slots:
    """All slots of all blocks of a batch, previous tokens given.

    Args:
        params: see ``init``.
        batch: a dict with ``tokens`` ``[B, S]`` int64, ``captured`` ``[B, S, K * H]``,
            ``anchors`` ``[B, N]`` int64 and ``keep`` ``[B, N]`` bool.
        config: the drafter.
        target: the frozen embedding and head.

    Returns:
        Values of leading shape ``[B, N, Q]``; ``logits`` makes logits of them.
    """
    tokens, anchors, keep = batch["tokens"], batch["anchors"], batch["keep"]
    size = config.block_size
    ids = block_tokens(tokens, anchors, keep, size, mask_token_id=config.mask_token_id)
    slots = embed(ids, target["embed"].detach())
    hidden = backbone.apply(params, batch["captured"], slots, anchors, keep, config)
    if not config.markov_rank:
        return Slots(hidden, None, confidence_logits(params, hidden, None, config))
    head = params["markov"]
    previous = embed(take_slots(tokens, anchors, size), head["embed"])
    vectors = markov.scan_slots(head, config.markov_head, previous, hidden)
    return Slots(hidden, vectors, confidence_logits(params, hidden, previous, config))


def confidence_logits(
    params: Params, hidden: Tensor, previous: Tensor | None, config: Config
) -> Tensor | None:
    """Logits ``[...]`` of the confidence head on hidden states ``[..., H]``; None without a head.

    Args:
        params: see ``init``.
        hidden: ``[..., H]``.
        previous: Markov vectors ``[..., r]`` of the tokens before, or None without a Markov head.
        config: the drafter.
    """
    if config.confidence_alpha == 0:
        return None
    head = params["confidence"]
    if config.confidence_with_markov and previous is not None:
        hidden = torch.cat([hidden, previous], -1)
    return linear(hidden, head["weight"], head["bias"]).squeeze(-1)


def logits(params: Params, slots: Slots, target: Params) -> Tensor:
    """``head @ hidden``, corrected by ``out @ u`` of the Markov head.

    Args:
        params: see ``init``.
        slots: with leading shape ``[..., Q]``.
        target: the frozen embedding and head.

    Returns:
        ``[..., Q, V]``.
    """
    base = linear(slots.hidden, _head(target))
    return base if slots.markov is None else base + linear(slots.markov, params["markov"]["out"])


def _head(target: Params) -> Tensor:
    return target["head" if "head" in target else "embed"].detach()


def prepare(batch: Batch, config: Config) -> Batch:
    """Draw the anchors of a batch, on the host, when it is built.

    Args:
        batch: a dict with ``loss_mask`` ``[B, S]`` and ``key`` ``[B, 2]``, one key a row.
        config: gives the most anchors in a row.

    Returns:
        The batch with ``anchors`` ``[B, N]`` and ``keep`` ``[B, N]``, N what its fullest row needs.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> batch = {"loss_mask": torch.tensor([[0, 1, 1, 1]]), "key": random.key(0)[None]}
        >>> prepare(batch, config)["anchors"]
        tensor([[1, 2]])
    """
    mask = batch["loss_mask"]
    num_anchors = anchor_width(mask, config.num_anchors)
    anchors, keep = sample_anchors(batch["key"], mask, num_anchors)
    return {**batch, "anchors": anchors, "keep": keep}


def den(batch: Batch, config: Config) -> Tensor:
    """The sum of weights that ``loss_terms`` divides by, from masks and anchors alone.

    Args:
        batch: from ``prepare``.
        config: the drafter.

    Returns:
        A float64 scalar.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> batch = {"loss_mask": torch.ones(1, 4), "key": random.key(0)[None]}
        >>> den(prepare(batch, config), config)
        tensor(6., dtype=torch.float64)
    """
    return slot_weights(_supervised(batch, config), config.decay_gamma).sum()


def _supervised(batch: Batch, config: Config) -> Tensor:
    return supervised_slots(batch["loss_mask"], batch["anchors"], batch["keep"], config.block_size)


def objective(config: Config) -> TermMean:
    """``(ce_alpha CE + l1_alpha L1 + confidence_alpha CONF) / den``, for ``window_grad``."""
    return term_mean(config.alphas)


def loss_terms(
    params: Params, batch: Batch, config: Config, target: Params
) -> tuple[LossTerms, Metrics]:
    """Sums of the losses of ``slot_losses`` over the supervised slots, and their metrics.

    Bind the rest for ``window_grad``: ``functools.partial(loss_terms, config=..., target=...)``.
    Logits exist for ``config.chunk_blocks`` blocks at once and are computed anew in the backward.
    It reads nothing on the host; a batch without an anchor gives exact zeros.

    Args:
        params: see ``init``.
        batch: from ``prepare``: what ``apply`` reads, ``loss_mask`` ``[B, S]`` and, where the
            config needs a teacher, ``final`` ``[B, S, H]``: the input of the target's head, whose
            row t predicts token t + 1.
        config: the drafter.
        target: the frozen embedding and head.

    Returns:
        ``(terms, metrics)``: ``num`` a dict of sums by name, ``den`` the one sum of weights.

    Raises:
        ValueError: the batch lacks fields; the message names them.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> row = {"tokens": torch.tensor([[3, 1, 4, 1]]), "loss_mask": torch.ones(1, 4)}
        >>> states = {"captured": torch.ones(1, 4, 24), "final": torch.ones(1, 4, 8)}
        >>> batch = prepare(row | states | {"key": random.key(0)[None]}, config)
        >>> params, target = init(config, random.key(1)), {"embed": torch.zeros(9, 8)}
        >>> terms, metrics = loss_terms(params, batch, config, target)
        >>> terms.num["ce"], terms.den  # six labels behind three anchors, ln 9 each
        (tensor(13.1833, dtype=torch.float64), tensor(6., dtype=torch.float64))
    """
    _check_fields(batch, config)
    anchors, size = batch["anchors"], config.block_size
    fields = {"labels": take_slots(batch["tokens"], anchors, size, offset=1)}
    if config.needs_teacher:
        fields["teacher"] = take_slots(batch["final"], anchors, size)
    slots = apply(params, batch, config, target)
    losses, measures = _slot_values(params, slots, fields, config, target)
    supervised = _supervised(batch, config)
    active = {name: losses[name] for name in config.alphas}
    terms = slot_terms(active, supervised, config.decay_gamma)
    return terms, slot_metrics(losses, measures, supervised, config.decay_gamma)


def _slot_values(
    params: Params, slots: Slots, fields: Batch, config: Config, target: Params
) -> tuple[SlotValues, SlotValues]:
    """``slot_losses`` of ``[B, N, Q]`` slots, the logits of a few blocks at a time."""
    on_blocks = functools.partial(_block_values, target={"head": _head(target)})
    heads = {"markov": {"out": params["markov"]["out"]}} if config.markov_rank else {}
    leading = slots.hidden.shape[:2]
    slots, fields = tree.map(lambda x: x.flatten(0, 1), (slots, fields))
    values = map_chunks(on_blocks, heads, slots, fields, chunk_size=config.chunk_blocks)
    return tree.map(lambda x: x.unflatten(0, leading), values)


def _block_values(
    heads: Params, slots: Slots, fields: Batch, target: Params
) -> tuple[SlotValues, SlotValues]:
    teacher = linear(fields["teacher"], target["head"]) if "teacher" in fields else None
    return slot_losses(logits(heads, slots, target), fields["labels"], teacher, slots.confidence)


def _check_fields(batch: Batch, config: Config) -> None:
    needed = ["tokens", "loss_mask", "captured", "anchors", "keep"]
    needed += ["final"] if config.needs_teacher else []
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(
            f"dspark.loss_terms: batch must have {needed}, got none of {missing}. "
            "`prepare` adds anchors and keep."
        )
