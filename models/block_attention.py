"""Attention of blocks to the context and to themselves: by FlexAttention or by a dense mask.

Both see the same keys. FlexAttention skips the keys of a tile that no query of it sees, and holds
no scores: for long rows with many blocks it is the one that fits a GPU.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .anchors import block_mask
from .layers import attention

__all__ = ["KERNELS", "Attend", "Kernel", "block_attention", "choose_kernel", "mask_function"]

Kernel = Literal["auto", "dense", "flex"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [B, Nq, N * Q, D], k [B, Nkv, S + N * Q, D], v) -> [B, Nq, N * Q, D]``."""


def choose_kernel(kernel: Kernel, like: Tensor, head_dim: int) -> Kernel:
    """Either "dense" or "flex": "auto" is flex where its fused kernel runs.

    That is on CUDA devices with Triton, for floats of 32 bits or less and heads of a power of two
    from 16 on, outside of ``torch.func`` transforms, which it has no rules for.

    Args:
        kernel: what is asked for.
        like: a tensor of the device and dtype that attention runs in.
        head_dim: D.

    Examples:
        >>> choose_kernel("auto", torch.zeros(1), head_dim=64)
        'dense'
    """
    if kernel != "auto":
        return kernel
    fits = head_dim >= 16 and head_dim & (head_dim - 1) == 0 and like.dtype != torch.float64
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    device = like.device.type == "cuda" and find_spec("triton") is not None
    return "flex" if fits and device and not transformed else "dense"


def block_attention(
    anchors: Tensor,
    keep: Tensor,
    context_size: int,
    block_size: int,
    *,
    window: int | None = None,
    kernel: Kernel = "dense",
) -> Attend:
    """Attention in which each slot sees what ``anchors.block_mask`` lets it see.

    A slot that sees nothing gives zeros.

    Args:
        anchors: ``[B, N]``.
        keep: ``[B, N]`` bool.
        context_size: S.
        block_size: Q.
        window: see ``block_mask``.
        kernel: "dense" or "flex". On a CPU flex is slow, and has no backward.

    Examples:
        >>> anchors, keep = torch.tensor([[2]]), torch.tensor([[True]])
        >>> attend = block_attention(anchors, keep, context_size=3, block_size=1)
        >>> values = torch.tensor([1.0, 3.0, 100.0, 8.0]).reshape(1, 1, 4, 1)
        >>> attend(torch.zeros(1, 1, 1, 1), values, values)  # the mean of 1, 3 and 8
        tensor([[[[4.]]]])
    """
    if kernel == "dense":
        mask = block_mask(anchors, keep, context_size, block_size, window=window)
        return functools.partial(attention, mask=mask)
    num_rows, num_slots = anchors.shape[0], anchors.shape[1] * block_size
    mask = create_block_mask(
        mask_function(anchors, keep, context_size, block_size, window=window),
        num_rows,
        None,
        num_slots,
        context_size + num_slots,
        device=anchors.device,
    )
    fused = _compiled_flex() if anchors.device.type == "cuda" else flex_attention
    return functools.partial(fused, block_mask=mask, enable_gqa=True)


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def mask_function(
    anchors: Tensor, keep: Tensor, context_size: int, block_size: int, *, window: int | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """``anchors.block_mask`` as a function of indices, ``(row, head, query, key) -> bool``.

    Args:
        anchors: ``[B, N]``.
        keep: ``[B, N]`` bool.
        context_size: S.
        block_size: Q.
        window: see ``block_mask``.

    Examples:
        >>> sees = mask_function(torch.tensor([[6]]), torch.tensor([[True]]), 12, 4, window=4)
        >>> row, slot = torch.tensor(0), torch.tensor(1)
        >>> [key for key in range(16) if sees(row, row, slot, torch.tensor(key))]
        [4, 5, 12, 13]
    """

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        anchor = anchors[row, block]
        # An anchor lies in the context, and a key of the context in no block: no need to ask.
        context, own = key < anchor, (key - context_size) // block_size == block
        if window is not None:
            context = context & (key > anchor + slot - window)
            own = own & ((key - context_size) % block_size <= slot)
        return keep[row, block] & (context | own)

    return sees
