"""The network of a mixture-of-experts decoder: what ``moe`` computes its losses of."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import decoder
from .decoder_block import capture, tables
from .decoder_steps import Cache, step_by
from .experts import Exchange
from .layers import embed, rms_norm
from .module import call
from .moe_block import Config, block, block_shapes, cached_block
from .routers import Routing

__all__ = ["States", "shapes", "states", "step"]

Params = Any


def shapes(config: Config) -> Params:
    """The params as tensors on the meta device, which have shapes and no memory."""
    blocks = [block_shapes(config, index) for index in range(config.num_layers)]
    return decoder.shapes(config) | {"layers": blocks}


class States(NamedTuple):
    """What a forward pass leaves.

    Attributes:
        captured: [B, S, K * H], the residual stream after chosen layers.
        final: [B, S, H], what the head reads.
        routings: one for each block with experts, of [B, S] tokens.
    """

    captured: Tensor
    final: Tensor
    routings: list[Routing]


def states(
    params: Params,
    tokens: Tensor,
    config: Config,
    *,
    layers: Sequence[int] = (),
    positions: Tensor | None = None,
    exchange: Exchange | None = None,
    router_bias: Tensor | None = None,
    selected: Tensor | None = None,
) -> States:
    """Hidden states and what the routers decided.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        tokens: int64 [B, S].
        config: the shape of ``params``.
        layers: K indices of blocks, from 0, whose outputs a draft model reads.
        positions: integers [S] or [B, S]; default ``0 .. S-1``.
        exchange: see ``experts.mix``; needed where ``params`` hold a part of the experts.
        router_bias: [L, E], one row for each of the L blocks with experts, for the router "biased".
        selected: int64 [B, S, L, k], choices made before, in place of the routers'.

    Raises:
        ValueError: there is no such layer, or experts are missing and ``exchange`` too.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
    x = embed(tokens, params["embed"])
    angles = tables(positions, x, config)
    outputs, routings = [], []
    for layer in params["layers"]:
        options = {} if "mlp" in layer else _of_layer(len(routings), router_bias, selected)
        x, routing = call(block, layer, x, angles, config, exchange=exchange, **options)
        outputs.append(x)
        routings += [] if routing is None else [routing]
    captured = capture("states", outputs, layers)
    return States(captured, rms_norm(x, params["norm"], config.norm_eps), routings)


def _of_layer(index: int, router_bias: Tensor | None, selected: Tensor | None) -> dict[str, Any]:
    """What the index-th router is given."""
    bias = None if router_bias is None else router_bias.select(0, index)
    return {"bias": bias, "selected": None if selected is None else selected.select(2, index)}


def step(
    params: Params,
    tokens: Tensor,
    cache: Cache,
    config: Config,
    *,
    layers: Sequence[int] = (),
    exchange: Exchange | None = None,
    router_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Cache]:
    """``decoder.step``, of the same arguments and a cache from ``decoder.init_cache``.

    Args:
        params: from ``moe.init``, or such a module as ``as_module`` makes.
        tokens: int64 [B, L], the next ones of each row.
        cache: from ``decoder.init_cache`` or the step before. It stays as it is.
        config: the shape of ``params``.
        layers: K indices of blocks whose outputs are returned.
        exchange: see ``states``.
        router_bias: see ``states``.

    Returns:
        captured: [B, L, K * H].
        final: [B, L, H], after the last norm.
        cache: with these tokens, L longer.
    """
    blocks = [partial(cached_block, exchange=exchange)] * config.num_layers
    if router_bias is not None:
        for row, index in enumerate(config.routed_layers):
            blocks[index] = partial(blocks[index], bias=router_bias.select(0, row))
    return step_by(blocks, params, tokens, cache, config, layers=layers)
