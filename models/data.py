"""From rows to batches and windows, in an order that can be resumed.

    rows = text_rows(read_texts("src/**/*.py"), tokenizer, max_length=512)
    for window, position in windows(rows, key=random.key(0), num_micro_steps=8, num_rows=4):
        result = window_grad(loss_fn)(params, window)
        ...                                    # save position: the stream goes on from there

Pure functions: files are read by ``corpus``, ``tokens`` and ``features``.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..pure import random
from .rows import Row, conversation_rows, text_rows

__all__ = [
    "Batch",
    "Position",
    "Row",
    "collate",
    "conversation_rows",
    "shard_window",
    "text_rows",
    "windows",
]

T = TypeVar("T")

Batch = dict[str, Tensor]
"""What ``collate`` makes: a micro-batch of right-padded rows, on the CPU."""

# What the order of an epoch folds into the key, where rows fold in their ids.
_NO_ROW = -1


class Position(NamedTuple):
    """Where in the stream a window starts: save ``position._asdict()``, it is all there is.

    Attributes:
        epoch: how many times the rows have been gone through.
        cursor: how many rows of this epoch have been given out.
    """

    epoch: int = 0
    cursor: int = 0


def collate(
    rows: Sequence[Row], *, key: Tensor, epoch: int = 0, pad_id: int = 0, length: int | None = None
) -> Batch:
    """A batch of rows, padded on the right.

    Args:
        rows: B rows.
        key: int64 ``[2]``, what all draws of a run start from.
        epoch: folded into each row's key, so that draws differ between epochs.
        pad_id: the token that fills up.
        length: S; default: the longest row's.

    Returns:
        ``tokens`` int64 ``[B, S]``, ``loss_mask`` bool ``[B, S]``, ``sample_id`` int64 ``[B]``,
        ``key`` int64 ``[B, 2]``, which is ``fold_in(fold_in(key, sample_id), epoch)``;
        ``supervised`` int64 ``[P]``, the flat indices ``b S + s`` of the tokens whose successors
        are labels, for a head that is computed there alone; and each feature ``[B, S, ...]``,
        padded with zeros.

    Raises:
        ValueError: no rows, one longer than ``length``, a first token that is a label, or features
            that not all rows have.

    Examples:
        >>> row = Row(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]), sample_id=4)
        >>> batch = collate([row], key=random.key(0), length=4)
        >>> batch["tokens"].tolist(), batch["supervised"].tolist()
        ([[5, 6, 7, 0]], [0, 1])
    """
    size = _batch_length(rows, length)
    sample_id = torch.tensor([row.sample_id for row in rows])
    loss_mask = _padded([row.loss_mask for row in rows], size)
    batch = {
        "tokens": _padded([row.tokens for row in rows], size, pad_id),
        "loss_mask": loss_mask,
        "sample_id": sample_id,
        "key": random.fold_in(random.fold_in(key, sample_id), epoch),
        "supervised": loss_mask.roll(-1, dims=1).flatten().nonzero().squeeze(-1),
    }
    features = [row.features or {} for row in rows]
    return batch | {name: _padded([each[name] for each in features], size) for name in features[0]}


def windows(
    rows: Sequence[Row],
    *,
    key: Tensor,
    num_micro_steps: int,
    num_rows: int | None = None,
    num_tokens: int | None = None,
    position: Position = Position(),  # noqa: B008
    num_epochs: int | None = None,
    pad_id: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[tuple[list[Batch], Position]]:
    """The windows of a run: each epoch all rows once, in an order drawn from the key and the epoch.

    A micro-batch takes rows for as long as neither limit is exceeded. The last window of an epoch
    has what is left. Window and position depend on the arguments alone, so that a stream that is
    started from a saved position goes on as if it had never stopped, with any number of ranks.

    Args:
        rows: all samples.
        key: int64 ``[2]``, for the order and for the rows' own keys; see ``collate``.
        num_micro_steps: micro-batches in a window, those of all ranks together.
        num_rows: the most rows of a micro-batch.
        num_tokens: the most tokens of a micro-batch, padding counted. One of the two is needed.
        position: where to start.
        num_epochs: where to stop; default: never.
        pad_id: the token that fills up.
        rank: which share of each window to give; see ``shard_window``.
        num_ranks: the number of shares.

    Yields:
        A window, which is a list of batches, and the position where the next one starts.

    Raises:
        ValueError: a limit is missing or not positive, there are no rows, a row is longer than
            ``num_tokens``, or the position is out of range.

    Examples:
        >>> rows = [Row(torch.arange(n), torch.arange(n) > 0, n) for n in (2, 3, 4, 5, 6)]
        >>> for window, position in windows(
        ...     rows, key=random.key(0), num_micro_steps=2, num_rows=2, num_epochs=1
        ... ):
        ...     [batch["sample_id"].tolist() for batch in window], position
        ([[6, 5], [3, 2]], Position(epoch=0, cursor=4))
        ([[4]], Position(epoch=1, cursor=0))
    """
    lengths = [len(row.tokens) for row in rows]
    _require_stream(lengths, num_micro_steps, num_rows, num_tokens, position)
    shard_window([], rank, num_ranks)
    limits = num_rows or len(rows), num_tokens or math.inf
    epochs = count(position.epoch) if num_epochs is None else range(position.epoch, num_epochs)

    def batch(epoch: int, group: list[int]) -> Batch:
        return collate([rows[i] for i in group], key=key, epoch=epoch, pad_id=pad_id)

    def stream() -> Iterator[tuple[list[Batch], Position]]:
        for epoch in epochs:
            cursor = position.cursor if epoch == position.epoch else 0
            groups = _groups(_order(key, epoch, len(rows))[cursor:], lengths, *limits)
            while window := list(islice(groups, num_micro_steps)):
                cursor += sum(map(len, window))
                after = Position(epoch, cursor) if cursor < len(rows) else Position(epoch + 1)
                yield [batch(epoch, g) for g in shard_window(window, rank, num_ranks)], after

    return stream()


def shard_window(window: Sequence[T], rank: int, num_ranks: int) -> list[T]:
    """A rank's micro-batches of a window, dealt in turn: together the ranks have each once.

    Some ranks have one fewer, or none.

    Raises:
        ValueError: ``rank`` is not below ``num_ranks``, or negative.

    Examples:
        >>> [shard_window(["a", "b", "c"], rank, 2) for rank in (0, 1)]
        [['a', 'c'], ['b']]
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(
            f"shard_window: rank must be from 0 to num_ranks-1, got {rank=} and {num_ranks=}. "
            "Give the rank within the data-parallel dimension."
        )
    return list(window[rank::num_ranks])


