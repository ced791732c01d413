"""The network of the DFlash family: blocks of slots that read hidden states of a target model.

The hidden states of K target layers become one context; each layer attends from the slots of a
block to the context before its anchor and to the block itself. Used by drafters that differ in
their heads and losses.

Shapes: B rows, S tokens in a row, N blocks in a row, Q slots in a block, H width, K captured layers
of the target.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pure import random
from .anchors import block_positions
from .block_attention import KERNELS, Attend, Kernel, block_attention, choose_kernel
from .layers import (
    apply_rope,
    init_weight,
    linear,
    merge_heads,
    rms_norm,
    rope_tables,
    split_heads,
    swiglu,
)
from .module import call

__all__ = [
    "Config",
    "apply",
    "init",
    "read_context",
    "require",
    "require_size",
    "run_layer",
    "slot_tables",
]

Params = Any
Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of the network.

    Attributes:
        hidden_size: H, that of the target.
        intermediate_size: width of the gated MLPs.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``.
        head_dim: width of a head, even.
        num_target_layers: K, the layers of the target whose hidden states are read.
        num_layers: layers of the network.
        block_size: Q, slots in a block.
        sliding_layers: indices of the layers that see a window only.
        sliding_window: positions in that window.
        rope_theta: the base of RoPE's wavelengths.
        norm_eps: added to mean squares in the norms.
        kernel: of attention, "auto", "dense" or "flex"; see ``block_attention``.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_target_layers: int
    num_layers: int = 5
    block_size: int = 16
    sliding_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    kernel: Kernel = "auto"

    def __post_init__(self) -> None:
        for name in _SIZES:
            require_size(self, name)
        for name in ("rope_theta", "norm_eps"):
            require(self, name, 0 < getattr(self, name) < math.inf, "positive and finite")
        require(self, "num_kv_heads", self.num_heads % self.num_kv_heads == 0, "a divisor of heads")
        require(self, "head_dim", self.head_dim % 2 == 0, "even, RoPE turns pairs")
        layers = all(0 <= layer < self.num_layers for layer in self.sliding_layers)
        require(self, "sliding_layers", layers, "indices of layers")
        window = self.sliding_window is None or self.sliding_window >= 1
        given = self.sliding_window is not None or not self.sliding_layers
        require(self, "sliding_window", window and given, "at least 1 where layers slide")
        require(self, "kernel", self.kernel in KERNELS, f"one of {KERNELS}")


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_target_layers",
    "num_layers",
    "block_size",
)


def require_size(config: Any, name: str) -> None:
    """Check that a field of a config is an integer from 1."""
    value = getattr(config, name)
    require(config, name, type(value) is int and value >= 1, "an integer, at least 1")


def require(config: Any, name: str, holds: bool, rule: str) -> None:
    """Check a field of a config.

    Raises:
        ValueError: ``holds`` is false.

    Examples:
        >>> require(functools.partial, "func", True, "callable")
    """
    if not holds:
        raise ValueError(f"Config: {name} must be {rule}, got {name}={getattr(config, name)!r}.")


def init(
    config: Config, key: Tensor, *, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Params:
    """Params with normal weights of deviation ``std`` and norms of 1, on the device of ``key``.

    A layer's draw depends on its index and not on the number of layers.

    Args:
        config: the shape.
        key: int64 ``[2]``, from ``random.key``.
        std: the standard deviation.
        dtype: of all params.

    Returns:
        ``context``, which reads the target's hidden states; ``layers``, one dict a layer; ``norm``.

    Examples:
        >>> config = Config(hidden_size=8, intermediate_size=12, num_heads=2, num_kv_heads=1,
        ...                 head_dim=4, num_target_layers=3)
        >>> init(config, random.key(0))["context"]["weight"].shape
        torch.Size([8, 24])
    """
    context_key, layers_key = random.split(key)
    width = config.hidden_size
    weight = functools.partial(init_weight, std=std, dtype=dtype)
    ones = functools.partial(torch.ones, dtype=dtype, device=key.device)
    return {
        "context": {
            "weight": weight(context_key, width, config.num_target_layers * width),
            "norm": ones(width),
        },
        "layers": [
            _init_layer(config, random.fold_in(layers_key, i), weight, ones)
            for i in range(config.num_layers)
        ],
        "norm": ones(width),
    }


def _init_layer(config: Config, key: Tensor, weight: Any, ones: Any) -> Params:
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v, o, gate, up, down = random.split(key, 7)
    return {
        "attn_norm": ones(width),
        "attn": {
            "q": weight(q, heads, width),
            "k": weight(k, kv_heads, width),
            "v": weight(v, kv_heads, width),
            "o": weight(o, width, heads),
            "q_norm": ones(config.head_dim),
            "k_norm": ones(config.head_dim),
        },
        "mlp_norm": ones(width),
        "mlp": {
            "gate": weight(gate, inner, width),
            "up": weight(up, inner, width),
            "down": weight(down, width, inner),
        },
    }


def apply(
    params: Params, captured: Tensor, slots: Tensor, anchors: Tensor, keep: Tensor, config: Config
) -> Tensor:
    """Hidden states of all slots, from the blocks' embedded tokens and the target's captured.

    ::

        c = norm(W captured)                           one context for all layers
        h = h + attention(norm(h) to [c; norm(h)])     keys as block_mask lets them be seen
        h = h + mlp(norm(h))

    Context and slots share key and value weights; the context does not pass the layers' norm.

    Args:
        params: see ``init``.
        captured: ``[B, S, K * H]``, hidden states of K target layers side by side.
        slots: ``[B, N, Q, H]``, embeddings of ``block_tokens``.
        anchors: ``[B, N]`` int64.
        keep: ``[B, N]`` bool; the other blocks see nothing and are not seen.
        config: the shape.

    Returns:
        ``[B, N, Q, H]``.

    Examples:
        >>> config = Config(hidden_size=8, intermediate_size=12, num_heads=2, num_kv_heads=1,
        ...                 head_dim=4, num_target_layers=3)
        >>> anchors, keep = torch.tensor([[2, 4]]), torch.tensor([[True, True]])
        >>> params, slots = init(config, random.key(0)), torch.ones(1, 2, 16, 8)
        >>> apply(params, torch.ones(1, 6, 24), slots, anchors, keep, config).shape
        torch.Size([1, 2, 16, 8])

    References:
        DFlash, as trained in SpecForge (sgl-project/SpecForge).
    """
    size = captured.shape[1], slots.shape[2]
    context = read_context(params["context"], captured, config)
    tables = slot_tables(anchors, *size, config, slots.dtype)
    windows = [
        config.sliding_window if i in config.sliding_layers else None
        for i in range(config.num_layers)
    ]
    kernel = choose_kernel(config.kernel, slots, config.head_dim)
    attend = {
        window: block_attention(anchors, keep, *size, window=window, kernel=kernel)
        for window in set(windows)
    }
    hidden = slots.flatten(1, 2)
    for layer, window in zip(params["layers"], windows, strict=True):
        hidden = call(run_layer, layer, hidden, context, tables, attend[window], config)
    return rms_norm(hidden, params["norm"], config.norm_eps).unflatten(1, slots.shape[1:3])


def read_context(params: Params, captured: Tensor, config: Config) -> Tensor:
    """What each layer attends to of the target: ``[B, S, K * H]`` captured, as ``[B, S, H]``."""
    return rms_norm(linear(captured, params["weight"]), params["norm"], config.norm_eps)


def slot_tables(
    anchors: Tensor, context_size: int, block_size: int, config: Config, dtype: torch.dtype
) -> Tables:
    """RoPE tables of the keys, context then slots; the last N * Q rows are those of the queries."""
    context = torch.arange(context_size, device=anchors.device).expand(anchors.shape[0], -1)
    positions = torch.cat([context, block_positions(anchors, block_size).flatten(1)], 1)
    return rope_tables(positions, config.head_dim, config.rope_theta, dtype)


def run_layer(
    params: Params, hidden: Tensor, context: Tensor, tables: Tables, attend: Attend, config: Config
) -> Tensor:
    """One layer on the hidden states ``[B, N * Q, H]`` of all slots."""
    normed = rms_norm(hidden, params["attn_norm"], config.norm_eps)
    hidden = hidden + _attention(params["attn"], normed, context, tables, attend, config)
    mlp = params["mlp"]
    normed = rms_norm(hidden, params["mlp_norm"], config.norm_eps)
    return hidden + swiglu(normed, mlp["gate"], mlp["up"], mlp["down"])


def _attention(
    params: Params, hidden: Tensor, context: Tensor, tables: Tables, attend: Attend, config: Config
) -> Tensor:
    cos, sin = tables
    source = torch.cat([context, hidden], 1)
    q = split_heads(linear(hidden, params["q"]), config.num_heads)
    k = split_heads(linear(source, params["k"]), config.num_kv_heads)
    v = split_heads(linear(source, params["v"]), config.num_kv_heads)
    first = context.shape[1]
    q = apply_rope(
        rms_norm(q, params["q_norm"], config.norm_eps), cos[..., first:, :], sin[..., first:, :]
    )
    k = apply_rope(rms_norm(k, params["k_norm"], config.norm_eps), cos, sin)
    return linear(merge_heads(attend(q, k, v)), params["o"])
