"""DSpark: a block drafter with a Markov head and a confidence head.

The backbone drafts the Q tokens behind an anchor in parallel. The Markov head corrects the logits
of each slot by the token before it, and the confidence head predicts how much of the target's
distribution the draft covers. Embedding and output head are those of the ``target``, see
``block_drafter``.

With ``dpard_alpha`` it is trained by D-PARD: Rényi's divergence from the target, each slot weighted
by the ``credit`` it has with the acceptance of the draft, averaged over rows.

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

from ..pure import random
from ..pure.objective import TermMean, term_mean
from ..pure.terms import LossTerms, Metrics
from . import backbone, markov
from .anchors import slot_weights, supervised_slots, take_slots
from .block_drafter import hidden_states, map_blocks, output_head, prepare, require_fields
from .block_losses import (
    SlotValues,
    renyi_divergence,
    slot_losses,
    slot_means,
    slot_metrics,
    slot_terms,
)
from .credit import block_average, credit
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
    hidden = hidden_states(params, batch, config, target)
    if not config.markov_rank:
        return Slots(hidden, None, confidence_logits(params, hidden, None, config))
    head = params["markov"]
    tokens = take_slots(batch["tokens"], batch["anchors"], config.block_size)
    previous = embed(tokens, head["embed"])
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
    base = linear(slots.hidden, output_head(target))
    return base if slots.markov is None else base + linear(slots.markov, params["markov"]["out"])


def den(batch: Batch, config: Config) -> Tensor | dict[str, Tensor]:
    """The den of ``loss_terms``, from masks and anchors alone.

    Args:
        batch: from ``prepare``.
        config: the drafter.

    Returns:
        The sum of weights, a float64 scalar; with D-PARD the number of rows beside it, by name.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> batch = {"loss_mask": torch.ones(1, 4), "key": random.key(0)[None]}
        >>> den(prepare(batch, config), config)
        tensor(6., dtype=torch.float64)
    """
    supervised = _supervised(batch, config)
    weights = slot_weights(supervised, config.decay_gamma).sum()
    if config.dpard_alpha is None:
        return weights
    rows = block_average(supervised, supervised, "row").den
    return {name: rows if name == "dpard" else weights for name in config.alphas}


def _supervised(batch: Batch, config: Config) -> Tensor:
    return supervised_slots(batch["loss_mask"], batch["anchors"], batch["keep"], config.block_size)


def objective(config: Config) -> TermMean:
    """``(ce_alpha CE + l1_alpha L1 + confidence_alpha CONF) / den``, for ``window_grad``.

    With D-PARD ``DPARD / rows + confidence_alpha CONF / den``: two dens, so give ``window_grad``
    ``den_fn=functools.partial(den, config=config)`` and it takes one backward a micro-step.
    """
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
    fields = ["tokens", "loss_mask", "captured", "anchors", "keep"]
    fields += ["final"] if config.needs_teacher else []
    require_fields("dspark.loss_terms", batch, fields)
    slots = apply(params, batch, config, target)
    losses, measures = _slot_values(params, slots, batch, config, target)
    supervised = _supervised(batch, config)
    metrics = slot_metrics(losses, measures, supervised, config.decay_gamma)
    active = {name: losses[name] for name in config.alphas}
    if config.dpard_alpha is None:
        return slot_terms(active, supervised, config.decay_gamma), metrics
    worth = credit(measures["acceptance"], supervised, config.dpard_alpha)
    dpard = block_average(worth * active.pop("dpard"), supervised, "row")
    metrics["dpard_loss"] = LossTerms(dpard.num.detach(), dpard.den)
    metrics["dpard_credit_position"] = slot_means(worth, supervised)
    others = slot_terms(active, supervised, config.decay_gamma)
    dens = {"dpard": dpard.den} | dict.fromkeys(active, others.den)
    return LossTerms({"dpard": dpard.num} | others.num, dens), metrics


def _slot_values(
    params: Params, slots: Slots, batch: Batch, config: Config, target: Params
) -> tuple[SlotValues, SlotValues]:
    """``slot_losses`` of ``[B, N, Q]`` slots, the logits of a few blocks at a time."""
    anchors, size = batch["anchors"], config.block_size
    fields = {"labels": take_slots(batch["tokens"], anchors, size, offset=1)}
    if config.needs_teacher:
        fields["teacher"] = take_slots(batch["final"], anchors, size)
    on_blocks = functools.partial(
        _block_values, target={"head": output_head(target)}, dpard=config.dpard_alpha is not None
    )
    heads = {"markov": {"out": params["markov"]["out"]}} if config.markov_rank else {}
    return map_blocks(on_blocks, heads, slots, fields, chunk_size=config.chunk_blocks)


def _block_values(
    heads: Params, slots: Slots, fields: Batch, target: Params, dpard: bool
) -> tuple[SlotValues, SlotValues]:
    draft = logits(heads, slots, target)
    teacher = linear(fields["teacher"], target["head"]) if "teacher" in fields else None
    losses, measures = slot_losses(draft, fields["labels"], teacher, slots.confidence)
    if dpard and teacher is not None:
        losses["dpard"] = renyi_divergence(draft, teacher)
    return losses, measures
