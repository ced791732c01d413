"""A decoder of the Qwen3 kind: RMSNorm, RoPE, grouped queries with norms per head, SwiGLU.

Params are nested dicts: ``embed`` [V, H], ``layers`` (one dict a layer), ``norm`` [H] and, when the
embedding is not tied, ``head`` [V, H]. Letters for shapes are those of ``layers``.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..pure.losses import Weighting, cross_entropy, linear_cross_entropy
from ..pure.terms import LossTerms, Metrics, add
from .decoder_block import Config, block, block_shapes, capture, tables
from .decoder_steps import Cache, init_cache, step
from .layers import embed, init_like, linear, rms_norm
from .module import call

__all__ = [
    "Cache",
    "Config",
    "apply",
    "hidden_states",
    "init",
    "init_cache",
    "logits",
    "loss_terms",
    "metrics",
    "next_tokens",
    "shapes",
    "step",
    "token_metrics",
]

Params = Any


def init(
    config: Config, key: Tensor, *, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Params:
    """Params with normal weights of deviation ``std`` and norms of 1, on the device of ``key``.

    A layer's draw depends on its index and not on the number of layers.

    Args:
        config: the shape.
        key: int64 [2], from ``random.key``.
        std: the standard deviation.
        dtype: of all params.

    Examples:
        >>> from numden.pure import random
        >>> config = Config(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=1,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4)
        >>> params = init(config, random.key(0))
        >>> params["layers"][0]["attn"]["k"].shape
        torch.Size([4, 8])
    """
    return init_like(key, shapes(config), std=std, dtype=dtype)


def shapes(config: Config) -> Params:
    """The params as tensors on the meta device, which have shapes and no memory."""
    table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    params = {
        "embed": table,
        "layers": [block_shapes(config) for _ in range(config.num_layers)],
        "norm": torch.empty(config.hidden_size, device="meta"),
    }
    return params if config.tie_embeddings else params | {"head": table}


def apply(
    params: Params, tokens: Tensor, config: Config, *, positions: Tensor | None = None
) -> Tensor:
    """Logits of the next token at each position.

    Rows are causal: padding on the right changes nothing on the left of it.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        tokens: int64 [B, S].
        config: the shape of ``params``.
        positions: integers [S] or [B, S]; default ``0 .. S-1``.

    Returns:
        [B, S, V].
    """
    _, final = hidden_states(params, tokens, config, positions=positions)
    return logits(params, final, config)


def logits(params: Params, hidden: Tensor, config: Config) -> Tensor:
    """The output head on normed hidden states: [..., H] to [..., V]."""
    return linear(hidden, _head(params, config))


def hidden_states(
    params: Params,
    tokens: Tensor,
    config: Config,
    *,
    layers: Sequence[int] = (),
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream after chosen layers, and the final states that the head reads.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        tokens: int64 [B, S].
        config: the shape of ``params``.
        layers: K indices of blocks, from 0, whose outputs a draft model reads.
        positions: integers [S] or [B, S]; default ``0 .. S-1``.

    Returns:
        captured: [B, S, K * H], the outputs in the order of ``layers``.
        final: [B, S, H], after the last norm.

    Raises:
        ValueError: there is no such layer.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
    x = embed(tokens, params["embed"])
    angles = tables(positions, x, config)
    outputs = []
    for layer in params["layers"]:
        x = call(block, layer, x, angles, config)
        outputs.append(x)
    return capture("hidden_states", outputs, layers), rms_norm(x, params["norm"], config.norm_eps)


def loss_terms(
    params: Params,
    batch: Mapping[str, Tensor],
    config: Config,
    *,
    weighting: Weighting = "token",
    chunk_size: int = 1024,
) -> LossTerms:
    """Next-token cross-entropy: a sum of nats over supervised tokens, and their weight.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        batch: fields

            - ``tokens``: int64 [B, S], padded on the right with any token;
            - ``loss_mask``: bool [B, S], True where a token is to be predicted (from those before
              it, so that the first one of a row never counts);
            - ``supervised``, optional: int64 [P], the flat positions ``b * S + s`` whose next token
              is to be predicted, made on the host. The head then runs on those alone.
        config: the shape of ``params``.
        weighting: "token", "sample" or "square", as in ``cross_entropy``.
        chunk_size: positions that have logits at one time.

    Returns:
        Scalars; exact zeros when nothing is supervised.
    """
    _, final = hidden_states(params, batch["tokens"], config)
    labels, where = next_tokens(batch)
    return linear_cross_entropy(
        final,
        _head(params, config),
        labels,
        where=where,
        positions=batch.get("supervised"),
        weighting=weighting,
        chunk_size=chunk_size,
    )


def next_tokens(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The token after each position and whether it is supervised; the last position has none.

    Args:
        batch: ``tokens`` [B, S] and ``loss_mask`` bool [B, S].

    Returns:
        labels: int64 [B, S].
        where: bool [B, S].

    Examples:
        >>> tokens = torch.tensor([[5, 6]])
        >>> next_tokens({"tokens": tokens, "loss_mask": torch.ones_like(tokens).bool()})
        (tensor([[6, 6]]), tensor([[ True, False]]))
    """
    tokens, mask = batch["tokens"], batch["loss_mask"]
    labels = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1)
    return labels, torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)


def metrics(
    params: Params, batch: Mapping[str, Tensor], config: Config, *, chunk_size: int = 1024
) -> Metrics:
    """Cross-entropy and accuracy per supervised token of held-out text, without gradients.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        batch: as in ``loss_terms``.
        config: the shape of ``params``.
        chunk_size: positions that have logits at one time.

    Returns:
        ``cross_entropy`` (nats) and ``accuracy`` (hits of the likeliest token).
    """
    with torch.no_grad():
        _, final = hidden_states(params, batch["tokens"], config)
        return token_metrics(params, final, batch, config, chunk_size)


def token_metrics(
    params: Params, final: Tensor, batch: Mapping[str, Tensor], config: Config, chunk_size: int
) -> Metrics:
    """``metrics`` of final states [B, S, H] that are at hand."""
    labels, where = next_tokens(batch)
    flat = [each.flatten(0, 1) for each in (final, labels, where)]
    if "supervised" in batch:
        flat = [each[batch["supervised"]] for each in flat]
    head = _head(params, config)
    chunks = zip(*(each.split(chunk_size) for each in flat), strict=True)
    return reduce(add, [_token_metrics(*chunk, head=head) for chunk in chunks])


def _token_metrics(hidden: Tensor, labels: Tensor, where: Tensor, *, head: Tensor) -> Metrics:
    scores = linear(hidden, head)
    hits = where & (scores.argmax(dim=-1) == labels)
    return {
        "cross_entropy": cross_entropy(scores, labels, where=where),
        "accuracy": LossTerms(hits.sum(), where.sum()),
    }


def _head(params: Params, config: Config) -> Tensor:
    return params["embed"] if config.tie_embeddings else params["head"]
