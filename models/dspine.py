"""DSpine: a block drafter in which each slot learns from the one before it, in every layer.

The network is that of ``backbone``, causal inside a block. After each layer an ``injection`` tells
a slot about its predecessor, through the ``transfer_space`` of tokens and hidden states. From the
last layer's states before injection, ``refine`` makes those that know the token before: they choose
among the k likeliest tokens of a slot.

Slot 0 of the block at anchor a holds its token; slots 1 to Q - 1 hold the mask token, and slot i
predicts token ``a + i``. Values of drafted slots have Q - 1 entries, that of slot i at i - 1.

Besides embedding and head (see ``block_drafter``) the frozen ``target`` has ``codes`` ``[V, r]``,
those of its transfer space, in their own dtype.

Shapes: B rows, S tokens in a row, N blocks in a row, Q slots in a block, H width, K captured layers
of the target, L layers, V vocabulary, r rank of the transfer space.

References:
    DSpine as trained in SpecForge (sgl-project/SpecForge).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..pure import random
from ..pure.terms import LossTerms, Metrics, divide
from . import block_drafter, injection
from .anchors import slot_weights, supervised_slots, take_slots
from .block_drafter import map_blocks, output_head, require_fields
from .block_losses import (
    SlotValues,
    accepted_length,
    slot_losses,
    slot_metrics,
    slot_terms,
)
from .dspine_candidates import candidates, refinement, scores
from .dspine_config import Config, Schedule, schedule
from .dspine_network import States, apply, init, refine
from .layers import embed, linear

__all__ = [
    "Config",
    "Objective",
    "Schedule",
    "States",
    "apply",
    "den",
    "init",
    "loss_terms",
    "objective",
    "prepare",
    "refine",
    "schedule",
]

Params = Any
Batch = dict[str, Tensor]

# Folded into a row's key for the draw of replaced blocks; the draws of anchors count from 0.
_REPLACED = -1


def prepare(batch: Batch, config: Config, *, replacement: float = 0.0) -> Batch:
    """Draw the anchors of a batch and the blocks that are replaced, on the host, when it is built.

    A block's draw depends on the key of its row and its anchor alone.

    Args:
        batch: a dict with ``loss_mask`` ``[B, S]`` and ``key`` ``[B, 2]``, one key a row.
        config: the drafter.
        replacement: the probability that a block is replaced, see ``schedule``; 0 in evaluation.

    Returns:
        The batch with ``anchors`` ``[B, N]``, ``keep`` ``[B, N]`` and ``replaced`` ``[B, N]`` bool.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3,
        ...                 transfer_rank=4, top_k=3)
        >>> batch = {"loss_mask": torch.tensor([[0, 1, 1, 1]]), "key": random.key(0)[None]}
        >>> prepare(batch, config, replacement=1.0)["replaced"]
        tensor([[True, True]])
    """
    batch = block_drafter.prepare(batch, config)
    key = random.fold_in(batch["key"], _REPLACED)
    drawn = random.bernoulli(key, batch["loss_mask"].shape[1:], p=replacement)
    return batch | {"replaced": drawn.gather(1, batch["anchors"]) & batch["keep"]}


def den(batch: Batch, config: Config) -> Tensor:
    """The den of ``loss_terms``, a float64 scalar, from masks and anchors alone.

    Args:
        batch: from ``prepare``.
        config: the drafter.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3,
        ...                 transfer_rank=4, top_k=3)
        >>> batch = {"loss_mask": torch.tensor([[0, 1, 1, 1]]), "key": random.key(0)[None]}
        >>> den(prepare(batch, config), config)  # (1 + exp(-1/7)) + 1
        tensor(2.8669, dtype=torch.float64)
    """
    return slot_weights(_supervised(batch, config), config.decay_gamma).sum()


def _supervised(batch: Batch, config: Config) -> Tensor:
    anchors, keep = batch["anchors"], batch["keep"]
    return supervised_slots(batch["loss_mask"], anchors, keep, config.num_drafted)


@dataclass(frozen=True)
class Objective:
    """The loss of total terms; see ``objective``.

    Attributes:
        ce_weight: c.
        alignment: the weight of alignment.
    """

    ce_weight: float
    alignment: float

    def __call__(self, terms: LossTerms) -> Tensor:
        """The loss, a scalar."""
        mean = divide(terms)
        fit = self.ce_weight * (mean["ce"] + mean["refined_ce"])
        fit = fit + (1 - self.ce_weight) * (mean["l1"] + mean["refined_l1"])
        return fit + self.alignment * mean["ce"].detach() * mean["alignment"]


def objective(config: Config, *, alignment: float | None = None) -> Objective:
    """``(c (CE + RCE) + (1 - c) (L1 + RL1) + alignment * sg(CE / D) * A) / D`` of the totals.

    The scale of alignment is the mean cross-entropy of the whole window and all ranks, without a
    gradient. No micro-step knows it: ``window_grad`` takes two gradient buffers for it
    (``columns``) or two passes (``replay``), and one buffer where ``alignment`` is 0.

    Args:
        config: the drafter.
        alignment: the weight at this step, see ``schedule``; None: the full weight of the config.

    Examples:
        >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
        >>> nums = {"ce": two, "l1": one, "refined_ce": one, "refined_l1": one, "alignment": two}
        >>> Objective(ce_weight=0.5, alignment=0.5)(LossTerms(nums, den=two))
        tensor(1.7500)
    """
    weight = config.alignment_weight if alignment is None else alignment
    return Objective(config.ce_weight, weight)


def loss_terms(
    params: Params, batch: Batch, config: Config, target: Params
) -> tuple[LossTerms, Metrics]:
    """Weighted sums over the supervised slots, and metrics.

    ``ce`` and ``l1`` of the draft as in ``slot_losses``, ``refined_ce`` and ``refined_l1`` as in
    ``refinement``, and ``alignment``: one minus the cosine of a slot's feature and its label's
    code, summed over the layers. Bind the rest for ``window_grad``:
    ``functools.partial(loss_terms, config=..., target=...)``.

    Logits exist for ``config.chunk_blocks`` blocks at once and are computed anew in the backward.
    It reads nothing on the host; a batch without an anchor gives exact zeros.

    Args:
        params: see ``init``.
        batch: from ``prepare``: what ``apply`` reads, ``loss_mask`` ``[B, S]`` and ``final``
            ``[B, S, H]``: the input of the target's head, whose row t predicts token t + 1.
        config: the drafter.
        target: the frozen embedding, head and codes.

    Returns:
        ``(terms, metrics)``: ``num`` a dict of sums by name, ``den`` the one sum of weights. Beside
        ``slot_metrics``, over the sum of weights ``refinement_loss`` and ``alignment_loss``, over
        the number of slots ``candidate_coverage``, and ``refined_accepted_length``.

    Raises:
        ValueError: the batch or the target lacks fields; the message names them.
    """
    fields = ("tokens", "loss_mask", "captured", "final", "anchors", "keep")
    require_fields("dspine.loss_terms", batch, fields)
    _require_codes(target)
    states = apply(params, batch, config, target)
    losses, measures = _slot_values(params, states, batch, config, target)
    labels = take_slots(batch["tokens"], batch["anchors"], config.num_drafted, offset=1)
    losses["alignment"] = _misalignment(states.features, embed(labels, target["codes"].detach()))
    supervised = _supervised(batch, config)
    terms = slot_terms(losses, supervised, config.decay_gamma)
    return terms, _metrics(terms, losses, measures, supervised, config)


def _require_codes(target: Params) -> None:
    if "codes" not in target:
        raise ValueError(
            "dspine.loss_terms: target must have codes, the tokens' places in the transfer space, "
            f"got {sorted(target)}. Add those of transfer_space(head, config.transfer_rank)."
        )


def _misalignment(features: tuple[Tensor, ...], codes: Tensor) -> Tensor:
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in features]
    return torch.stack([1 - cosine_similarity(each, codes, dim=-1) for each in wide]).sum(0)


def _slot_values(
    params: Params, states: States, batch: Batch, config: Config, target: Params
) -> tuple[SlotValues, SlotValues]:
    """Losses and measures of ``[B, N, Q - 1]`` slots, the logits of a few blocks at a time."""
    anchors, size = batch["anchors"], config.num_drafted
    fields = {
        "labels": take_slots(batch["tokens"], anchors, size, offset=1),
        "previous": take_slots(batch["tokens"], anchors, size),
        "teacher": take_slots(batch["final"], anchors, size),
    }
    shared = params["injection"]
    names = ("message", "receiver", "predecessor", "bias")
    last = {name: shared["layers"][-1][name] for name in ("readout", "write")}
    heads = {"injection": {name: shared[name] for name in names} | {"layers": [last]}}
    heads["norm"] = params["norm"]
    frozen = {"head": output_head(target), "codes": target["codes"]}
    on_blocks = functools.partial(_block_values, config=config, target=frozen)
    slots = (states.hidden, states.before)
    return map_blocks(on_blocks, heads, slots, fields, chunk_size=config.chunk_blocks)


def _block_values(
    heads: Params, slots: tuple[Tensor, Tensor], fields: Batch, config: Config, target: Params
) -> tuple[SlotValues, SlotValues]:
    hidden, before = slots
    draft, teacher = (linear(each, target["head"]) for each in (hidden, fields["teacher"]))
    losses, measures = slot_losses(draft, fields["labels"], teacher)
    chosen = candidates(draft, config.top_k)
    previous = injection.token_features(target["codes"], fields["previous"], before.dtype)
    refined = scores(refine(heads, before, previous, config), chosen, target["head"])
    found = refinement(refined, chosen, fields["labels"], teacher, config.candidate_mass_threshold)
    losses |= {"refined_ce": found.ce, "refined_l1": found.l1}
    return losses, measures | {"covered": found.covered, "refined_correct": found.correct}


def _metrics(
    terms: LossTerms,
    losses: SlotValues,
    measures: SlotValues,
    supervised: Tensor,
    config: Config,
) -> Metrics:
    metrics = slot_metrics(losses, measures, supervised, config.decay_gamma)
    sums = {name: num.detach() for name, num in terms.num.items()}
    c = config.ce_weight
    refined = c * sums["refined_ce"] + (1 - c) * sums["refined_l1"]
    covered = (measures["covered"] & supervised).double().sum()
    return metrics | {
        "alignment_loss": LossTerms(sums["alignment"], terms.den),
        "candidate_coverage": LossTerms(covered, supervised.double().sum()),
        "refined_accepted_length": accepted_length(measures["refined_correct"], supervised),
        "refinement_loss": LossTerms(refined, terms.den),
    }
