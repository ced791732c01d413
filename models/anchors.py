"""Anchors and the blocks behind them: what block drafters (DFlash, Domino, DSpark, DSpine) share.

An anchor is a position ``a`` whose token and next token are both supervised. The block behind it
has ``Q`` slots; slot ``j`` sits at position ``a + j``, and slot 0 holds the token of the anchor.

Shapes: B rows, S tokens in a row, N anchors in a row, Q slots in a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pure import random

__all__ = [
    "anchor_width",
    "block_mask",
    "block_positions",
    "block_tokens",
    "candidates",
    "labelled_slots",
    "sample_anchors",
    "slot_weights",
    "supervised_slots",
    "take_slots",
]


def candidates(loss_mask: Tensor) -> Tensor:
    """Where an anchor may lie: the position and the next one are supervised.

    Args:
        loss_mask: ``[B, S]``, any dtype; a position is supervised where it exceeds 0.5.

    Returns:
        ``[B, S]`` bool. The last position of a row is never a candidate.

    Examples:
        >>> candidates(torch.tensor([[1, 1, 0, 1, 0, 1, 1]])).int()
        tensor([[1, 0, 0, 0, 0, 1, 0]], dtype=torch.int32)
    """
    supervised = loss_mask > 0.5
    return supervised & F.pad(supervised[..., 1:], (0, 1))


def anchor_width(loss_mask: Tensor, max_anchors: int) -> int:
    """The number of anchors a row that loses none needs: ``min(max_anchors, most candidates)``.

    This reads ``loss_mask`` on the host. Call it when a batch is built, on the CPU.

    Args:
        loss_mask: ``[B, S]``.
        max_anchors: the most anchors that a row may have, at least 1.

    Returns:
        The width, at least 1, so that a batch without candidates takes the same path as others.

    Examples:
        >>> anchor_width(torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 1, 1]]), max_anchors=512)
        3
    """
    most = int(candidates(loss_mask).sum(-1).amax()) if loss_mask.numel() else 0
    return max(1, min(max_anchors, most))


def sample_anchors(key: Tensor, loss_mask: Tensor, num_anchors: int) -> tuple[Tensor, Tensor]:
    """Draw anchors of each row from its candidates, uniformly and without replacement.

    The anchors of a row depend on its own key and mask alone: not on the rows beside it, nor on
    padding at its end. A smaller ``num_anchors`` draws a subset of what a larger one draws.

    Args:
        key: ``[B, 2]`` int64, one key a row.
        loss_mask: ``[B, S]``.
        num_anchors: the width N of the result.

    Returns:
        ``(anchors, keep)``: positions ``[B, N]`` int64 in ascending order, and ``[B, N]`` bool.
        A row with fewer candidates than N is padded at the right with index 0 and keep False.

    Examples:
        >>> mask = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0]])
        >>> sample_anchors(random.split(random.key(0), 2), mask, num_anchors=2)
        (tensor([[4, 0],
                [0, 0]]), tensor([[ True, False],
                [False, False]]))
    """
    size = loss_mask.shape[-1]
    eligible = candidates(loss_mask)
    priority = torch.where(eligible, random.uniform(key, (size,), dtype=torch.float64), 2.0)
    chosen = priority.argsort(dim=-1, stable=True)[..., :num_anchors]
    # `size` marks what is not an anchor, and sorts behind all that are.
    position = torch.where(eligible.gather(-1, chosen), chosen, size).sort(dim=-1).values
    position = F.pad(position, (0, num_anchors - position.shape[-1]), value=size)
    keep = position < size
    return torch.where(keep, position, 0), keep


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """The position ``a + j`` of each slot, counted from the start of the row.

    Args:
        anchors: ``[B, N]``.
        block_size: Q.

    Returns:
        ``[B, N, Q]`` int64; positions may lie beyond the end of the row.

    Examples:
        >>> block_positions(torch.tensor([[2, 7]]), 3)
        tensor([[[2, 3, 4],
                 [7, 8, 9]]])
    """
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def take_slots(values: Tensor, anchors: Tensor, block_size: int, *, offset: int = 0) -> Tensor:
    """What stands at ``a + offset + j`` for each slot; beyond the row, what stands at its end.

    Args:
        values: ``[B, S, ...]``.
        anchors: ``[B, N]``.
        block_size: Q.
        offset: 1 for the token that a slot predicts, 0 for the one before it.

    Returns:
        ``[B, N, Q, ...]``.

    Examples:
        >>> take_slots(torch.tensor([[10, 11, 12, 13]]), torch.tensor([[0, 2]]), 3, offset=1)
        tensor([[[11, 12, 13],
                 [13, 13, 13]]])
    """
    slots = (block_positions(anchors, block_size) + offset).clamp(max=values.shape[1] - 1)
    index = slots.flatten(1)[(...,) + (None,) * (values.dim() - 2)]
    taken = values.gather(1, index.expand(-1, -1, *values.shape[2:]))
    return taken.unflatten(1, slots.shape[1:])


def labelled_slots(loss_mask: Tensor, anchors: Tensor, keep: Tensor, block_size: int) -> Tensor:
    """The slots whose label ``a + 1 + j`` lies in the row and is supervised, in blocks to keep.

    Args:
        loss_mask: ``[B, S]``, any dtype; a position is supervised where it exceeds 0.5.
        anchors: ``[B, N]``.
        keep: ``[B, N]`` bool.
        block_size: Q.

    Returns:
        ``[B, N, Q]`` bool.

    Examples:
        >>> mask = torch.tensor([[1, 1, 1, 0, 1]])
        >>> labelled_slots(mask, torch.tensor([[0]]), torch.tensor([[True]]), 5).int()
        tensor([[[1, 1, 0, 1, 0]]], dtype=torch.int32)
    """
    inside = block_positions(anchors, block_size) + 1 < loss_mask.shape[-1]
    return take_slots(loss_mask > 0.5, anchors, block_size, offset=1) & inside & keep[..., None]


def supervised_slots(loss_mask: Tensor, anchors: Tensor, keep: Tensor, block_size: int) -> Tensor:
    """The slots of ``labelled_slots`` before the first gap, as a draft ends where one is wrong.

    ``e_j = keep * prod_{i<=j} [a + 1 + i < S] * [loss_mask at a + 1 + i > 0.5]``

    Args:
        loss_mask: ``[B, S]``.
        anchors: ``[B, N]``.
        keep: ``[B, N]`` bool.
        block_size: Q.

    Returns:
        ``[B, N, Q]`` bool. In each block the True slots come first.

    Examples:
        >>> mask = torch.tensor([[1, 1, 1, 0, 1]])
        >>> supervised_slots(mask, torch.tensor([[0]]), torch.tensor([[True]]), 4).int()
        tensor([[[1, 1, 0, 0]]], dtype=torch.int32)
    """
    return labelled_slots(loss_mask, anchors, keep, block_size).int().cumprod(-1).bool()


def slot_weights(supervised: Tensor, decay_gamma: float | None) -> Tensor:
    """The weight of each slot: ``w_j = e_j * exp(-j / gamma)``, or ``e_j`` without a gamma.

    Args:
        supervised: ``[..., Q]`` bool.
        decay_gamma: slots after which the weight has fallen by a factor of e.

    Returns:
        ``[..., Q]`` float64, so that counts stay exact and sums hardly depend on their order.

    Examples:
        >>> slot_weights(torch.tensor([True, True, False]), 7.0)
        tensor([1.0000, 0.8669, 0.0000], dtype=torch.float64)
    """
    weights = supervised.double()
    if decay_gamma is None:
        return weights
    slots = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float64)
    return weights * torch.exp(-slots / decay_gamma)


def block_tokens(
    input_ids: Tensor, anchors: Tensor, keep: Tensor, block_size: int, *, mask_token_id: int
) -> Tensor:
    """The input of each block: ``[x_a, M, ..., M]``, all mask tokens M where keep is False.

    Args:
        input_ids: ``[B, S]`` int64.
        anchors: ``[B, N]``.
        keep: ``[B, N]`` bool.
        block_size: Q.
        mask_token_id: M.

    Returns:
        ``[B, N, Q]`` int64.

    Examples:
        >>> ids, keep = torch.tensor([[5, 6, 7]]), torch.tensor([[True, False]])
        >>> block_tokens(ids, torch.tensor([[1, 0]]), keep, 3, mask_token_id=9)
        tensor([[[6, 9, 9],
                 [9, 9, 9]]])
    """
    first = torch.where(keep, input_ids.gather(1, anchors), mask_token_id)
    return F.pad(first[..., None], (0, block_size - 1), value=mask_token_id)


def block_mask(
    anchors: Tensor,
    keep: Tensor,
    context_size: int,
    block_size: int,
    *,
    window: int | None = None,
) -> Tensor:
    """What each slot sees: the context before its anchor, and its own block.

    Slot q of the block at anchor a sees context position t where ``t < a``, because the target has
    not yet run on the anchor when a block is drafted, and all slots of its own block. With a
    window w, only ``t >= a + q - (w - 1)``, and only the slots up to its own.

    Args:
        anchors: ``[B, N]``.
        keep: ``[B, N]`` bool; a block that is not kept sees nothing and is not seen.
        context_size: S.
        block_size: Q.
        window: positions that a slot of a sliding-window layer sees, itself included.

    Returns:
        ``[B, N * Q, S + N * Q]`` bool, True where a query (row) sees a key (column). Keys are the
        context, then the slots of all blocks.

    Examples:
        >>> mask = block_mask(torch.tensor([[6]]), torch.tensor([[True]]), 12, 4, window=4)
        >>> [row.nonzero().flatten().tolist() for row in mask[0]]
        [[3, 4, 5, 12], [4, 5, 12, 13], [5, 12, 13, 14], [12, 13, 14, 15]]

    References:
        The mask of DFlash, as trained in SpecForge (sgl-project/SpecForge).
    """
    num_blocks = anchors.shape[1]
    position = torch.arange(context_size, device=anchors.device)
    context = (position < anchors[..., None, None]).expand(-1, -1, block_size, -1)
    inside = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if window is not None:
        slot = block_positions(anchors, block_size)
        context = context & (position > slot[..., None] - window)
        inside = inside.tril()
    same = torch.eye(num_blocks, dtype=torch.bool, device=anchors.device)
    own = same[:, None, :, None] & inside[None, :, None, :]
    keep = keep[..., None, None]
    return torch.cat([(context & keep).flatten(1, 2), (own.flatten(2) & keep).flatten(1, 2)], -1)
