"""DFlash: a drafter that fills a block of tokens in parallel, trained by CE or by D-PACE.

The slot at position ``a + k`` of the block at anchor a predicts the token of its own position.
Slot 0 holds the anchor's token, which is known, and is not scored: a block of Q slots drafts
``D = Q - 1`` tokens. Labels behind an unsupervised one still count.

D-PACE weights each slot by its ``credit``, the probability of the labels taken for that of being
accepted, and averages over rows or blocks in place of slots.

Shapes: B rows, S tokens in a row, N blocks in a row, Q slots in a block, D drafted tokens, H width,
K captured layers of the target, V vocabulary.

References:
    DFlash and D-PACE as trained in SpecForge (sgl-project/SpecForge).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pure.objective import TermMean, term_mean
from ..pure.terms import LossTerms, Metrics
from . import backbone, block_drafter
from .anchors import labelled_slots, slot_weights, take_slots
from .backbone import require
from .block_drafter import hidden_states, map_blocks, output_head, prepare, require_fields
from .block_losses import SlotValues, slot_losses, slot_means, slot_metrics, slot_terms
from .credit import AVERAGES, CREDITS, Average, Credit, block_average, credit
from .layers import linear

__all__ = [
    "Config",
    "apply",
    "den",
    "init",
    "logits",
    "loss_terms",
    "objective",
    "prepare",
]

Params = Any
Batch = dict[str, Tensor]

init = backbone.init


@dataclass(frozen=True, kw_only=True)
class Config(block_drafter.Config):
    """A DFlash drafter and what it is trained on; see ``block_drafter.Config`` for the rest.

    Attributes:
        block_size: Q, the slots of a block, at least 2; ``Q - 1`` tokens are drafted at once.
        dpace: trains by D-PACE with this kind of ``credit``; None: by CE with decaying weights.
        dpace_alpha: the share of credit that does not depend on the draft, from 0 to 1.
        dpace_average: what D-PACE averages over, see ``credit.block_average``.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    dpace: Credit | None = None
    dpace_alpha: float = 0.5
    dpace_average: Average = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "block_size", self.block_size >= 2, "at least 2, slot 0 is the anchor")
        known = self.dpace is None or self.dpace in CREDITS
        require(self, "dpace", known, f"one of {CREDITS} or None")
        require(self, "dpace_alpha", 0 <= self.dpace_alpha <= 1, "from 0 to 1")
        require(self, "dpace_average", self.dpace_average in AVERAGES, f"one of {AVERAGES}")
        decays = self.decay_gamma is None or self.dpace is None
        require(self, "decay_gamma", decays, "None with dpace, which has weights of its own")

    @property
    def num_drafted(self) -> int:
        """D, the tokens that are drafted at once."""
        return self.block_size - 1


def apply(params: Params, batch: Batch, config: Config, target: Params) -> Tensor:
    """Hidden states of the slots that are scored.

    Args:
        params: see ``backbone.init``.
        batch: see ``block_drafter.hidden_states``.
        config: the drafter.
        target: the frozen embedding.

    Returns:
        ``[B, N, D, H]``; the i-th slot of block n predicts the token at ``anchors[n] + 1 + i``.
    """
    # Contiguous, so that the head is one product and not one for each block.
    return hidden_states(params, batch, config, target)[..., 1:, :].contiguous()


def logits(hidden: Tensor, target: Params) -> Tensor:
    """``[..., V]``, of hidden states ``[..., H]`` by the target's head."""
    return linear(hidden, output_head(target))


def objective(config: Config) -> TermMean:
    """``ce / den``, for ``window_grad``."""
    return term_mean()


def _labelled(batch: Batch, config: Config) -> Tensor:
    anchors, keep = batch["anchors"], batch["keep"]
    return labelled_slots(batch["loss_mask"], anchors, keep, config.num_drafted)


def den(batch: Batch, config: Config) -> Tensor:
    """The den of ``loss_terms``, from masks and anchors alone.

    Args:
        batch: from ``prepare``.
        config: the drafter.

    Returns:
        A float64 scalar: the sum of weights, or the number of rows or blocks for D-PACE.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> batch = {"loss_mask": torch.ones(1, 4), "key": random.key(0)[None]}
        >>> den(prepare(batch, config), config)  # 3 + 2 + 1 labels behind anchors 0, 1 and 2
        tensor(6., dtype=torch.float64)
    """
    labelled = _labelled(batch, config)
    if config.dpace is not None:
        return block_average(labelled, labelled, config.dpace_average).den
    return slot_weights(labelled, config.decay_gamma).sum()


def loss_terms(
    params: Params, batch: Batch, config: Config, target: Params
) -> tuple[LossTerms, Metrics]:
    """The weighted sum of cross-entropies of the labelled slots, and the metrics of all slots.

    ::

        CE:      sum e_k exp(-(k - 1) / gamma) ce_k  over  sum e_k exp(-(k - 1) / gamma)
        D-PACE:  sum credit_k ce_k                   over  rows, or blocks

    with k from 1 and e_k whether slot k has a supervised label. Bind the rest for ``window_grad``:
    ``functools.partial(loss_terms, config=..., target=...)``. Logits exist for
    ``config.chunk_blocks`` blocks at once and are computed anew in the backward. It reads nothing
    on the host; a batch without an anchor gives exact zeros.

    Args:
        params: see ``backbone.init``.
        batch: from ``prepare``: what ``apply`` reads, and ``loss_mask`` ``[B, S]``.
        config: the drafter.
        target: the frozen embedding and head.

    Returns:
        ``(terms, metrics)``: ``num`` a dict of the sum ``ce``, ``den`` a scalar.

    Raises:
        ValueError: the batch lacks fields; the message names them.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> row = {"tokens": torch.tensor([[3, 1, 4, 1]]), "loss_mask": torch.ones(1, 4)}
        >>> row |= {"captured": torch.ones(1, 4, 24), "key": random.key(0)[None]}
        >>> params, target = init(config, random.key(1)), {"embed": torch.zeros(9, 8)}
        >>> terms, metrics = loss_terms(params, prepare(row, config), config, target)
        >>> terms.num["ce"], terms.den  # six labels behind three anchors, ln 9 each
        (tensor(13.1833, dtype=torch.float64), tensor(6., dtype=torch.float64))
    """
    needed = ["tokens", "loss_mask", "captured", "anchors", "keep"]
    require_fields("dflash.loss_terms", batch, needed)
    hidden = apply(params, batch, config, target)
    labels = take_slots(batch["tokens"], batch["anchors"], config.num_drafted, offset=1)
    on_blocks = functools.partial(_block_values, target={"head": output_head(target)})
    losses, measures = map_blocks(on_blocks, (), hidden, labels, chunk_size=config.chunk_blocks)
    return _terms(losses, measures, _labelled(batch, config), config)


def _block_values(
    params: tuple[()], hidden: Tensor, labels: Tensor, target: Params
) -> tuple[SlotValues, SlotValues]:
    return slot_losses(logits(hidden, target), labels)


def _terms(
    losses: SlotValues, measures: SlotValues, labelled: Tensor, config: Config
) -> tuple[LossTerms, Metrics]:
    metrics = slot_metrics(losses, measures, labelled, config.decay_gamma)
    if config.dpace is None:
        return slot_terms(losses, labelled, config.decay_gamma), metrics
    probs = torch.exp(-losses["ce"])
    worth = credit(probs, labelled, config.dpace_alpha, config.dpace)
    terms = block_average(worth * losses["ce"], labelled, config.dpace_average)
    metrics["credit_position"] = slot_means(worth, labelled)
    return LossTerms({"ce": terms.num}, terms.den), metrics
