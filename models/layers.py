"""The layers that models are made of, as pure functions of tensors.

Shapes: B rows, S positions, H hidden width, V vocabulary, N heads, D width of a head.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ..pure import random
from ..pure.tree import PyTree

__all__ = [
    "apply_rope",
    "attention",
    "embed",
    "init_like",
    "init_weight",
    "linear",
    "merge_heads",
    "rms_norm",
    "rope_tables",
    "split_heads",
    "swiglu",
]

linear = functional.linear
embed = functional.embedding


def init_weight(
    key: Tensor, *shape: int, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A weight of independent normal draws with mean 0 and deviation ``std``.

    Row i is drawn from ``fold_in(key, i)``: it does not depend on the number of rows.

    Args:
        key: the key of this weight, int64 [2]; its device is the weight's.
        *shape: ``out, in`` for a linear map.
        std: the standard deviation.
        dtype: of the result. All have the same float32 draws, rounded.

    Examples:
        >>> init_weight(random.key(0), 3, 2).shape
        torch.Size([3, 2])
    """
    num_rows, *row = shape
    # Blocks of draws that stay in a CPU's cache: six times as fast as a whole embedding at once.
    keys = random.split(key, num_rows).split(max(1, 2**16 // math.prod(row)))
    return torch.cat([(std * random.normal(block, row)).to(dtype) for block in keys])


def init_like(key: Tensor, shapes: PyTree, *, std: float, dtype: torch.dtype) -> PyTree:
    """Params for a tree of shapes: ``init_weight`` for matrices, ones for vectors (norms).

    The i-th entry of a dict or list is drawn from ``fold_in(key, i)``: it does not depend on those
    behind it.

    Args:
        key: int64 [2]; its device is that of the params.
        shapes: dicts and lists, nested, of tensors of which the shape alone matters.
        std: the standard deviation.
        dtype: of all params.

    Examples:
        >>> init_like(random.key(0), {"norm": torch.empty(2)}, std=1.0, dtype=torch.float32)
        {'norm': tensor([1., 1.])}
    """
    if isinstance(shapes, Tensor):
        if shapes.dim() == 1:
            return torch.ones(shapes.shape, dtype=dtype, device=key.device)
        return init_weight(key, *shapes.shape, std=std, dtype=dtype)
    inner = partial(init_like, std=std, dtype=dtype)
    if isinstance(shapes, dict):
        entries = enumerate(shapes.items())
        return {name: inner(random.fold_in(key, i), child) for i, (name, child) in entries}
    return [inner(random.fold_in(key, i), child) for i, child in enumerate(shapes)]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale each vector to a root mean square of 1, then by ``weight``.

    ``weight * x / sqrt(mean(x^2) + eps)``. Half precision is normalised in float32 and rounded
    before the multiplication, as Llama and Qwen3 do it.

    Args:
        x: [..., H], floating point.
        weight: [H].
        eps: added to the mean square, so that zeros stay zeros with finite gradients.

    Returns:
        [..., H], the dtype of ``x``.

    Examples:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)
        tensor([0.8485, 1.1314])

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rope_tables(
    positions: Tensor, head_dim: int, theta: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angle in each pair of a head's dims.

    ``angle[s, i] = positions[s] * theta ** (-2 i / head_dim)`` for i < head_dim / 2, twice over.
    Angles are float32 whatever ``dtype`` is: published weights were trained with those.

    Args:
        positions: [..., S], integers.
        head_dim: D, even.
        theta: the base of the wavelengths.
        dtype: of the result.

    Returns:
        cos and sin, each [..., S, D].

    Examples:
        >>> cos, sin = rope_tables(torch.arange(2), head_dim=4)
        >>> sin[1]
        tensor([0.8415, 0.0100, 0.8415, 0.0100])

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by the angles of their positions.

    Args:
        x: queries or keys, [B, N, S, D].
        cos: [S, D] or [B, S, D], from ``rope_tables``.
        sin: like ``cos``.

    Returns:
        [B, N, S, D]. Products of rotated queries and keys depend on differences of positions only.

    Examples:
        >>> quarter = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> apply_rope(torch.tensor([[[[1.0, 2.0]]]]), *quarter)
        tensor([[[[-2.,  1.]]]])
    """
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, N * D] as [B, N, S, D].

    Examples:
        >>> split_heads(torch.zeros(2, 5, 12), num_heads=3).shape
        torch.Size([2, 3, 5, 4])
    """
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, N, S, D] as [B, S, N * D], the inverse of ``split_heads``.

    Examples:
        >>> merge_heads(torch.zeros(2, 3, 5, 4)).shape
        torch.Size([2, 5, 12])
    """
    return x.transpose(-3, -2).flatten(-2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Attention with grouped queries: ``softmax(q k^T / sqrt(D)) v`` over the visible keys.

    Query head n reads key head ``n // (Nq / Nkv)``. A query that sees no key gives zeros, with
    zero gradients. For jvp and second derivatives, which the fused kernels lack, call it under
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    Args:
        q: [B, Nq, Lq, D].
        k: [B, Nkv, Lk, D], Nq a multiple of Nkv.
        v: [B, Nkv, Lk, D].
        mask: bool, True where a query sees a key: [Lq, Lk], [B, Lq, Lk] or [B, 1 or Nq, Lq, Lk].
        causal: hide later keys. The queries are the last Lq of the Lk positions.

    Returns:
        [B, Nq, Lq, D].

    Raises:
        ValueError: Nq is not a multiple of Nkv.
        TypeError: ``mask`` is not bool.

    Examples:
        >>> q, v = torch.zeros(1, 2, 3, 1), torch.tensor([2.0, 4.0, 9.0]).reshape(1, 1, 3, 1)
        >>> attention(q, v, v, causal=True)[0, 0, :, 0]
        tensor([2., 3., 5.])

    References:
        Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023.
    """
    _check_attention(q, k, mask)
    if mask is None and causal and q.shape[-2] == k.shape[-2]:
        return _sdpa(q, k, v, is_causal=True, enable_gqa=True)
    if causal:
        mask = _and(mask, _last_positions(q.shape[-2], k.shape[-2], q.device))
    if mask is None:
        return _sdpa(q, k, v, enable_gqa=True)
    return _masked_attention(q, k, v, mask.unsqueeze(-3) if mask.dim() == 3 else mask)


_sdpa = functional.scaled_dot_product_attention


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    # On GPUs no fused kernel takes both a mask and grouped queries.
    group = q.shape[-3] // k.shape[-3]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
    # Kernels differ in what a row without visible keys gives: let it see all and drop the result.
    sees = mask.any(dim=-1, keepdim=True)
    return torch.where(sees, _sdpa(q, k, v, attn_mask=mask | ~sees), 0.0)


def _last_positions(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return visible.tril(num_keys - num_queries)


def _and(mask: Tensor | None, other: Tensor) -> Tensor:
    return other if mask is None else mask & other


def _check_attention(q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    if q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"attention: the heads of q must be a multiple of those of k, got q={tuple(q.shape)} "
            f"and k={tuple(k.shape)}. Give [B, N, L, D]."
        )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"attention: mask must be bool, True where a key is visible, got {mask.dtype}. "
            "Compare it, e.g. mask > 0."
        )


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The gated MLP ``down (silu(gate x) * up x)``.

    Args:
        x: [..., H].
        gate: [M, H].
        up: [M, H].
        down: [H, M].

    Returns:
        [..., H].

    Examples:
        >>> one = torch.ones(1, 1)
        >>> swiglu(torch.tensor([2.0]), one, one, one)
        tensor([3.5232])

    References:
        Shazeer, GLU Variants Improve Transformer, 2020.
    """
    return linear(functional.silu(linear(x, gate)) * linear(x, up), down)
