"""What the drafters of the DFlash family share: their batch, and the target they borrow from.

A drafter embeds the tokens of its blocks as the target does, runs ``backbone``, and reads its
logits off the target's head, corrected or not. Both are frozen, and passed beside the params as
``target``: a dict with ``embed`` ``[V, H]`` and, unless the two are tied, ``head`` ``[V, H]``, such
as the params of ``decoder``.

Shapes: B rows, S tokens in a row, N blocks in a row, Q slots in a block, H width, K captured layers
of the target, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..pure import tree
from ..pure.tree import PyTree
from . import backbone
from .anchors import anchor_width, block_tokens, sample_anchors
from .backbone import require, require_size
from .chunking import map_chunks
from .layers import embed

__all__ = [
    "Config",
    "Draft",
    "draft_states",
    "hidden_states",
    "map_blocks",
    "one_block",
    "output_head",
    "prepare",
    "require_fields",
]

Params = Any
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Config(backbone.Config):
    """What every drafter of the family has; see ``backbone.Config`` for the network.

    Attributes:
        vocab_size: V of the target.
        mask_token_id: the token in the slots that are to be drafted.
        num_anchors: the most blocks of a row that are trained.
        decay_gamma: slots after which the weight of a slot has fallen by e; None: equal weights.
        chunk_blocks: blocks whose logits are held at once; 0: all of them, without recomputation.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    vocab_size: int
    mask_token_id: int
    num_anchors: int = 512
    decay_gamma: float | None = None
    chunk_blocks: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab_size", "num_anchors"):
            require_size(self, name)
        inside = 0 <= self.mask_token_id < self.vocab_size
        require(self, "mask_token_id", inside, "a token below vocab_size")
        positive = self.decay_gamma is None or self.decay_gamma > 0
        require(self, "decay_gamma", positive, "positive or None")
        chunks = 0 <= self.chunk_blocks < math.inf
        require(self, "chunk_blocks", chunks, "finite and not negative")


class Draft(NamedTuple):
    """A drafted block.

    Attributes:
        tokens: ``[B, D]`` int64, the tokens behind the last known one.
        confidence: ``[B, D]``, the predicted probability that the target accepts each token given
            that it accepted those before; None without a confidence head.
    """

    tokens: Tensor
    confidence: Tensor | None = None


def prepare(batch: Batch, config: Config) -> Batch:
    """Draw the anchors of a batch, on the host, when it is built.

    Args:
        batch: a dict with ``loss_mask`` ``[B, S]`` and ``key`` ``[B, 2]``, one key a row.
        config: gives the most anchors in a row.

    Returns:
        The batch with ``anchors`` ``[B, N]`` and ``keep`` ``[B, N]``, N what its fullest row needs.

    Examples:
        >>> from ..pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> batch = {"loss_mask": torch.tensor([[0, 1, 1, 1]]), "key": random.key(0)[None]}
        >>> prepare(batch, config)["anchors"]
        tensor([[1, 2]])
    """
    mask = batch["loss_mask"]
    num_anchors = anchor_width(mask, config.num_anchors)
    anchors, keep = sample_anchors(batch["key"], mask, num_anchors)
    return {**batch, "anchors": anchors, "keep": keep}


def require_fields(function: str, batch: Batch, needed: Sequence[str]) -> None:
    """Check that a batch has the fields that a loss reads.

    Raises:
        ValueError: it lacks some; the message names them.
    """
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(
            f"{function}: batch must have {list(needed)}, got none of {missing}. "
            "`prepare` adds anchors and keep."
        )


def hidden_states(params: Params, batch: Batch, config: Config, target: Params) -> Tensor:
    """``backbone.apply`` on all blocks of a batch.

    Args:
        params: of ``backbone``.
        batch: a dict with ``tokens`` ``[B, S]`` int64, ``captured`` ``[B, S, K * H]``,
            ``anchors`` ``[B, N]`` int64 and ``keep`` ``[B, N]`` bool.
        config: the drafter.
        target: the frozen embedding.

    Returns:
        ``[B, N, Q, H]``.
    """
    anchors, keep = batch["anchors"], batch["keep"]
    ids = block_tokens(
        batch["tokens"], anchors, keep, config.block_size, mask_token_id=config.mask_token_id
    )
    slots = embed(ids, target["embed"].detach())
    return backbone.apply(params, batch["captured"], slots, anchors, keep, config)


def draft_states(
    params: Params, captured: Tensor, token: Tensor, config: Config, target: Params
) -> Tensor:
    """``hidden_states`` of the one block behind the last known token.

    Args:
        params: of ``backbone``.
        captured: ``[B, a, K * H]``, hidden states of the target at positions before a.
        token: ``[B]`` int64, the token at position a.
        config: the drafter.
        target: the frozen embedding.

    Returns:
        ``[B, Q, H]``.
    """
    return hidden_states(params, one_block(captured, token), config, target)[:, 0]


def one_block(captured: Tensor, token: Tensor) -> Batch:
    """The batch of the one block behind the last known token.

    Args:
        captured: ``[B, a, K * H]``, hidden states of the target at positions before a.
        token: ``[B]`` int64, the token at position a.

    Examples:
        >>> one_block(torch.ones(1, 2, 6), torch.tensor([7]))["tokens"]
        tensor([[0, 0, 7]])
    """
    num_rows, anchor = captured.shape[:2]
    anchors = torch.full((num_rows, 1), anchor, device=token.device)
    return {
        "tokens": functional.pad(token[:, None], (anchor, 0)),
        "captured": captured,
        "anchors": anchors,
        "keep": torch.ones_like(anchors, dtype=torch.bool),
    }


def output_head(target: Params) -> Tensor:
    """The target's output head ``[V, H]``, frozen: that of its own, or its embedding.

    Examples:
        >>> output_head({"embed": torch.ones(3, 2)}).shape
        torch.Size([3, 2])
    """
    return target["head" if "head" in target else "embed"].detach()


def map_blocks(
    fn: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    params: PyTree,
    slots: PyTree,
    constants: PyTree,
    *,
    chunk_size: int,
) -> tuple[PyTree, PyTree]:
    """``chunking.map_chunks`` over the blocks of all rows.

    Args:
        fn: see ``map_chunks``; it is given some blocks ``[n, ...]``.
        params: what all blocks share.
        slots: a tree of tensors ``[B, N, ...]``, differentiated.
        constants: a tree of tensors ``[B, N, ...]``, not differentiated.
        chunk_size: blocks at once; 0 for all.

    Returns:
        The trees that ``fn`` returns, of tensors ``[B, N, ...]``.

    Examples:
        >>> add = lambda params, slots, constants: (params + slots, constants * 2)
        >>> map_blocks(add, torch.tensor(1.0), torch.zeros(2, 3), torch.ones(2, 3), chunk_size=4)[0]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    leading = tree.leaves(slots)[0].shape[:2]
    slots, constants = tree.map(lambda x: x.flatten(0, 1), (slots, constants))
    values = map_chunks(fn, params, slots, constants, chunk_size=chunk_size)
    return tree.map(lambda x: x.unflatten(0, leading), values)
