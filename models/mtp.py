"""Multi-token prediction: a layer behind the target that predicts the tokens after the next.

Step j at position t reads token ``t + 1 + j`` and what the step before said of t, the target's
final state for step 0, and predicts token ``t + 2 + j``. Gradients flow through all steps. Each
step's loss is a mean of its own: later steps have fewer labels.

Embedding and output head are those of the frozen ``target``: a dict with ``embed`` ``[V, H]`` and,
unless the two are tied, ``head`` ``[V, H]``.

Rows may be packed: with ``sample_ids``, neighbouring tokens with one id are a sample, and labels,
inputs and attention stay inside it.

Shapes: B rows, S tokens in a row, K steps, H width, V vocabulary.

References:
    DeepSeek-V3 Technical Report, 2024, section 2.2; Cai et al., FastMTP, 2025; both as trained in
    SpecForge (sgl-project/SpecForge).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..pure.objective import TermMean, term_mean
from ..pure.terms import LossTerms, Metrics
from .block_drafter import output_head, require_fields
from .block_losses import SlotValues, accepted_length, slot_losses, slot_means
from .chunking import map_chunks
from .layers import embed, linear
from .mtp_config import ChainContext, Config
from .mtp_layer import Chain, advance, init

__all__ = [
    "ChainContext",
    "Config",
    "apply",
    "den",
    "init",
    "labels",
    "loss_terms",
    "objective",
    "prepare",
]

Params = Any
Batch = dict[str, Tensor]


def prepare(batch: Batch, config: Config) -> Batch:
    """List the predictions that are supervised, on the host, when a batch is built.

    The head then runs on those alone.

    Args:
        batch: see ``labels``.
        config: the head.

    Returns:
        The batch with ``predictions`` int64 ``[P]``, flat indices ``(b S + t) K + j``.

    Examples:
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4, num_steps=2)
        >>> batch = {"tokens": torch.arange(4)[None], "loss_mask": torch.ones(1, 4)}
        >>> prepare(batch, config)["predictions"]
        tensor([0, 1, 2])
    """
    _, supervised = labels(batch, config)
    return batch | {"predictions": supervised.flatten().nonzero().squeeze(-1)}


def labels(batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """The token that each step predicts, and whether it counts.

    A prediction counts where its label lies in the row and in the sample, and is supervised.

    Args:
        batch: a dict with ``tokens`` ``[B, S]`` int64, ``loss_mask`` ``[B, S]``, which exceeds 0.5
            where a token is a label, and, for packed rows, ``sample_ids`` ``[B, S]`` int64.
        config: the head.

    Returns:
        ``(labels, supervised)``: ``[B, S, K]`` int64, 0 beyond the row, and ``[B, S, K]`` bool.

    Examples:
        >>> config = Config(vocab_size=99, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4, num_steps=3)
        >>> tokens = torch.arange(10, 15)[None]
        >>> found, supervised = labels({"tokens": tokens, "loss_mask": tokens > 0}, config)
        >>> found[0, :, 2], supervised[0, :, 2].int()  # of the third step
        (tensor([14,  0,  0,  0,  0]), tensor([1, 0, 0, 0, 0], dtype=torch.int32))
    """
    mask, samples = batch["loss_mask"] > 0.5, _samples(batch)
    tokens, supervised = [], []
    for step in range(config.num_steps):
        tokens.append(_ahead(batch["tokens"], step + 2))
        same = _ahead(samples, step + 2) == samples
        supervised.append(_ahead(mask, step + 2) & same)
    return torch.stack(tokens, -1), torch.stack(supervised, -1)


def _ahead(values: Tensor, distance: int) -> Tensor:
    """What stands ``distance`` places ahead in a row; 0 or False beyond its end."""
    return functional.pad(values[:, distance:], (0, min(distance, values.shape[1])))


def _samples(batch: Batch) -> Tensor:
    """The number of each token's sample in its row: neighbours with one id are a sample."""
    ids = batch.get("sample_ids")
    if ids is None:
        return torch.zeros_like(batch["tokens"])
    changes = (ids[:, 1:] != ids[:, :-1]).long()
    return functional.pad(changes, (min(1, ids.shape[1]), 0)).cumsum(1)


def apply(params: Params, batch: Batch, config: Config, target: Params) -> Tensor:
    """What each step says of each position; its products with the head are logits.

    Args:
        params: see ``init``.
        batch: a dict with ``tokens`` ``[B, S]`` int64, ``final`` ``[B, S, H]``, the input of the
            target's head, and, for packed rows, ``sample_ids`` ``[B, S]`` int64.
        config: the head.
        target: the frozen embedding.

    Returns:
        ``[B, S, K, H]``.
    """
    tokens, chain, outputs = batch["tokens"], Chain(batch["final"]), []
    table = target["embed"].detach()
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    for step in range(config.num_steps):
        embedded = embed(_ahead(tokens, step + 1), table)
        sees = _sees(batch, step, config)
        chain = advance(params, chain, embedded, positions + step + 1, config, **sees)
        outputs.append(chain.hidden)
    return torch.stack(outputs, 2)


