"""Attention of guesses to the text before their anchors, and to the guesses of the same anchor.

By FlexAttention or by a dense mask, as in ``block_attention``; both see the same keys.

Shapes: B rows, S positions, M guesses of a row.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .block_attention import Attend, Kernel
from .layers import attention

__all__ = ["guess_attention", "guess_function", "guess_mask"]


def guess_attention(
    anchors: Tensor,
    depths: Tensor,
    keep: Tensor,
    documents: Tensor | None = None,
    *,
    kernel: Kernel = "dense",
) -> Attend:
    """Attention in which each guess sees what ``guess_mask`` lets it see; zeros where that is none.

    Args:
        anchors: ``[B, M]``.
        depths: ``[B, M]``.
        keep: ``[B, M]`` bool.
        documents: ``[B, S]``, see ``cod.draw_depths``.
        kernel: "dense" or "flex". On a CPU flex is slow, and has no backward.

    Examples:
        >>> anchors, depths = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 0, 1]])
        >>> attend = guess_attention(anchors, depths, torch.ones(1, 3, dtype=torch.bool))
        >>> values = torch.tensor([1.0, 3.0, 8.0]).reshape(1, 1, 3, 1)
        >>> attend(torch.zeros(1, 1, 3, 1), values, values).flatten()
        tensor([1.0000, 2.0000, 4.5000])
    """
    if kernel == "dense":
        mask = guess_mask(anchors, depths, keep, documents)
        return functools.partial(attention, mask=mask)
    num_rows, size = anchors.shape
    sees = guess_function(anchors, depths, keep, documents)
    mask = create_block_mask(sees, num_rows, None, size, size, device=anchors.device)
    fused = _compiled_flex() if anchors.device.type == "cuda" else flex_attention
    return functools.partial(fused, block_mask=mask, enable_gqa=True)


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def guess_function(
    anchors: Tensor, depths: Tensor, keep: Tensor, documents: Tensor | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """``guess_mask`` as a function of indices, ``(row, head, query, key) -> bool``.

    Args:
        anchors: ``[B, M]``.
        depths: ``[B, M]``.
        keep: ``[B, M]`` bool.
        documents: ``[B, S]``.

    Examples:
        >>> anchors, depths = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 0, 1]])
        >>> sees = guess_function(anchors, depths, torch.ones(1, 3, dtype=torch.bool))
        >>> [key for key in range(3) if sees(0, 0, 2, key)]
        [0, 2]
    """
    document = _document(anchors, keep, documents)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at, of = (row, query), (row, key)
        text = (depths[of] == 0) & (anchors[of] <= anchors[at])
        own = (anchors[of] == anchors[at]) & (depths[of] <= depths[at])
        return (text | own) & (document[of] == document[at]) & (document[at] >= 0)

    return sees


def _document(anchors: Tensor, keep: Tensor, documents: Tensor | None) -> Tensor:
    """The document of each guess ``[B, M]``, -1 for none."""
    own = torch.zeros_like(anchors) if documents is None else documents.gather(1, anchors)
    return torch.where(keep, own, -1)


def guess_mask(
    anchors: Tensor, depths: Tensor, keep: Tensor, documents: Tensor | None = None
) -> Tensor:
    """What each guess sees: the text up to its anchor, and the guesses of its anchor up to itself.

    Guess i sees guess j where ``D_j = 0 and A_j <= A_i``, or ``A_j = A_i and D_j <= D_i``, both
    of one document.

    Args:
        anchors: A, ``[B, M]``.
        depths: D, ``[B, M]``.
        keep: ``[B, M]`` bool; the others see nothing and are not seen.
        documents: ``[B, S]``, see ``cod.draw_depths``; a position of none sees nothing.

    Returns:
        ``[B, M, M]`` bool, True where a query (row) sees a key (column).

    Examples:
        >>> anchors, depths = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 0, 1]])
        >>> guess_mask(anchors, depths, torch.ones(1, 3, dtype=torch.bool)).int()
        tensor([[[1, 0, 0],
                 [1, 1, 0],
                 [1, 0, 1]]], dtype=torch.int32)
    """
    document = _document(anchors, keep, documents)
    anchor, depth, own = (x[:, :, None] for x in (anchors, depths, document))
    text = (depths == 0)[:, None, :] & (anchors[:, None, :] <= anchor)
    drafted = (anchors[:, None, :] == anchor) & (depths[:, None, :] <= depth)
    return (text | drafted) & (document[:, None, :] == own) & (own >= 0)
