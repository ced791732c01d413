"""EAGLE-3: a drafter of one layer, trained as it is used, on its own states of the steps before.

At position s it reads hidden states of the target at s and the token at ``s + 1``, and predicts
the token at ``s + 2``. Step k reads its own state of step ``k - 1`` and the token at ``s + 1 + k``.
The states of all steps are aligned by what they predict: with row t of the target's final states
as its teacher, step k stands at ``s = t - 1 - k`` and predicts the token at ``t + 1``.

The embedding is the target's, frozen; the head is the drafter's own, over its own vocabulary. A
token counts where ``loss_mask`` says that it is a label. SpecForge reads the mask two tokens
earlier, at s: for its numbers shift the mask.

Shapes: B rows, S tokens in a row, K steps, L captured layers of the target, H width.

References:
    Li et al., EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
    Test, 2025; as trained in SpecForge (sgl-project/SpecForge).
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..pure.objective import Objective, term_mean
from ..pure.terms import LossTerms, Metrics, divide
from .block_losses import accepted_length, slot_means
from .chunking import map_chunks
from .eagle3_config import Config
from .eagle_layer import add_attention, drafter_shapes, heads, join, read_context, tables
from .eagle_losses import (
    Values,
    distillation_losses,
    label_mask,
    require_batch,
    taught,
    teacher_logits,
    with_teacher,
)
from .layers import embed, init_like, linear, rms_norm
from .module import call
from .unrolled_attention import unrolled_attention

__all__ = ["Config", "apply", "den", "init", "logits", "loss_terms", "objective", "unroll"]

Params = Any
Batch = dict[str, Tensor]


def init(
    config: Config, key: Tensor, *, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Params:
    """Params with normal weights of deviation ``std`` and norms of 1, on the device of ``key``.

    Args:
        config: the drafter.
        key: int64 ``[2]``, from ``random.key``.
        std: the standard deviation.
        dtype: of all params.

    Returns:
        ``context``, which reads the target's hidden states; ``layers``, of which there is one;
        ``norm``; ``head``.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, draft_vocab_size=4, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4)
        >>> init(config, random.key(0))["head"].shape
        torch.Size([4, 8])
    """
    return init_like(key, drafter_shapes(config, 1), std=std, dtype=dtype)


def apply(params: Params, batch: Batch, config: Config, target: Params) -> Tensor:
    """The states that the head reads, aligned by the row of the target that teaches them.

    Args:
        params: see ``init``.
        batch: a dict with ``tokens`` ``[B, S]`` int64 and ``captured`` ``[B, S, L * H]``.
        config: the drafter.
        target: the frozen embedding.

    Returns:
        ``[B, S, K, H]``; at ``[t, k]`` the state that predicts token ``t + 1`` from the target's
        states up to ``t - 1 - k``; zeros where that is before the row.
    """
    embedded = embed(batch["tokens"], target["embed"].detach())
    inputs = [_shifted(embedded, -1 - step) for step in range(config.num_steps)]
    states = unroll(params, batch["captured"], lambda step, _: inputs[step], config)
    return torch.stack([_shifted(state, 1 + step) for step, state in enumerate(states)], 2)


def _shifted(values: Tensor, by: int) -> Tensor:
    """``[B, S, ...]`` moved right along the row, left where negative, and zeros behind it."""
    by = max(-values.shape[1], min(by, values.shape[1]))
    moved = functional.pad(values.transpose(1, -1), (by, -by))
    return moved.transpose(1, -1)


def unroll(params: Params, captured: Tensor, embedded_fn: Any, config: Config) -> list[Tensor]:
    """The drafter run K times, each step on the state of the one before.

    Args:
        params: see ``init``.
        captured: ``[B, S, L * H]``.
        embedded_fn: ``(step, state) -> [B, S, H]``, the embedded tokens that a step reads, given
            the normed state of the step before (None at the first).
        config: the drafter.

    Returns:
        The normed states of each step, ``[B, S, H]``, at the positions of ``captured``.
    """
    hidden = read_context(params["context"], captured, config)
    positions = torch.arange(captured.shape[1], device=captured.device)
    normed, states, past = None, [], []
    for step in range(config.num_steps):
        embedded = embedded_fn(step, normed)
        angles = tables(positions + step, hidden, config)
        hidden, pair = call(_layer, params["layers"][0], embedded, hidden, angles, past, config)
        past = [*past, pair]
        normed = rms_norm(hidden, params["norm"], config.norm_eps)
        states.append(normed)
        hidden = normed if config.normed_steps else hidden
    return states


def _layer(
    layer: Params,
    embedded: Tensor,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    past: list[tuple[Tensor, Tensor]],
    config: Config,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    q, k, v = heads(layer["attn"], join(layer, embedded, hidden, config), angles, config)
    pair = k, v.clone()  # FSDP2 warns of views that leave a block
    text, *steps = [*past, pair]
    attended = unrolled_attention(q, text, steps, chunk_size=config.chunk_queries)
    return add_attention(layer, hidden, attended, config), pair


def logits(params: Params, states: Tensor) -> Tensor:
    """Logits ``[..., D]`` of the draft vocabulary, of states ``[..., H]``."""
    return linear(states, params["head"])


def objective(config: Config) -> Objective:
    """``sum_k step_decay^k loss_k / den_k``, for ``window_grad``.

    With several dens give ``window_grad`` ``den_fn=functools.partial(den, config=config,
    target=target)`` and it takes one backward a micro-step. "lk_lambda" has no such dens, since the
    weight of its parts is known when the window ends: take ``plan="replay"``.
    """
    if config.loss == "lk_lambda":
        return functools.partial(_mixed, config=config)
    return term_mean(
        {f"{config.terms[0]}_{k}": weight for k, weight in enumerate(config.step_weights)}
    )


def _mixed(terms: LossTerms, config: Config) -> Tensor:
    means, losses = divide(terms), []
    for step, weight in enumerate(config.step_weights):
        kl, rejection = means[f"kl_{step}"], means[f"rejection_{step}"]
        share = config.kl_scale * torch.exp(-config.kl_decay * (1 - rejection.detach()))
        losses.append(weight * (share * kl + (1 - share) * rejection))
    return torch.stack(losses).sum()


def den(batch: Batch, config: Config, target: Params) -> Tensor | dict[str, Tensor]:
    """The den of ``loss_terms``, from masks and the teacher's likeliest tokens alone.

    Args:
        batch: see ``loss_terms``.
        config: the drafter.
        target: the frozen head and draft vocabulary.

    Returns:
        Float64 scalars by the names of the nums; with ``average="token"`` one for all.
    """
    batch = with_teacher(batch, config, target)
    return _dens(_by_step(taught(batch, config, target), config), config)


def _by_step(where: Tensor, config: Config) -> Tensor:
    """``[B, S, K]``: where each step is, of what ``where`` lets through; it begins in the row."""
    rows = torch.arange(where.shape[1], device=where.device)[:, None]
    return where[..., None] & (rows > torch.arange(config.num_steps, device=where.device))


def _dens(learned: Tensor, config: Config) -> Tensor | dict[str, Tensor]:
    counts = learned.double().sum((0, 1))
    if config.average == "token":
        return counts[0]
    everywhere = torch.full_like(counts, learned[..., 0].numel())
    dens = {name: counts for name in config.terms}
    if config.average == "position":
        dens |= {"kl": everywhere}
    return _named({name: dens[name] for name in config.terms})


def _named(vectors: Values) -> Values:
    """Scalars ``name_step`` of vectors ``[K]``."""
    # Sums are added to in place: no views of one vector, of which FSDP2 warns too.
    return {f"{name}_{k}": x.clone() for name, each in vectors.items() for k, x in enumerate(each)}


def loss_terms(
    params: Params, batch: Batch, config: Config, target: Params
) -> tuple[LossTerms, Metrics]:
    """Sums of ``eagle_losses.distillation_losses``, each step's own, and their metrics.

    Logits exist for ``config.chunk_tokens`` positions of K steps at once, and are computed anew in
    the backward. It reads nothing on the host; a row in which nothing is taught adds exact zeros.

    Args:
        params: see ``init``.
        batch: a dict with ``tokens`` and ``loss_mask`` ``[B, S]``, ``captured`` ``[B, S, L * H]``
            and ``final`` ``[B, S, H]``: the input of the target's head, whose row t predicts token
            t + 1. What ``with_teacher`` adds is not computed anew.
        config: the drafter.
        target: ``embed`` and ``head``, frozen, and ``draft_ids`` where not all can be drafted.

    Returns:
        ``(terms, metrics)``. ``num``: sums named ``kl_0``, ``kl_1``, …; ``den`` by
        ``config.average``. Metrics are vectors ``[K]``: ``kl``, ``acceptance`` over what is taught;
        ``accuracy`` over all labels, also those that cannot be drafted; ``accepted_length``, a
        scalar.

    Raises:
        ValueError: fields are missing, or the target is another than the config's.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4, num_steps=2)
        >>> row = {"tokens": torch.tensor([[3, 1, 4, 1]]), "loss_mask": torch.ones(1, 4)}
        >>> states = {"captured": torch.ones(1, 4, 24), "final": torch.ones(1, 4, 8)}
        >>> params, target = init(config, random.key(1)), {"embed": torch.zeros(9, 8)}
        >>> params["head"] = torch.zeros(9, 8)
        >>> terms, metrics = loss_terms(params, row | states, config, target)
        >>> terms.num["kl_0"], terms.den["kl_0"]  # tokens 2 and 3, ln 9 each
        (tensor(4.3944, dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    fields = ["tokens", "loss_mask", "captured", "final"]
    require_batch("eagle3.loss_terms", batch, fields, config, target)
    batch = with_teacher(batch, config, target)
    losses, measures = _values(params, batch, config, target)
    learned = _by_step(taught(batch, config, target), config)
    sums = {name: torch.where(learned, losses[name], 0).double().sum((0, 1)) for name in losses}
    terms = LossTerms(_named({name: sums[name] for name in config.terms}), _dens(learned, config))
    labelled = _by_step(label_mask(batch["loss_mask"]), config)
    return terms, _metrics(sums["kl"], measures, learned, labelled)


def _values(params: Params, batch: Batch, config: Config, target: Params) -> tuple[Values, Values]:
    """Values ``[B, S, K]``, the logits of a few positions at a time."""
    states = apply(params, batch, config, target)
    names = ("final", "teacher_token", "teacher_logsumexp")
    items, constants = states.flatten(0, 1), {name: batch[name].flatten(0, 1) for name in names}
    on_rows = functools.partial(_row_values, target=target, names=(*config.terms, "kl"))
    head, size = {"head": params["head"]}, config.chunk_tokens
    values = map_chunks(on_rows, head, items, constants, chunk_size=size)
    leading = states.shape[:2]
    losses, measures = ({k: v.unflatten(0, leading) for k, v in each.items()} for each in values)
    return losses, measures


def _row_values(
    params: Params, states: Tensor, fields: Batch, target: Params, names: tuple[str, ...]
) -> tuple[Values, Values]:
    losses, measures = distillation_losses(
        logits(params, states),
        teacher_logits(fields["final"], target).unsqueeze(1),  # one teacher for all steps
        fields["teacher_token"][:, None],
        fields["teacher_logsumexp"][:, None],
        target.get("draft_ids"),
    )
    return {name: losses[name] for name in set(names)}, measures


def _metrics(kl: Tensor, measures: Values, learned: Tensor, labelled: Tensor) -> Metrics:
    chain = [
        torch.stack([_shifted(x[..., k], -1 - k) for k in range(x.shape[-1])], -1)
        for x in (measures["correct"], labelled)
    ]
    return {
        "accepted_length": accepted_length(chain[0], chain[1]),
        "acceptance": slot_means(measures["acceptance"].double(), learned),
        "accuracy": slot_means(measures["correct"].double(), labelled),
        "kl": LossTerms(kl.detach(), learned.double().sum((0, 1))),
    }
