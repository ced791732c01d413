"""Attention of a drafter that is run several times: to the text once, and to its own steps.

At step k the query of position s sees the keys of step 0 up to s, and of each later step the one
key of s itself: those are the tokens that were drafted behind s.

Shapes: B rows, N query heads, Nkv key heads, S positions, D width of a head.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..pure import tree
from .chunking import recompute

__all__ = ["unrolled_attention"]

Pair = tuple[Tensor, Tensor]


def unrolled_attention(q: Tensor, text: Pair, steps: Sequence[Pair], *, chunk_size: int) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` over the keys of the text up to a query, and its own of steps.

    Args:
        q: ``[B, N, S, D]``.
        text: keys and values of step 0, each ``[B, Nkv, S, D]``, N a multiple of Nkv.
        steps: those of the later steps, up to that of the queries, alike.
        chunk_size: queries that have scores at one time, which are computed anew in the backward;
            0 for all at once.

    Returns:
        ``[B, N, S, D]``.

    Examples:
        >>> q, v = torch.zeros(1, 1, 2, 1), torch.tensor([2.0, 4.0]).reshape(1, 1, 2, 1)
        >>> unrolled_attention(q, (q, v), [(q, 10 * v)], chunk_size=0).flatten()  # 2 20, 2 4 40
        tensor([11.0000, 15.3333])
    """
    num_queries = q.shape[2]
    size = chunk_size or max(1, num_queries)
    parts = []
    for start in range(0, max(1, num_queries), size):
        own = slice(start, start + size)
        inputs = (
            q[:, :, own],
            tree.map(lambda x, end=own.stop: x[:, :, :end], text),
            tree.map(lambda x, own=own: x[:, :, own], list(steps)),
        )
        attend = partial(_attend, start=start)
        parts.append(recompute(attend, inputs, ())[0] if chunk_size else attend(inputs, ())[0])
    return torch.cat(parts, 2)


def _attend(
    inputs: tuple[Tensor, Pair, list[Pair]], constants: tuple[()], *, start: int
) -> tuple[Tensor, tuple[()]]:
    q, (keys, values), steps = inputs
    num_queries, num_keys = q.shape[2], keys.shape[2]
    grouped = q.unflatten(1, (keys.shape[1], -1)) / math.sqrt(q.shape[-1])
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).triu(start + 1)
    scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).masked_fill(later, -math.inf)
    own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in steps]
    wide = torch.promote_types(q.dtype, torch.float32)
    probs = torch.cat([scores, *own], -1).softmax(-1, dtype=wide).to(q.dtype)
    out = probs[..., :num_keys] @ values.unsqueeze(2)
    for i, (_, value) in enumerate(steps):
        out = out + probs[..., num_keys + i, None] * value.unsqueeze(2)
    return out.flatten(1, 2), ()
