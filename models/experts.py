"""Experts of a mixture: gated MLPs of which each token runs through a few.

Shapes are static and nothing is read on the host; no token is dropped and none is computed twice.
Tokens are sorted by expert, and each expert runs on its own.

Shapes: T tokens, H width, E experts, k of them for each token, P ranks of ``E / P`` experts each,
M width of an expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Exchange", "mix"]

Params = Any

Exchange = Callable[[Tensor], Tensor]
"""``[P, ...] -> [P, ...]``: sends part p to rank p and returns the parts sent here, by rank.

``functools.partial(dist.all_to_all, axis=mesh["ep"])``. All ranks call it with the same shapes.
"""


def mix(
    experts: Params,
    x: Tensor,
    selected: Tensor,
    weights: Tensor,
    *,
    num_experts: int,
    exchange: Exchange | None = None,
) -> Tensor:
    """``Σ_j w_j · expert_j(x)`` over selected j, where ``expert(x) = down(silu(gate x) · up x)``.

    Cost: torch's grouped matmul, where device, dtype and sizes allow it, computes the ``T k`` rows
    of the sorted tokens, k / E of running all experts on all tokens. Elsewhere (float64, odd sizes)
    rows are put into blocks of one expert each, at most twice as many rows, and the weights that
    blocks read are copied, about two copies of them.

    With P > 1 ranks each sends all its tokens to all, and they send back sums over their own
    experts: static shapes that are exact for any routing. Per rank and direction it is ``P T H``
    numbers, against up to ``min(k, P) T H`` if tokens went only where they are needed: cheap for P
    up to about k. Buffers have ``P T min(k, E / P)`` rows, of which the grouped matmul computes
    only those in use, and blocks compute all.

    Args:
        experts: ``gate`` and ``up`` ``[E / P, M, H]``, ``down`` ``[E / P, H, M]``, those of this
            rank; rank p has experts ``p E / P`` and on. DTensors stand for their local parts.
        x: ``[T, H]``; T is the same on all P ranks.
        selected: ``[T, k]`` int64, distinct experts of each token.
        weights: ``[T, k]``.
        num_experts: E.
        exchange: how ranks pass tokens on; needed where P > 1.

    Returns:
        ``[T, H]``. Experts without tokens get gradients that are exact zeros.

    Raises:
        ValueError: ``experts`` holds no P-th part of E experts, or P > 1 without ``exchange``.

    Examples:
        >>> eye = torch.eye(2).expand(3, 2, 2)
        >>> mix({"gate": eye, "up": eye, "down": eye}, torch.tensor([[1.0, 2.0]]),
        ...     torch.tensor([[0, 2]]), torch.tensor([[0.25, 0.5]]), num_experts=3)
        tensor([[0.5483, 2.6424]])

    References:
        Gale et al., "MegaBlocks", 2022, for blocks; Lepikhin et al., "GShard", 2020, for exchange.
    """
    experts = {name: _local(experts[name]) for name in experts}
    num_local = experts["gate"].shape[0]
    if num_local == num_experts:
        return _mix_local(experts, x, selected, weights, block=_block_size(selected, num_experts))
    num_parts = _num_parts(num_local, num_experts)
    if exchange is None:
        raise ValueError(
            f"mix: experts that are on {num_parts} ranks need exchange, got None. Give "
            'functools.partial(dist.all_to_all, axis=mesh["ep"]).'
        )
    sent = x.expand(num_parts, *x.shape)
    first = num_local * torch.arange(num_parts, device=x.device)
    # Ids travel with the weights, as floats: exact to 2^24.
    ids = (selected - first[:, None, None]).to(weights.dtype)
    choice = torch.cat([ids, weights.expand(num_parts, *weights.shape)], dim=-1)
    tokens, choice = exchange(sent).flatten(0, 1), exchange(choice).flatten(0, 1)
    ids, factors = choice.chunk(2, dim=-1)
    ids = ids.detach().to(torch.int64)
    mixed = _mix_local(experts, tokens, ids, factors, block=_block_size(ids, num_experts))
    return exchange(mixed.unflatten(0, sent.shape[:2])).sum(dim=0)


def _local(weight: Any) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _num_parts(num_local: int, num_experts: int) -> int:
    if num_local == 0 or num_experts % num_local:
        raise ValueError(
            f"mix: each rank must hold the same share of num_experts={num_experts}, got "
            f"{num_local} experts. Cut them along dim 0 into equal parts."
        )
    return num_experts // num_local


def _mix_local(experts: Params, x: Tensor, ids: Tensor, weights: Tensor, *, block: int) -> Tensor:
    """The experts of this rank; ids outside of ``[0, E / P)`` are of others and add 0."""
    num_local, inner, width = experts["gate"].shape
    if _has_grouped_mm(x, inner, width):
        layout = _layout(ids, num_local, block=1)
        matmul = partial(_grouped_mm, ends=layout.ends)
    else:
        layout = _layout(ids, num_local, block=block)
        matmul = partial(_block_mm, block_experts=layout.block_experts, block=block)
    rows = torch.where(layout.used.unsqueeze(-1), x[layout.tokens], 0.0)
    hidden = functional.silu(matmul(rows, experts["gate"])) * matmul(rows, experts["up"])
    # Rows that are not in use are uninitialised in a grouped matmul: select, never multiply by 0.
    outputs = torch.where(
        layout.local.unsqueeze(-1), matmul(hidden, experts["down"])[layout.slots], 0.0
    )
    return torch.einsum("tk,tkh->th", weights.to(outputs.dtype), outputs)


class _Layout(NamedTuple):
    """Where each pair of a token and an expert has its row; R rows in N blocks.

    Attributes:
        tokens: ``[R]``, the token of each row.
        used: ``[R]`` bool, whether the row holds a pair.
        slots: ``[T, k]``, the row of each pair; any for experts of other ranks.
        local: ``[T, k]`` bool, whether the expert is of this rank.
        ends: ``[E]`` int32, the row behind the last one of each expert.
        block_experts: ``[N]``, the expert of each block.
    """

    tokens: Tensor
    used: Tensor
    slots: Tensor
    local: Tensor
    ends: Tensor
    block_experts: Tensor


def _layout(ids: Tensor, num_local: int, *, block: int) -> _Layout:
    """Rows sorted by expert, each expert's filled up to a multiple of ``block``."""
    (num_tokens, k), device = ids.shape, ids.device
    local = (ids >= 0) & (ids < num_local)
    # Experts of other ranks are sorted behind all others.
    keys = torch.where(local, ids, num_local).flatten()
    pairs = torch.arange(keys.shape[0], device=device)
    ranks = torch.empty_like(pairs).scatter(0, keys.argsort(stable=True), pairs)
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=device)
    counts = counts.scatter_add(0, keys, torch.ones_like(keys))
    sizes = (counts + block - 1) // block * block
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    num_rows = _num_blocks(num_tokens * min(k, num_local), num_local, block) * block
    # One more row, for what is not of this rank.
    slots = torch.where(local.flatten(), ranks + shift[keys], num_rows)
    tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    tokens = tokens.scatter(0, slots, pairs // k)[:-1]
    ends = sizes[:-1].cumsum(0)
    used = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)
    used = used.scatter(0, slots, True)[:-1]
    firsts = torch.arange(0, num_rows, block, device=device)
    return _Layout(
        tokens,
        used,
        torch.where(local, slots.unflatten(0, ids.shape), 0),
        local,
        ends.to(torch.int32),
        torch.searchsorted(ends, firsts, right=True).clamp_max(num_local - 1),
    )


def _num_blocks(num_pairs: int, num_local: int, block: int) -> int:
    # An expert fills at most one block in part.
    return (num_pairs + num_local * (block - 1)) // block


def _block_size(ids: Tensor, num_experts: int) -> int:
    """The rows that each expert has in balance, so that padding at most doubles their number."""
    return max(1, -(-ids.numel() // num_experts))


def _has_grouped_mm(x: Tensor, *sizes: int) -> bool:
    if not hasattr(functional, "grouped_mm"):
        return False
    if any(size * x.element_size() % 16 for size in sizes):
        return False
    if x.device.type == "cpu":
        return x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    # Others have a fallback that waits for the counts on the host.
    fast = x.device.type == "cuda" and x.dtype == torch.bfloat16
    return fast and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _grouped_mm(rows: Tensor, weights: Tensor, *, ends: Tensor) -> Tensor:
    return functional.grouped_mm(rows, weights.transpose(-1, -2), offs=ends)


def _block_mm(rows: Tensor, weights: Tensor, *, block_experts: Tensor, block: int) -> Tensor:
    blocks = rows.unflatten(0, (block_experts.shape[0], block))
    return torch.bmm(blocks, weights[block_experts].transpose(-1, -2)).flatten(0, 1)
