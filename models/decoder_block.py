"""One block of the decoder: its shape, its weights, its forward pass with and without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .layers import (
    apply_rope,
    attention,
    linear,
    merge_heads,
    rms_norm,
    rope_tables,
    split_heads,
    swiglu,
)

__all__ = [
    "Config",
    "attend",
    "block",
    "block_shapes",
    "cached_attend",
    "cached_block",
    "capture",
    "check_field",
    "tables",
]

Params = Any
Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a decoder.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        intermediate_size: M, the width of the gated MLP.
        num_layers: the number of blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``.
        head_dim: D, even; ``num_heads * head_dim`` need not be H.
        rope_theta: the base of RoPE's wavelengths.
        norm_eps: added to mean squares in the norms.
        tie_embeddings: use the embedding as the output head.
        qk_norm: norms of queries and keys, as in Qwen3; Llama has none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = True

    def __post_init__(self) -> None:
        # Fields of configs that extend this one are theirs to check.
        for field in fields(Config):
            kind: Any = field.type
            kinds = (int, float) if kind is float else (kind,)
            check_field(field.name, getattr(self, field.name), kinds)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "Config: num_heads must be a multiple of num_kv_heads, got "
                f"num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"Config: head_dim must be even, RoPE turns pairs, got head_dim={self.head_dim}."
            )


def check_field(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raise unless a field of a config is of one of ``kinds``, and positive where it is a number.

    Raises:
        TypeError: another kind.
        ValueError: not positive.

    Examples:
        >>> check_field("num_layers", 0, (int,))
        Traceback (most recent call last):
            ...
        ValueError: Config: num_layers must be positive, got num_layers=0.
    """
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"Config: {name} must be {expected}, got {name}={value!r}.")
    if bool not in kinds and not value > 0:
        raise ValueError(f"Config: {name} must be positive, got {name}={value}.")


def block_shapes(config: Config) -> Params:
    """The params of one block as tensors on the meta device.

    Examples:
        >>> config = Config(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=1,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4)
        >>> {name: tuple(weight.shape) for name, weight in block_shapes(config)["mlp"].items()}
        {'gate': (12, 8), 'up': (12, 8), 'down': (8, 12)}
    """
    shape = partial(torch.empty, device="meta")
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    head_norm = shape(config.head_dim)
    norms = {"q_norm": head_norm, "k_norm": head_norm} if config.qk_norm else {}
    return {
        "attn_norm": shape(width),
        "attn": {
            "q": shape(heads, width),
            "k": shape(kv_heads, width),
            "v": shape(kv_heads, width),
            "o": shape(width, heads),
            **norms,
        },
        "mlp_norm": shape(width),
        "mlp": {
            "gate": shape(inner, width),
            "up": shape(inner, width),
            "down": shape(width, inner),
        },
    }


def tables(positions: Tensor, x: Tensor, config: Config) -> Tables:
    """RoPE's cos and sin for ``positions`` [S] or [B, S], in the dtype of ``x``."""
    return rope_tables(positions, config.head_dim, config.rope_theta, x.dtype)


def block(layer: Params, x: Tensor, angles: Tables, config: Config) -> Tensor:
    """A block on whole rows: causal attention, then the gated MLP, each added to what comes in.

    Args:
        layer: params of one block.
        x: [B, S, H].
        angles: from ``tables``.
        config: the shape.

    Returns:
        [B, S, H].
    """
    return _add_mlp(layer, attend(layer, x, angles, config), config)


def attend(layer: Params, x: Tensor, angles: Tables, config: Config) -> Tensor:
    """The first half of ``block``: ``x`` and what causal attention adds to it, [B, S, H]."""
    q, k, v = _queries_keys_values(layer, x, angles, config)
    return _add_attention(layer, x, attention(q, k, v, causal=True))


def cached_block(
    layer: Params,
    x: Tensor,
    angles: Tables,
    config: Config,
    past: list[Tensor],
    positions: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """``block`` on some more positions of rows whose earlier keys and values are given.

    Args:
        layer: params of one block.
        x: [B, L, H].
        angles: from ``tables``.
        config: the shape.
        past: keys and values, each [B, Nkv, T, D]; read up to the position of each query.
        positions: int64 [B, L], where the new keys and values belong.

    Returns:
        [B, L, H], and keys and values that hold the new ones.
    """
    x, past = cached_attend(layer, x, angles, config, past, positions)
    return _add_mlp(layer, x, config), past


def cached_attend(
    layer: Params,
    x: Tensor,
    angles: Tables,
    config: Config,
    past: list[Tensor],
    positions: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """The first half of ``cached_block``, of the same arguments."""
    q, *new = _queries_keys_values(layer, x, angles, config)
    keys, values = (_written(old, at, positions) for old, at in zip(past, new, strict=True))
    visible = torch.arange(keys.shape[2], device=x.device) <= positions[..., None]
    attended = attention(q, keys, values, visible)
    return _add_attention(layer, x, attended), [keys, values]


def _written(buffer: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    return buffer.scatter(2, positions[:, None, :, None].expand_as(new), new)


def _queries_keys_values(
    layer: Params, x: Tensor, angles: Tables, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    attn, eps = layer["attn"], config.norm_eps
    normed = rms_norm(x, layer["attn_norm"], eps)
    q = split_heads(linear(normed, attn["q"]), config.num_heads)
    k = split_heads(linear(normed, attn["k"]), config.num_kv_heads)
    v = split_heads(linear(normed, attn["v"]), config.num_kv_heads)
    if config.qk_norm:
        q, k = rms_norm(q, attn["q_norm"], eps), rms_norm(k, attn["k_norm"], eps)
    return apply_rope(q, *angles), apply_rope(k, *angles), v


def _add_attention(layer: Params, x: Tensor, attended: Tensor) -> Tensor:
    return x + linear(merge_heads(attended), layer["attn"]["o"])


def _add_mlp(layer: Params, x: Tensor, config: Config) -> Tensor:
    mlp, normed = layer["mlp"], rms_norm(x, layer["mlp_norm"], config.norm_eps)
    return x + swiglu(normed, mlp["gate"], mlp["up"], mlp["down"])


def capture(name: str, outputs: list[Tensor], layers: Sequence[int]) -> Tensor:
    """Chosen ones of the outputs [B, S, H] of blocks, side by side; ``name`` is for errors.

    Raises:
        ValueError: there is no such layer.
    """
    for index in layers:
        if not 0 <= index < len(outputs):
            raise ValueError(
                f"{name}: layers must lie in 0..{len(outputs) - 1}, got layers={tuple(layers)}."
            )
    empty = outputs[0][..., :0]
    return torch.cat([empty, *(outputs[index] for index in layers)], dim=-1)
