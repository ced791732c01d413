"""The network of multi-token prediction: one decoder layer that is run again for each token ahead.

A step fuses what was said of a position with the embedding of the token that came next, and says
what comes after that. Norms scale by one plus their weight, which starts at zero.

Shapes: B rows, S positions, H width, N heads, D width of a head.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pure import tree
from .layers import (
    apply_rope,
    attention,
    init_like,
    linear,
    merge_heads,
    rope_tables,
    split_heads,
    swiglu,
)
from .module import call
from .mtp_config import Config

__all__ = ["Chain", "advance", "init", "offset_rms_norm"]

Params = Any


def init(
    config: Config, key: Tensor, *, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Params:
    """Params with normal weights of deviation ``std`` and norms of 0, on the device of ``key``.

    Args:
        config: the shape.
        key: int64 ``[2]``, from ``random.key``.
        std: the standard deviation.
        dtype: of all params.

    Returns:
        ``embed_norm`` and ``hidden_norm``, ``fuse`` ``[H, 2 H]``, ``layer`` and ``norm``.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4, output_gate=True)
        >>> init(config, random.key(0))["layer"]["attn"]["q"].shape
        torch.Size([16, 8])
    """
    drawn = init_like(key, _shapes(config), std=std, dtype=dtype)
    return tree.map(lambda leaf: torch.zeros_like(leaf) if leaf.dim() == 1 else leaf, drawn)


def _shapes(config: Config) -> Params:
    shape = partial(torch.empty, device="meta")
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    attn = {
        "q": shape(heads * (2 if config.output_gate else 1), width),
        "k": shape(kv_heads, width),
        "v": shape(kv_heads, width),
        "o": shape(width, heads),
        "q_norm": shape(dim),
        "k_norm": shape(dim),
    }
    mlp = {"gate": shape(inner, width), "up": shape(inner, width), "down": shape(width, inner)}
    vector = shape(width)
    return {
        "embed_norm": vector,
        "hidden_norm": vector,
        "fuse": shape(width, 2 * width),
        "layer": {"attn_norm": vector, "attn": attn, "mlp_norm": vector, "mlp": mlp},
        "norm": vector,
    }


def offset_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * x / sqrt(mean(x^2) + eps)``, in float32 or wider.

    Args:
        x: ``[..., H]``.
        weight: ``[H]``.
        eps: added to the mean square.

    Returns:
        ``[..., H]``, the dtype of ``x``.

    Examples:
        >>> offset_rms_norm(torch.tensor([3.0, 4.0]), torch.zeros(2), eps=0.0)
        tensor([0.8485, 1.1314])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.to(wide.dtype))).to(x.dtype)


class Chain(NamedTuple):
    """Where the chains of steps stand, one chain a position.

    Attributes:
        hidden: ``[B, S, H]``, what the last step said; at first the target's final states.
        keys: ``[B, Nkv, T, D]`` of the steps before, None at first.
        values: like ``keys``.
    """

    hidden: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None


def advance(
    params: Params,
    chain: Chain,
    embedded: Tensor,
    positions: Tensor,
    config: Config,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Chain:
    """One step of all chains.

    ::

        u = W [norm(embedded); norm(hidden)]
        u = u + attention(norm(u));  u = u + mlp(norm(u));  hidden = norm(u)

    Keys are those of this step, behind those of the steps before where the chain context is
    "prefix".

    Args:
        params: from ``init``.
        chain: the steps before.
        embedded: ``[B, S, H]``, embeddings of the tokens that the step reads.
        positions: ``[S]``, those of these tokens.
        config: the shape.
        mask: bool ``[S, T]`` or ``[B, S, T]``, which keys each position sees; None: all.
        causal: hide keys behind a position, where keys are those of this step alone.
    """
    eps = config.norm_eps
    joined = [
        offset_rms_norm(embedded, params["embed_norm"], eps),
        offset_rms_norm(chain.hidden, params["hidden_norm"], eps),
    ]
    fused = linear(torch.cat(joined, -1), params["fuse"])
    angles = rope_tables(positions, config.turned_dims, config.rope_theta, fused.dtype)
    see = partial(attention, mask=mask, causal=causal)
    chain = call(_layer, params["layer"], chain._replace(hidden=fused), angles, see, config)
    return chain._replace(hidden=offset_rms_norm(chain.hidden, params["norm"], eps))


def _layer(params: Params, chain: Chain, angles: Any, see: Any, config: Config) -> Chain:
    x = chain.hidden
    attn, eps = params["attn"], config.norm_eps
    normed = offset_rms_norm(x, params["attn_norm"], eps)
    q = split_heads(linear(normed, attn["q"]), config.num_heads)
    gate = None
    if config.output_gate:
        q, gate = q.chunk(2, dim=-1)
    k = split_heads(linear(normed, attn["k"]), config.num_kv_heads)
    v = split_heads(linear(normed, attn["v"]), config.num_kv_heads)
    q = _turn(offset_rms_norm(q, attn["q_norm"], eps), angles)
    k = _turn(offset_rms_norm(k, attn["k_norm"], eps), angles)
    if config.chain_context == "prefix" and chain.keys is not None and chain.values is not None:
        k, v = torch.cat([chain.keys, k], -2), torch.cat([chain.values, v], -2)
    attended = see(q, k, v)
    attended = attended if gate is None else attended * gate.sigmoid()
    x = x + linear(merge_heads(attended), attn["o"])
    mlp, normed = params["mlp"], offset_rms_norm(x, params["mlp_norm"], eps)
    return Chain(x + swiglu(normed, mlp["gate"], mlp["up"], mlp["down"]), k, v)


def _turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    dims = angles[0].shape[-1]
    turned = apply_rope(x[..., :dims], *angles)
    return turned if dims == x.shape[-1] else torch.cat([turned, x[..., dims:]], -1)
