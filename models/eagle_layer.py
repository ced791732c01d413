"""Layers of drafters of the EAGLE kind, which read the embedded token beside a hidden state.

They are Llama's: no norms on queries and keys. The first layer of a drafter attends from the normed
embedding and the normed hidden state side by side, and adds to the hidden state.

Shapes: B rows, L positions, H width, K captured layers of the target, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backbone import require, require_size
from .layers import (
    apply_rope,
    linear,
    merge_heads,
    rms_norm,
    rope_tables,
    split_heads,
    swiglu,
)

__all__ = [
    "Config",
    "Heads",
    "add_attention",
    "drafter_shapes",
    "heads",
    "join",
    "layer_shapes",
    "read_context",
    "tables",
]

Params = Any
Tables = tuple[Tensor, Tensor]
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries ``[B, N, L, D]``, keys and values ``[B, Nkv, L, D]``."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a drafter of the EAGLE kind.

    Attributes:
        vocab_size: V, that of the target.
        draft_vocab_size: the tokens that can be drafted; None for all. Which they are is told by
            ``draft_ids`` of the target, see ``draft_vocabulary``.
        hidden_size: H, that of the target.
        intermediate_size: width of the gated MLPs.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``.
        head_dim: width of a head, even.
        num_target_layers: K, the layers of the target whose hidden states are read.
        context_norm: norm the hidden states of each of these layers.
        rope_theta: the base of RoPE's wavelengths.
        norm_eps: added to mean squares in the norms.
        chunk_tokens: positions of the target that have logits at one time; 0 for all.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    vocab_size: int
    draft_vocab_size: int | None = None
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_target_layers: int = 3
    context_norm: bool = False
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        for name in _SIZES:
            require_size(self, name)
        for name in ("rope_theta", "norm_eps"):
            require(self, name, 0 < getattr(self, name) < math.inf, "positive and finite")
        require(self, "num_kv_heads", self.num_heads % self.num_kv_heads == 0, "a divisor of heads")
        require(self, "head_dim", self.head_dim % 2 == 0, "even, RoPE turns pairs")
        inside = self.draft_vocab_size is None or 1 <= self.draft_vocab_size <= self.vocab_size
        require(self, "draft_vocab_size", inside, "from 1 to vocab_size, or None")
        chunks = 0 <= self.chunk_tokens < math.inf
        require(self, "chunk_tokens", chunks, "finite and not negative")

    @property
    def num_draft_tokens(self) -> int:
        """The size of the draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_target_layers",
)


def drafter_shapes(config: Config, num_layers: int) -> Params:
    """The params of a drafter as tensors on the meta device, the first layer with joined inputs.

    Examples:
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4)
        >>> {name: tuple(each.shape) for name, each in drafter_shapes(config, 1)["context"].items()}
        {'weight': (8, 24)}
    """
    shape = partial(torch.empty, device="meta")
    width, inputs = config.hidden_size, config.num_target_layers * config.hidden_size
    context = {"weight": shape(width, inputs)}
    if config.context_norm:
        context["norm"] = shape(inputs)
    return {
        "context": context,
        "layers": [layer_shapes(config, joined=i == 0) for i in range(num_layers)],
        "norm": shape(width),
        "head": shape(config.num_draft_tokens, width),
    }


def layer_shapes(config: Config, *, joined: bool) -> Params:
    """The params of one layer as tensors on the meta device.

    Args:
        config: the shape.
        joined: the layer reads an embedding beside the hidden state.

    Examples:
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4)
        >>> layer_shapes(config, joined=True)["attn"]["q"].shape
        torch.Size([8, 16])
    """
    shape = partial(torch.empty, device="meta")
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inputs = 2 * width if joined else width
    norms = {"embed_norm": shape(width)} if joined else {}
    return norms | {
        "attn_norm": shape(width),
        "attn": {
            "q": shape(queries, inputs),
            "k": shape(keys, inputs),
            "v": shape(keys, inputs),
            "o": shape(width, queries),
        },
        "mlp_norm": shape(width),
        "mlp": {
            "gate": shape(inner, width),
            "up": shape(inner, width),
            "down": shape(width, inner),
        },
    }


def read_context(params: Params, captured: Tensor, config: Config) -> Tensor:
    """The hidden state that stands for the target's: ``W captured``, normed with ``context_norm``.

    Args:
        params: ``weight`` ``[H, K * H]`` and, in that case, ``norm`` ``[K * H]``.
        captured: ``[..., K * H]``, hidden states of K layers side by side.
        config: the shape.

    Returns:
        ``[..., H]``.
    """
    if config.context_norm:
        parts = captured.unflatten(-1, (config.num_target_layers, -1))
        norm = params["norm"].unflatten(-1, (config.num_target_layers, -1))
        captured = rms_norm(parts, norm, config.norm_eps).flatten(-2)
    return linear(captured, params["weight"])


def tables(positions: Tensor, like: Tensor, config: Config) -> Tables:
    """RoPE's cos and sin for ``positions`` ``[L]`` or ``[B, L]``, in the dtype of ``like``."""
    return rope_tables(positions, config.head_dim, config.rope_theta, like.dtype)


def join(layer: Params, embedded: Tensor, hidden: Tensor, config: Config) -> Tensor:
    """What the first layer attends from: ``[norm(embedded); norm(hidden)]``, ``[..., 2 H]``."""
    eps = config.norm_eps
    normed = rms_norm(embedded, layer["embed_norm"], eps), rms_norm(hidden, layer["attn_norm"], eps)
    return torch.cat(normed, -1)


def heads(attn: Params, inputs: Tensor, angles: Tables, config: Config) -> Heads:
    """Queries, keys and values of normed inputs, the first two turned to their positions."""
    q = split_heads(linear(inputs, attn["q"]), config.num_heads)
    k = split_heads(linear(inputs, attn["k"]), config.num_kv_heads)
    v = split_heads(linear(inputs, attn["v"]), config.num_kv_heads)
    return apply_rope(q, *angles), apply_rope(k, *angles), v


def add_attention(layer: Params, residual: Tensor, attended: Tensor, config: Config) -> Tensor:
    """The rest of a layer: add ``o attended`` to the residual, then the MLP.

    Args:
        layer: params of one layer.
        residual: ``[B, L, H]``.
        attended: ``[B, N, L, D]``.
        config: the shape.

    Returns:
        ``[B, L, H]``.
    """
    hidden = residual + linear(merge_heads(attended), layer["attn"]["o"])
    mlp, normed = layer["mlp"], rms_norm(hidden, layer["mlp_norm"], config.norm_eps)
    return hidden + swiglu(normed, mlp["gate"], mlp["up"], mlp["down"])
