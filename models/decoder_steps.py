"""Decoding step by step, with the keys and values of the tokens before."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .decoder_block import Config, cached_block, capture, tables
from .layers import embed, rms_norm
from .module import call

__all__ = ["Cache", "init_cache", "step", "step_by"]

Params = Any


class Cache(NamedTuple):
    """Keys and values of the tokens so far: a pytree, never written in place.

    Attributes:
        keys: one tensor a layer, [B, Nkv, T, D], T the capacity.
        values: like ``keys``.
        length: how many positions count, an int or one a row, int64 [B]. What lies behind is
            never read: to take tokens back, ``cache._replace(length=fewer)``.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int | Tensor


def init_cache(
    config: Config,
    num_rows: int,
    capacity: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Cache:
    """An empty cache for ``num_rows`` rows of at most ``capacity`` tokens."""
    shape = num_rows, config.num_kv_heads, capacity, config.head_dim
    empty = [torch.zeros(shape, dtype=dtype, device=device)] * config.num_layers
    return Cache(empty, empty, 0)


def step(
    params: Params, tokens: Tensor, cache: Cache, config: Config, *, layers: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Cache]:
    """``hidden_states`` of some more tokens, given the cache of those before them.

    Any division of a text into steps gives the states of the whole. To verify a draft, feed its
    tokens at once, compare ``logits(params, final, config)``, and set the length of the cache back
    to the accepted ones.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        tokens: int64 [B, L], the next ones of each row.
        cache: from ``init_cache`` or the step before. It stays as it is.
        config: the shape of ``params``.
        layers: K indices of blocks whose outputs are returned.

    Returns:
        captured: [B, L, K * H].
        final: [B, L, H], after the last norm.
        cache: with these tokens, L longer.

    Raises:
        ValueError: the tokens do not fit behind an int length, or there is no such layer.

    Examples:
        >>> from numden.models import decoder
        >>> from numden.pure import random
        >>> config = Config(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=1,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4)
        >>> params = decoder.init(config, random.key(0))
        >>> empty = init_cache(config, num_rows=1, capacity=8)
        >>> _, final, cache = step(params, torch.tensor([[3, 1, 2]]), empty, config)
        >>> final.shape, cache.length
        (torch.Size([1, 3, 8]), 3)
    """
    blocks = [cached_block] * config.num_layers
    return step_by(blocks, params, tokens, cache, config, layers=layers)


def step_by(
    blocks: Sequence[Callable[..., tuple[Tensor, list[Tensor]]]],
    params: Params,
    tokens: Tensor,
    cache: Cache,
    config: Config,
    *,
    layers: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Cache]:
    """``step`` of a model whose blocks are others: one function like ``cached_block`` a layer."""
    positions = _next_positions(tokens, cache)
    x = embed(tokens, params["embed"])
    angles = tables(positions, x, config)
    outputs, past = [], []
    rows = zip(blocks, params["layers"], cache.keys, cache.values, strict=True)
    for block_fn, layer, *pair in rows:
        x, pair = call(block_fn, layer, x, angles, config, pair, positions)
        outputs.append(x)
        past.append(pair)
    keys, values = ([pair[i] for pair in past] for i in (0, 1))
    final = rms_norm(x, params["norm"], config.norm_eps)
    longer = Cache(keys, values, cache.length + tokens.shape[1])
    return capture("step", outputs, layers), final, longer


def _next_positions(tokens: Tensor, cache: Cache) -> Tensor:
    (_, num_tokens), capacity = tokens.shape, cache.keys[0].shape[2]
    if isinstance(cache.length, int) and cache.length + num_tokens > capacity:
        raise ValueError(
            f"step: the cache must have room for the tokens, got {num_tokens} tokens behind "
            f"length={cache.length} of capacity={capacity}. Make a larger one with init_cache."
        )
    start = torch.as_tensor(cache.length, device=tokens.device)
    return (start[..., None] + torch.arange(num_tokens, device=tokens.device)).expand_as(tokens)