def _order(key: Tensor, epoch: int, num_rows: int) -> list[int]:
    epoch_key = random.fold_in(random.fold_in(key, _NO_ROW), epoch)
    return random.permutation(epoch_key, num_rows).tolist()


def _padded(tensors: list[Tensor], length: int, value: int = 0) -> Tensor:
    """``[B, length, ...]`` from tensors ``[S, ...]`` of several lengths."""
    batch = pad_sequence(tensors, batch_first=True, padding_value=value)
    trailing = [0, 0] * (batch.dim() - 2)
    return pad(batch, [*trailing, 0, length - batch.shape[1]], value=value)


def _groups(
    order: Sequence[int], lengths: Sequence[int], num_rows: int, num_tokens: float
) -> Iterator[list[int]]:
    """Cut an order of rows into micro-batches, each as large as the limits allow."""
    group: list[int] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if group and (len(group) == num_rows or (len(group) + 1) * longest > num_tokens):
            yield group
            group, longest = [], lengths[i]
        group.append(i)
    if group:
        yield group


def _batch_length(rows: Sequence[Row], length: int | None) -> int:
    if not rows:
        raise ValueError("collate: a batch must have a row, got none. Leave the micro-step out.")
    longest = max(len(row.tokens) for row in rows)
    for row in rows:
        if row.loss_mask[:1].any():
            raise ValueError(
                f"collate: the first token has no predecessor and is no label, row {row.sample_id} "
                "has loss_mask[0] = True. Set it to False."
            )
        if set(row.features or {}) != set(rows[0].features or {}):
            raise ValueError(
                f"collate: all rows must have the same features, row {row.sample_id} has "
                f"{sorted(row.features or {})} and row {rows[0].sample_id} has "
                f"{sorted(rows[0].features or {})}. Make batches of one kind of row."
            )
    if length is not None and longest > length:
        raise ValueError(
            f"collate: rows must fit into {length=}, got one of {longest} tokens. "
            "Make the rows with a smaller max_length."
        )
    return longest if length is None else length


def _require_stream(
    lengths: Sequence[int],
    num_micro_steps: int,
    num_rows: int | None,
    num_tokens: int | None,
    position: Position,
) -> None:
    limits = [each for each in (num_rows, num_tokens) if each is not None]
    if not limits or min(num_micro_steps, *limits) < 1:
        raise ValueError(
            "windows: micro-steps and limits must be positive, and one limit given, got "
            f"{num_micro_steps=}, {num_rows=} and {num_tokens=}. Give num_rows or num_tokens."
        )
    if not lengths:
        raise ValueError("windows: there must be rows to make windows of, got none.")
    if num_tokens is not None and max(lengths) > num_tokens:
        raise ValueError(
            f"windows: each row must fit into {num_tokens=}, got one of {max(lengths)} tokens. "
            "Raise the limit, or make the rows with a smaller max_length."
        )
    if position.epoch < 0 or not 0 <= position.cursor <= len(lengths):
        raise ValueError(
            f"windows: a position must lie within the {len(lengths)} rows, got {position}. "
            "Was it saved with other rows?"
        )
