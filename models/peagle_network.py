"""The network of P-EAGLE: all guesses of a row side by side, from the text up to their anchors.

Shapes: B rows, S tokens in a row, M guesses of a row, L captured layers of the target, H width.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..pure import random
from .block_attention import Attend, choose_kernel
from .eagle_layer import add_attention, drafter_shapes, heads, join, read_context, tables
from .guess_attention import guess_attention
from .layers import embed, init_like, init_weight, linear, rms_norm
from .module import call
from .peagle_config import Config

__all__ = ["apply", "init", "logits", "states"]

Params = Any
Batch = dict[str, Tensor]


def init(
    config: Config,
    key: Tensor,
    target: Params | None = None,
    *,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
) -> Params:
    """Params with normal weights of deviation ``std`` and norms of 1, on the device of ``key``.

    Args:
        config: the drafter.
        key: int64 ``[2]``, from ``random.key``.
        target: where given, its ``embed`` is where the drafter's own starts.
        std: the standard deviation.
        dtype: of all params.

    Returns:
        ``context``, ``layers``, ``norm`` and ``head`` as in ``eagle3``; ``embed`` ``[V, H]`` and
        ``unknown`` ``[1, L * H]``, which stands for hidden states of the target.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4)
        >>> init(config, random.key(0))["unknown"].shape
        torch.Size([1, 24])
    """
    layers_key, embed_key, unknown_key = random.split(key, 3)
    weight = functools.partial(init_weight, std=std, dtype=dtype)
    params = init_like(layers_key, drafter_shapes(config, config.num_layers), std=std, dtype=dtype)
    width = config.hidden_size
    params["unknown"] = weight(unknown_key, 1, config.num_target_layers * width)
    if target is None:
        return params | {"embed": weight(embed_key, config.vocab_size, width)}
    return params | {"embed": target["embed"].detach().to(key.device, dtype, copy=True)}


def apply(params: Params, batch: Batch, config: Config, target: Params | None = None) -> Tensor:
    """The states that the head reads.

    Args:
        params: see ``init``.
        batch: from ``prepare``, with ``tokens`` ``[B, S]`` int64 and ``captured``
            ``[B, S, L * H]``.
        config: the drafter.
        target: not read: the embedding is the drafter's own.

    Returns:
        ``[B, M, H]``; a guess that is not kept is of no meaning.
    """
    following = functional.pad(batch["tokens"][:, 1:], (0, 1))
    return states(params, embed(following, params["embed"]), batch["captured"], batch, config)


def states(
    params: Params, following: Tensor, captured: Tensor, guesses: Batch, config: Config
) -> Tensor:
    """``apply`` on tokens that are embedded.

    Args:
        params: see ``init``.
        following: ``[B, S, H]``, at each position the embedding of the next token.
        captured: ``[B, S, L * H]``.
        guesses: ``anchors``, ``depths`` and ``keep`` ``[B, M]``, and ``documents`` if rows are
            packed.
        config: the drafter.

    Returns:
        ``[B, M, H]``.
    """
    embedded, hidden = _inputs(params, following, captured, guesses, config)
    kernel = choose_kernel(config.kernel, hidden, config.head_dim)
    anchors, depths, keep = guesses["anchors"], guesses["depths"], guesses["keep"]
    attend = guess_attention(anchors, depths, keep, guesses.get("documents"), kernel=kernel)
    angles = tables(anchors + depths, hidden, config)
    first, *others = params["layers"]
    hidden = call(_joined_layer, first, embedded, hidden, angles, attend, config)
    for layer in others:
        hidden = call(_layer, layer, hidden, angles, attend, config)
    return rms_norm(hidden, params["norm"], config.norm_eps)


def _inputs(
    params: Params, following: Tensor, captured: Tensor, guesses: Batch, config: Config
) -> tuple[Tensor, Tensor]:
    """Embedded tokens and hidden states ``[B, M, H]`` that the guesses read."""
    deep = (guesses["depths"] > 0)[..., None]
    context = read_context(params["context"], captured, config)
    at = guesses["anchors"][..., None].expand(-1, -1, config.hidden_size)
    unknown = read_context(params["context"], params["unknown"], config)
    hidden = torch.where(deep, unknown, context.gather(1, at))
    return torch.where(deep, params["embed"][config.mask_token_id], following.gather(1, at)), hidden


def _joined_layer(
    layer: Params,
    embedded: Tensor,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    attend: Attend,
    config: Config,
) -> Tensor:
    q, k, v = heads(layer["attn"], join(layer, embedded, hidden, config), angles, config)
    if config.norm_before_residual:
        hidden = rms_norm(hidden, layer["attn_norm"], config.norm_eps)
    return add_attention(layer, hidden, attend(q, k, v), config)


def _layer(
    layer: Params, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, config: Config
) -> Tensor:
    normed = rms_norm(hidden, layer["attn_norm"], config.norm_eps)
    q, k, v = heads(layer["attn"], normed, angles, config)
    return add_attention(layer, hidden, attend(q, k, v), config)


def logits(params: Params, states: Tensor) -> Tensor:
    """Logits ``[..., D]`` of the draft vocabulary, of states ``[..., H]``."""
    return linear(states, params["head"])
