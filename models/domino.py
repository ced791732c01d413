"""Domino: DFlash's parallel draft, corrected slot after slot by a recurrent network.

A GRU reads the tokens of a block from the anchor's on. Its state and the slot's hidden state give a
low-rank correction of the slot's logits::

    base = head @ o;  u = silu(W [o; g]);  final = base + out @ u

where g has read all tokens before the predicted one: the true ones in training, the drafted ones
when it drafts. The first ``prefix_size`` tokens are not corrected.

The loss is ``(1 - base_weight) CE(final) + base_weight CE(base)``. The weight falls with the step,
which the batch carries as data: see ``prepare``.

Two alignments. By default slot k predicts the token of its own position ``a + k``; slot 0, the
anchor, is not scored, and ``D = Q - 1`` tokens are drafted. With ``shift_label`` slot k predicts
token ``a + 1 + k``, and ``D = Q``. Counted by the token they predict, ``a + 1 + i``, both are one.

Shapes: B rows, S tokens in a row, N blocks in a row, Q slots in a block, D drafted tokens, H width,
K captured layers of the target, V vocabulary, r rank of the correction, G width of the GRU.

References:
    Domino as trained in SpecForge (sgl-project/SpecForge).
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..pure import random
from ..pure.objective import TermMean, term_mean
from ..pure.terms import LossTerms, Metrics
from . import backbone, block_drafter, gru
from .anchors import labelled_slots, slot_weights, take_slots
from .block_drafter import hidden_states, map_blocks, output_head, require_fields
from .block_losses import SlotValues, slot_losses, slot_metrics, slot_terms
from .domino_config import Config
from .layers import embed, init_weight, linear

__all__ = [
    "Config",
    "Slots",
    "apply",
    "base_weight",
    "correct",
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
    """Params of ``backbone``, with ``gru`` and ``correction``.

    ``correction`` holds ``hidden`` ``[r, H + G]`` and ``out`` ``[V, r]``. The latter is zero, so
    that an untrained drafter corrects nothing.

    Args:
        config: the drafter.
        key: int64 ``[2]``, from ``random.key``; its device is that of the params.
        std: deviation of the normal weights.
        dtype: of all params.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> sorted(init(config, random.key(0)))
        ['context', 'correction', 'gru', 'layers', 'norm']
    """
    backbone_key, gru_key, hidden_key = random.split(key, 3)
    params = backbone.init(config, backbone_key, std=std, dtype=dtype)
    width, state, rank = config.hidden_size, config.gru_size, config.correction_rank
    params["gru"] = gru.init(gru_key, input_size=width, state_size=state, std=std, dtype=dtype)
    params["correction"] = {
        "hidden": init_weight(hidden_key, rank, width + state, std=std, dtype=dtype),
        "out": torch.zeros(config.vocab_size, rank, dtype=dtype, device=key.device),
    }
    return params


class Slots(NamedTuple):
    """What is known of each slot before its logits.

    Attributes:
        hidden: o, ``[..., D, H]``.
        correction: u, ``[..., D, r]``; zeros for the slots of the prefix.
    """

    hidden: Tensor
    correction: Tensor


def apply(params: Params, batch: Batch, config: Config, target: Params) -> Slots:
    """All scored slots of all blocks of a batch, the tokens before each given.

    Args:
        params: see ``init``.
        batch: see ``block_drafter.hidden_states``.
        config: the drafter.
        target: the frozen embedding.

    Returns:
        Values of leading shape ``[B, N, D]``; ``logits`` makes logits of them.
    """
    # Contiguous, so that the head is one product and not one for each block.
    hidden = hidden_states(params, batch, config, target)[..., config.first_slot :, :].contiguous()
    known = take_slots(batch["tokens"], batch["anchors"], config.num_drafted)
    states = gru.scan(params["gru"], embed(known, target["embed"].detach()))
    prefix = config.prefix_size
    corrections = correct(params, hidden[..., prefix:, :], states[..., prefix:, :])
    return Slots(hidden, functional.pad(corrections, (0, 0, prefix, 0)))


def correct(params: Params, hidden: Tensor, state: Tensor) -> Tensor:
    """The vector ``u = silu(W [o; g])``.

    Args:
        params: see ``init``.
        hidden: o, ``[..., H]``.
        state: g, ``[..., G]``.

    Returns:
        ``[..., r]``.
    """
    joined = torch.cat([hidden, state], -1)
    return functional.silu(linear(joined, params["correction"]["hidden"]))


def logits(params: Params, slots: Slots, target: Params) -> tuple[Tensor, Tensor]:
    """``(final, base)`` logits, each ``[..., V]``: with the correction and without.

    Args:
        params: see ``init``.
        slots: of leading shape ``[...]``.
        target: the frozen head.
    """
    base = linear(slots.hidden, output_head(target))
    return base + linear(slots.correction, params["correction"]["out"]), base


def base_weight(step: int, num_steps: int | None, config: Config) -> float:
    """The weight of the uncorrected logits' loss at an optimizer step.

    ``base_start * (1 - min(step / max(1, floor(num_steps * base_decay_ratio)), 1))``, and 0 where
    the number of steps is not known.

    Args:
        step: optimizer steps done.
        num_steps: of the whole training, or None.
        config: the drafter.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> [base_weight(step, 10, config) for step in (0, 2, 5, 10)]
        [1.0, 0.6, 0.0, 0.0]
    """
    if num_steps is None:
        return 0.0
    decay_steps = max(1, int(num_steps * config.base_decay_ratio))
    return config.base_start * (1 - min(step / decay_steps, 1.0))


def prepare(batch: Batch, config: Config, *, step: int = 0, num_steps: int | None = None) -> Batch:
    """Draw the anchors of a batch, and write down the weight of the base at this step.

    The weight is data: a micro-step that is computed again, elsewhere or later, has the same.

    Args:
        batch: see ``block_drafter.prepare``.
        config: the drafter.
        step: optimizer steps done.
        num_steps: of the whole training, or None for a weight of 0.

    Returns:
        The batch with ``anchors``, ``keep`` and ``base_weight`` ``[B]`` float64.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> batch = {"loss_mask": torch.ones(1, 4), "key": random.key(0)[None]}
        >>> prepare(batch, config, step=1, num_steps=8)["base_weight"]
        tensor([0.7500], dtype=torch.float64)
    """
    weight = base_weight(step, num_steps, config)
    drawn = block_drafter.prepare(batch, config)
    keep = drawn["keep"]
    weights = torch.full((keep.shape[0],), weight, dtype=torch.float64, device=keep.device)
    return {**drawn, "base_weight": weights}


def den(batch: Batch, config: Config) -> Tensor:
    """The sum of weights that ``loss_terms`` divides by, from masks and anchors alone.

    Args:
        batch: from ``prepare``.
        config: the drafter.

    Returns:
        A float64 scalar.
    """
    return slot_weights(_labelled(batch, config), config.decay_gamma).sum()


def _labelled(batch: Batch, config: Config) -> Tensor:
    anchors, keep = batch["anchors"], batch["keep"]
    return labelled_slots(batch["loss_mask"], anchors, keep, config.num_drafted)


def objective(config: Config) -> TermMean:
    """``(final + base) / den``, for ``window_grad``; the terms are weighted already."""
    return term_mean()


def loss_terms(
    params: Params, batch: Batch, config: Config, target: Params
) -> tuple[LossTerms, Metrics]:
    """Weighted sums of the cross-entropies of final and base logits of the labelled slots.

    ::

        final = sum (1 - base_weight) w_i CE(final_i);  base = sum base_weight w_i CE(base_i)
        den = sum w_i;  w_i = e_i exp(-i / gamma), e_i whether slot i has a supervised label

    Bind the rest for ``window_grad``: ``functools.partial(loss_terms, config=..., target=...)``.
    Logits exist for ``config.chunk_blocks`` blocks at once and are computed anew in the backward.
    It reads nothing on the host; a batch without an anchor gives exact zeros.

    Args:
        params: see ``init``.
        batch: from ``prepare``: what ``apply`` reads, ``loss_mask`` ``[B, S]`` and
            ``base_weight`` ``[B]``.
        config: the drafter.
        target: the frozen embedding and head.

    Returns:
        ``(terms, metrics)``: ``num`` a dict of ``final`` and ``base``, ``den`` the one sum of
        weights. Metrics are those of ``slot_metrics`` of the final logits; ``base_accuracy``,
        ``base_ce_loss``, ``base_accepted_length``; and ``base_weight``, averaged over slots.

    Raises:
        ValueError: the batch lacks fields; the message names them.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> row = {"tokens": torch.tensor([[3, 1, 4, 1]]), "loss_mask": torch.ones(1, 4)}
        >>> row |= {"captured": torch.ones(1, 4, 24), "key": random.key(0)[None]}
        >>> params, target = init(config, random.key(1)), {"embed": torch.zeros(9, 8)}
        >>> batch = prepare(row, config, step=0, num_steps=10)
        >>> loss_terms(params, batch, config, target)[0].num["base"]  # six labels, ln 9 each
        tensor(13.1833, dtype=torch.float64)
    """
    needed = ["tokens", "loss_mask", "captured", "anchors", "keep", "base_weight"]
    require_fields("domino.loss_terms", batch, needed)
    slots = apply(params, batch, config, target)
    labels = take_slots(batch["tokens"], batch["anchors"], config.num_drafted, offset=1)
    on_blocks = functools.partial(_block_values, target={"head": output_head(target)})
    heads = {"correction": {"out": params["correction"]["out"]}}
    values = map_blocks(on_blocks, heads, slots, labels, chunk_size=config.chunk_blocks)
    return _terms(values, batch["base_weight"], _labelled(batch, config), config)


Values = dict[str, SlotValues]
"""The values of slots by logits, final and base."""


def _block_values(
    heads: Params, slots: Slots, labels: Tensor, target: Params
) -> tuple[Values, Values]:
    final, base = (slot_losses(each, labels) for each in logits(heads, slots, target))
    return {"final": final[0], "base": base[0]}, {"final": final[1], "base": base[1]}


def _terms(
    values: tuple[Values, Values], weight: Tensor, labelled: Tensor, config: Config
) -> tuple[LossTerms, Metrics]:
    losses, measures = values
    weight, gamma = weight[:, None, None], config.decay_gamma
    weighted = {
        "final": (1 - weight) * losses["final"]["ce"],
        "base": weight * losses["base"]["ce"],
    }
    terms = slot_terms(weighted, labelled, gamma)
    metrics = slot_metrics(losses["final"], measures["final"], labelled, gamma)
    base = slot_metrics(losses["base"], measures["base"], labelled, gamma)
    metrics |= {f"base_{name}": base[name] for name in ("accuracy", "accepted_length", "ce_loss")}
    spread = slot_terms({"weight": weight.expand_as(labelled)}, labelled, gamma)
    return terms, metrics | {"base_weight": LossTerms(spread.num["weight"], spread.den)}
