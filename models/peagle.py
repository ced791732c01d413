"""P-EAGLE: a drafter that guesses all depths at once, without waiting for its own tokens.

The guess of depth d with anchor A stands at position ``P = A + d`` and predicts the token at
``P + 2``. At depth 0 it reads what EAGLE-3 reads: hidden states of the target at P and the token at
``P + 1``. Deeper ones read a learned vector and the mask token. The target's final states of row
``P + 1`` teach it. Which guesses there are is sampled when a batch is built, see ``cod``.

Embedding and head are the drafter's own, the head over its own vocabulary.

Shapes: B rows, S tokens in a row, M guesses of a row, D depths, L captured layers of the target, H
width.

References:
    P-EAGLE, as trained in SpecForge (sgl-project/SpecForge).
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..pure.objective import TermMean, term_mean
from ..pure.terms import LossTerms, Metrics
from .chunking import map_chunks
from .cod import draw_depths, list_guesses
from .eagle_losses import (
    Values,
    distillation_losses,
    label_mask,
    require_batch,
    taught,
    teacher_logits,
    with_teacher,
)
from .peagle_config import Config
from .peagle_network import apply, init, logits

__all__ = ["Config", "apply", "den", "init", "logits", "loss_terms", "objective", "prepare"]

Params = Any
Batch = dict[str, Tensor]


def prepare(batch: Batch, config: Config) -> Batch:
    """Draw the guesses of a batch, on the host, when it is built.

    Args:
        batch: a dict with ``loss_mask`` ``[B, S]``, ``key`` ``[B, 2]``, one key a row, and, where
            rows are packed, ``documents`` ``[B, S]``; see ``cod.draw_depths``.
        config: the depths and how they are sampled.

    Returns:
        The batch with ``anchors``, ``depths`` int64 and ``keep`` bool, ``[B, M]``, M what its
        fullest row needs.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_depths=2)
        >>> batch = {"loss_mask": torch.ones(1, 5), "key": random.key(0)[None]}
        >>> prepare(batch, config)["depths"]  # of 3 labels that can be guessed one at depth 1
        tensor([[0, 0, 0, 0, 0, 1]])
    """
    documents = batch.get("documents")
    drawn = draw_depths(
        batch["key"],
        _guessable(label_mask(batch["loss_mask"]), documents),
        config.num_depths,
        ratio=config.down_sample_ratio,
        min_ratio=config.down_sample_ratio_min,
        documents=documents,
    )
    anchors, depths, keep = list_guesses(drawn)
    return {**batch, "anchors": anchors, "depths": depths, "keep": keep}


def _guessable(rows: Tensor, documents: Tensor | None) -> Tensor:
    """Positions P of which ``rows`` ``[B, S]`` holds at ``P + 1``, and P + 2 is in the document."""
    found = functional.pad(rows[:, 1:], (0, 1))
    if documents is None:
        return found
    later = functional.pad(documents, (0, 2), value=-1)[:, 2:]
    return found & (documents == later) & (documents >= 0)


def objective(config: Config) -> TermMean:
    """``kl / den``, for ``window_grad``."""
    return term_mean()


def den(batch: Batch, config: Config, target: Params) -> Tensor:
    """The den of ``loss_terms``, from masks, draws and the teacher's likeliest tokens alone.

    Args:
        batch: see ``loss_terms``.
        config: the drafter.
        target: the frozen head and draft vocabulary.

    Returns:
        A float64 scalar: the number of guesses that are taught.
    """
    batch = with_teacher(batch, config, target)
    return _at_guesses(taught(batch, config, target), batch).double().sum()


def _at_guesses(rows: Tensor, batch: Batch) -> Tensor:
    """``[B, M]``: the guesses that are taught by one of the ``rows`` ``[B, S]``."""
    guessable = _guessable(rows, batch.get("documents"))
    return guessable.gather(1, batch["anchors"] + batch["depths"]) & batch["keep"]


def loss_terms(
    params: Params, batch: Batch, config: Config, target: Params
) -> tuple[LossTerms, Metrics]:
    """The sum of ``kl`` over the guesses of all depths that are taught, and their number.

    See ``eagle_losses`` for the loss and what is taught. Logits exist for ``config.chunk_tokens``
    guesses at once, and are computed anew in the backward. It reads nothing on the host; a row in
    which nothing is taught adds exact zeros.

    Args:
        params: see ``init``.
        batch: from ``prepare``, with ``tokens`` ``[B, S]``, ``captured`` ``[B, S, L * H]`` and
            ``final`` ``[B, S, H]``: the input of the target's head, whose row t predicts token
            t + 1. What ``with_teacher`` adds is not computed anew.
        config: the drafter.
        target: the frozen ``head``, or ``embed`` where tied, and ``draft_ids`` where not all can be
            drafted.

    Returns:
        ``(terms, metrics)``: ``num`` a dict with ``kl``, ``den`` its scalar. Metrics: ``kl`` and
        ``acceptance`` over what is taught; ``accuracy`` over all labels, also those that cannot be
        drafted; ``accuracy_depth``, a vector ``[D]``.

    Raises:
        ValueError: fields are missing, or the target is another than the config's.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_depths=2)
        >>> row = {"tokens": torch.tensor([[3, 1, 4, 1, 5]]), "loss_mask": torch.ones(1, 5)}
        >>> states = {"captured": torch.ones(1, 5, 24), "final": torch.ones(1, 5, 8)}
        >>> batch = prepare(row | states | {"key": random.key(0)[None]}, config)
        >>> params = init(config, random.key(1)) | {"head": torch.zeros(9, 8)}
        >>> terms, metrics = loss_terms(params, batch, config, {"embed": torch.zeros(9, 8)})
        >>> terms.num["kl"], terms.den  # ln 9 each: tokens 2, 3 and 4, and one of them again
        (tensor(8.7889, dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    fields = ["tokens", "loss_mask", "captured", "final", "anchors", "depths", "keep"]
    require_batch("peagle.loss_terms", batch, fields, config, target)
    batch = with_teacher(batch, config, target)
    losses, measures = _values(params, batch, config, target)
    learned = _at_guesses(taught(batch, config, target), batch)
    labelled = _at_guesses(label_mask(batch["loss_mask"]), batch)
    terms = LossTerms({"kl": _total(losses["kl"], learned)}, learned.double().sum())
    return terms, _metrics(losses["kl"].detach(), measures, learned, labelled, batch, config)


def _values(params: Params, batch: Batch, config: Config, target: Params) -> tuple[Values, Values]:
    """Values ``[B, M]``, the logits of a few guesses at a time."""
    states = apply(params, batch, config)
    last = batch["tokens"].shape[1] - 1
    rows = (batch["anchors"] + batch["depths"] + 1).clamp(max=last)
    # The final states are as wide as the drafter's, unlike the logits: they may be copied.
    constants = {
        "final": batch["final"].gather(1, rows[..., None].expand(-1, -1, batch["final"].shape[-1])),
        "token": batch["teacher_token"].gather(1, rows),
        "logsumexp": batch["teacher_logsumexp"].gather(1, rows),
    }
    on_guesses = functools.partial(_guess_values, target=target)
    items, constants = states.flatten(0, 1), {k: x.flatten(0, 1) for k, x in constants.items()}
    head, size = {"head": params["head"]}, config.chunk_tokens
    values = map_chunks(on_guesses, head, items, constants, chunk_size=size)
    leading = states.shape[:2]
    losses, measures = ({k: v.unflatten(0, leading) for k, v in each.items()} for each in values)
    return losses, measures


def _guess_values(
    params: Params, states: Tensor, fields: Batch, target: Params
) -> tuple[Values, Values]:
    losses, measures = distillation_losses(
        logits(params, states),
        teacher_logits(fields["final"], target),
        fields["token"],
        fields["logsumexp"],
        target.get("draft_ids"),
    )
    return {"kl": losses["kl"]}, measures


def _total(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0).double().sum()


def _metrics(
    kl: Tensor, measures: Values, learned: Tensor, labelled: Tensor, batch: Batch, config: Config
) -> Metrics:
    num_learned, num_labelled = learned.double().sum(), labelled.double().sum()
    depths = torch.arange(config.num_depths, device=learned.device)
    by_depth = (batch["depths"][..., None] == depths) & labelled[..., None]
    correct = measures["correct"].double()
    return {
        "accuracy": LossTerms(_total(correct, labelled), num_labelled),
        "accuracy_depth": LossTerms(
            (by_depth * correct[..., None]).sum((0, 1)), by_depth.double().sum((0, 1))
        ),
        "acceptance": LossTerms(_total(measures["acceptance"], learned), num_learned),
        "kl": LossTerms(_total(kl, learned), num_learned),
    }
