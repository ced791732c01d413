"""Sampling of positions for a parallel drafter, each depth fewer of those before (COD).

A parallel drafter guesses several tokens from one position, its anchor A. The guess of depth d
stands at position ``A + d`` and knows the text up to A only. At depth 0 each position is a guess;
the deeper ones would be D times as many, and are sampled: at depth d those positions stay in the
running whose predecessor was drawn at depth ``d - 1``.

Shapes: B rows, S positions, D depths, M guesses of a row.
"""

import torch
from torch import Tensor

from ..pure import random

__all__ = ["draw_depths", "list_guesses"]


def draw_depths(
    key: Tensor,
    eligible: Tensor,
    num_depths: int,
    *,
    ratio: float,
    min_ratio: float,
    documents: Tensor | None = None,
) -> Tensor:
    """Where the guesses of each depth stand.

    At depth d the candidates are eligible positions t from d on, in the document of ``t - d``,
    whose predecessor was drawn at depth ``d - 1`` (for d = 1: all of them). Of C eligible positions
    in the row ``floor((C - d) max(ratio^d, min_ratio))`` are drawn, or all candidates if those are
    fewer, uniformly.

    A row's draws depend on its own key and positions alone: not on the rows beside it, nor on
    padding at its end.

    Args:
        key: ``[B, 2]`` int64, one key a row.
        eligible: ``[B, S]`` bool, where a guess is supervised.
        num_depths: D.
        ratio: the share that stays from depth to depth.
        min_ratio: the smallest share.
        documents: ``[B, S]`` integers, which document of a packed row a position belongs to,
            negative for none; None where each row is one.

    Returns:
        ``[B, D, S]`` bool; at depth 0 all are True.

    Examples:
        >>> drawn = draw_depths(random.key(0)[None], torch.ones(1, 6, dtype=torch.bool), 3,
        ...                     ratio=0.5, min_ratio=0.1)
        >>> drawn.sum(-1)  # 6; floor(5 / 2); floor(4 / 4)
        tensor([[6, 2, 1]])

    References:
        P-EAGLE, as trained in SpecForge (sgl-project/SpecForge).
    """
    size = eligible.shape[1]
    positions = torch.arange(size, device=eligible.device)
    total = eligible.sum(-1)
    running, drawn = eligible, [torch.ones_like(eligible)]
    for depth in range(1, num_depths):
        candidates = running & (positions >= depth) & _same_document(documents, depth, eligible)
        share = max(ratio**depth, min_ratio)
        wanted = ((total - depth).clamp(min=0).double() * share).floor()
        picked = _pick(random.fold_in(key, depth), candidates, wanted)
        drawn.append(picked)
        running = _moved(picked, 1) & eligible
    return torch.stack(drawn, 1)


def _moved(flags: Tensor, by: int) -> Tensor:
    """``[B, S]`` moved right, False behind it."""
    empty = torch.zeros_like(flags[:, :by])
    return torch.cat([empty, flags], 1)[:, : flags.shape[1]]


def _same_document(documents: Tensor | None, depth: int, like: Tensor) -> Tensor:
    if documents is None:
        return torch.ones_like(like)
    before = torch.cat([torch.full_like(documents[:, :depth], -1), documents], 1)
    return (documents == before[:, : documents.shape[1]]) & (documents >= 0)


def _pick(key: Tensor, candidates: Tensor, wanted: Tensor) -> Tensor:
    draws = random.uniform(key, (candidates.shape[1],), dtype=torch.float64)
    order = torch.where(candidates, draws, 2.0).argsort(dim=-1, stable=True)
    rank = order.argsort(-1)
    return candidates & (rank < wanted[:, None])


def list_guesses(drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The guesses as lists of the length that the fullest row needs. Reads it on the host.

    Args:
        drawn: ``[B, D, S]`` bool, from ``draw_depths``.

    Returns:
        ``(anchors, depths, keep)``, each ``[B, M]``: those of depth 0 first, one for each position;
        then by depth and position. Rows are padded with anchor 0, depth 0 and keep False.

    Examples:
        >>> drawn = torch.tensor([[[1, 1, 1], [0, 1, 0]]]).bool()
        >>> list_guesses(drawn)
        (tensor([[0, 1, 2, 0]]), tensor([[0, 0, 0, 1]]), tensor([[True, True, True, True]]))
    """
    size = drawn.shape[2]
    flat = drawn.flatten(1)
    width = int(flat.sum(-1).max()) if flat.numel() else size
    order = (~flat).long().argsort(dim=-1, stable=True)[:, :width]
    keep = flat.gather(-1, order)
    depths = torch.where(keep, order // max(1, size), 0)
    anchors = torch.where(keep, order % max(1, size) - depths, 0)
    return anchors, depths, keep
