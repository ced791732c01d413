"""How much a slot of a drafted block is worth: what is lost behind it if it is rejected.

A slot is reached if all before it are accepted. With s_j the probability that slot j is, smoothed,
and e_j whether it counts, per block::

    s_j = alpha + (1 - alpha) probs_j  where e_j, else 1
    P_j = prod_{i<=j} s_i              that slot j and all before it are accepted
    U_j = sum_{i>=j} e_i P_i           the tokens that are expected from slot j on

Losses weighted by these are those of D-PACE, by the label's probability, and D-PARD, by acceptance.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from ..pure.terms import LossTerms

__all__ = ["AVERAGES", "CREDITS", "Average", "Credit", "block_average", "credit"]

Credit = Literal["full", "cumulative", "continuation"]
CREDITS: tuple[Credit, ...] = get_args(Credit)
Average = Literal["row", "anchor", "row_of_anchors"]
AVERAGES: tuple[Average, ...] = get_args(Average)


def credit(probs: Tensor, counted: Tensor, alpha: float, kind: Credit = "full") -> Tensor:
    """The weight of each slot: U_j ("full"), P_j ("cumulative") or U_j / P_j ("continuation").

    Args:
        probs: ``[..., Q]`` in [0, 1]; no gradient flows to them.
        counted: ``[..., Q]`` bool, the slots with e_j = 1.
        alpha: in [0, 1]; with 1 the weights do not depend on ``probs``.
        kind: of the weight.

    Returns:
        ``[..., Q]`` float64, 0 for slots that do not count.

    Examples:
        >>> credit(torch.tensor([0.5, 0.25]), torch.tensor([True, True]), alpha=0.5)
        tensor([1.2188, 0.4688], dtype=torch.float64)

    References:
        D-PACE and D-PARD, as trained in SpecForge (sgl-project/SpecForge).
    """
    smoothed = alpha + (1 - alpha) * probs.detach().double()
    reached = torch.where(counted, smoothed, 1).cumprod(-1)
    if kind == "cumulative":
        return torch.where(counted, reached, 0)
    expected = torch.where(counted, reached, 0).flip(-1).cumsum(-1).flip(-1)
    if kind == "continuation":
        expected = expected / reached.clamp_min(torch.finfo(reached.dtype).tiny)
    return torch.where(counted, expected, 0)


def block_average(values: Tensor, counted: Tensor, average: Average) -> LossTerms:
    """The sum of values of slots over what is averaged: rows, or blocks ("anchor").

    ========================= ================= =================================
    average                   weight of a block den
    ========================= ================= =================================
    row                       1                 rows with a block that counts
    anchor                    1                 blocks that count
    row_of_anchors            1 / (their number  rows with a block that counts
                              in the row)
    ========================= ================= =================================

    Blocks and rows without a slot that counts are in no den: padding changes nothing.

    Args:
        values: ``[B, N, Q]``, weighted already.
        counted: ``[B, N, Q]`` bool.
        average: over what.

    Returns:
        A float64 sum and a float64 den without gradient.

    Examples:
        >>> counted = torch.tensor([[[True, True], [True, False]], [[False, False]] * 2])
        >>> block_average(torch.ones(2, 2, 2), counted, "row")
        LossTerms(num=tensor(3., dtype=torch.float64), den=tensor(1., dtype=torch.float64))
    """
    blocks = torch.where(counted, values, 0).double().sum(-1)
    live = counted.any(-1).double()
    num_live = live.sum(-1, keepdim=True)
    if average == "row_of_anchors":
        blocks = blocks / num_live.clamp_min(1)
    den = live.sum() if average == "anchor" else (num_live > 0).double().sum()
    return LossTerms(blocks.sum(), den)