def _sees(batch: Batch, step: int, config: Config) -> dict[str, Any]:
    """Which keys each position sees, as arguments of ``advance``."""
    size, device = batch["tokens"].shape[1], batch["tokens"].device
    mask = None
    if "sample_ids" in batch:
        samples = _samples(batch)
        mask = samples[:, :, None] == samples[:, None, :]
    if step == 0 or config.chain_context == "sequence":
        return {"mask": mask, "causal": True}
    before = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    before = before if mask is None else before & mask
    own = torch.eye(size, dtype=torch.bool, device=device).repeat(1, step)
    return {"mask": torch.cat([before, own.expand(*before.shape[:-1], -1)], -1)}


def den(batch: Batch, config: Config) -> dict[str, Tensor]:
    """The dens of ``loss_terms``: how many predictions of each step count.

    Args:
        batch: see ``labels``.
        config: the head.

    Examples:
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4, num_steps=2)
        >>> den({"tokens": torch.arange(4)[None], "loss_mask": torch.ones(1, 4)}, config)
        {'step_0': tensor(2., dtype=torch.float64), 'step_1': tensor(1., dtype=torch.float64)}
    """
    return _by_step(labels(batch, config)[1].double(), config)


def _by_step(values: Tensor, config: Config) -> dict[str, Tensor]:
    # No views of one tensor: FSDP2 warns of outputs that are.
    return {name: values[..., step].sum() for step, name in enumerate(config.weights)}


def objective(config: Config) -> TermMean:
    """``sum_j weight_j num_j / den_j`` of the totals, for ``window_grad``.

    Each step has a den, so give ``window_grad`` ``den_fn=functools.partial(den, config=config)``
    and it takes one backward a micro-step, however many steps there are. Steps that no row of a
    window is long enough for are empty; ``on_empty="zero"`` leaves them out.
    """
    return term_mean(config.weights)


def loss_terms(
    params: Params, batch: Batch, config: Config, target: Params
) -> tuple[LossTerms, Metrics]:
    """For each step the sum of cross-entropies and the number of predictions that count.

    Bind the rest for ``window_grad``: ``functools.partial(loss_terms, config=..., target=...)``.
    Logits exist for ``config.chunk_size`` predictions at once and are computed anew in the
    backward. It reads nothing on the host; a batch without labels gives exact zeros.

    Args:
        params: see ``init``.
        batch: what ``apply`` and ``labels`` read, and ``predictions``, if ``prepare`` has listed
            them.
        config: the head.
        target: the frozen embedding and head.

    Returns:
        ``(terms, metrics)``: ``num`` and ``den`` dicts by step, ``step_0`` and so on. Metrics are
        ``accuracy`` of the first step, ``accuracy_step`` and ``ce_step``, vectors ``[K]``, and
        ``accepted_length``, the tokens that a draft of K would yield.

    Raises:
        ValueError: the batch lacks fields; the message names them.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4)
        >>> batch = {"tokens": torch.tensor([[3, 1, 4, 1]]), "loss_mask": torch.ones(1, 4)}
        >>> batch["final"] = torch.ones(1, 4, 8)
        >>> terms, _ = loss_terms(init(config, random.key(0)), batch, config,
        ...                       {"embed": torch.zeros(9, 8)})
        >>> terms.num["step_0"], terms.den["step_0"]  # two labels, ln 9 each
        (tensor(4.3944, dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    require_fields("mtp.loss_terms", batch, ("tokens", "loss_mask", "final"))
    predicted, supervised = labels(batch, config)
    hidden = apply(params, batch, config, target)
    values = _values(hidden, predicted, batch.get("predictions"), config, output_head(target))
    losses = torch.where(supervised, values["ce"], 0).double()
    terms = LossTerms(_by_step(losses, config), _by_step(supervised.double(), config))
    accuracy = slot_means(values["correct"].double(), supervised)
    return terms, {
        "accepted_length": accepted_length(values["correct"], supervised),
        "accuracy": LossTerms(accuracy.num[0].clone(), accuracy.den[0].clone()),
        "accuracy_step": accuracy,
        "ce_step": slot_means(losses.detach(), supervised),
    }


def _values(
    hidden: Tensor, predicted: Tensor, listed: Tensor | None, config: Config, head: Tensor
) -> SlotValues:
    """``ce`` and ``correct`` ``[B, S, K]``, the logits of a few predictions at a time."""
    shape = predicted.shape
    rows, predicted = hidden.flatten(0, 2), predicted.flatten()
    if listed is not None:
        rows, predicted = rows.index_select(0, listed), predicted.index_select(0, listed)
    losses, measures = map_chunks(
        partial(_row_values, head=head), (), rows, predicted, chunk_size=config.chunk_size
    )
    values = {"ce": losses["ce"], "correct": measures["correct"]}
    if listed is not None:
        values = {
            name: value.new_zeros(shape.numel()).index_copy(0, listed, value)
            for name, value in values.items()
        }
    return {name: value.unflatten(0, shape) for name, value in values.items()}


def _row_values(
    _: Params, hidden: Tensor, predicted: Tensor, head: Tensor
) -> tuple[SlotValues, SlotValues]:
    return slot_losses(linear(hidden, head), predicted)
