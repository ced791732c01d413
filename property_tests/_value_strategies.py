"""Strategies for values: exact numbers, tensors, masks, token batches."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy
from torch import Tensor

__all__ = [
    "dyadic",
    "dyadic_tensors",
    "masks",
    "ragged_masks",
    "require_interval",
    "token_batches",
]


def dyadic(
    *, min_value: float = -4, max_value: float = 4, denominator: int = 8
) -> SearchStrategy[float]:
    """Multiples of ``1 / denominator``, whose sums and products are exact.

    Args:
        min_value: least value.
        max_value: greatest value.
        denominator: a power of two.

    Raises:
        InvalidArgument: the domain is empty or ``denominator`` is no power of two.

    Examples:
        >>> from hypothesis import find
        >>> find(dyadic(min_value=0.3), lambda x: True)
        0.375
    """
    require_interval("dyadic", "value", min_value, max_value)
    if denominator < 1 or denominator & (denominator - 1):
        raise InvalidArgument(
            f"dyadic: the denominator must be a power of two, got {denominator=}. Take 8."
        )
    low, high = math.ceil(min_value * denominator), math.floor(max_value * denominator)
    if low > high:
        raise InvalidArgument(
            f"dyadic: no multiple of 1/{denominator} lies between {min_value=} and {max_value=}."
        )
    return st.integers(low, high).map(lambda numerator: numerator / denominator)


def dyadic_tensors(
    shape: Sequence[int],
    *,
    min_value: float = -4,
    max_value: float = 4,
    denominator: int = 8,
    dtype: torch.dtype = torch.float64,
) -> SearchStrategy[Tensor]:
    """Tensors of ``dyadic`` numbers.

    Args:
        shape: of each tensor.
        min_value: least value.
        max_value: greatest value.
        denominator: a power of two.
        dtype: of each tensor.

    Examples:
        >>> from hypothesis import find
        >>> find(dyadic_tensors((2,)), lambda x: x.sum() > 1)
        tensor([0.0000, 1.1250], dtype=torch.float64)
    """
    numbers = dyadic(min_value=min_value, max_value=max_value, denominator=denominator)
    return _tensors(numbers, shape, dtype)


def masks(
    shape: Sequence[int], *, min_true: int = 0, max_true: int | None = None
) -> SearchStrategy[Tensor]:
    """Bool tensors.

    Args:
        shape: of each mask.
        min_true: least number of true elements.
        max_true: greatest number of them; all where not given.

    Raises:
        InvalidArgument: no mask has so many true elements.

    Examples:
        >>> from hypothesis import find
        >>> find(masks((3,), min_true=1), lambda mask: True)
        tensor([ True, False, False])
    """
    size = math.prod(shape)
    max_true = size if max_true is None else max_true
    require_interval("masks", "true", min_true, max_true)
    if min_true < 0 or max_true > size:
        raise InvalidArgument(
            f"masks: {min_true=} and {max_true=} must lie between 0 and the size {size}."
        )
    places = st.sets(st.integers(0, size - 1), min_size=min_true, max_size=max_true)
    return (places if size else st.just(set())).map(lambda true: _mask(shape, true))


def ragged_masks(
    rows: int, columns: int, *, min_total: int = 0, side: Literal["right", "left"] = "right"
) -> SearchStrategy[Tensor]:
    """Masks of padded rows, ``[rows, columns]``: each row is true up to its drawn length.

    Lengths of 0 are drawn too: a row that is all padding.

    Args:
        rows: number of rows.
        columns: number of columns, and so the greatest length.
        min_total: least number of true elements in all rows.
        side: where the padding is, ``"right"`` or ``"left"``.

    Raises:
        InvalidArgument: no mask has so many true elements, or ``side`` is another.

    Examples:
        >>> from hypothesis import find
        >>> find(ragged_masks(2, 3, min_total=1), lambda mask: True).int()
        tensor([[0, 0, 0],
                [1, 0, 0]], dtype=torch.int32)
    """
    if rows < 0 or columns < 0 or min_total > rows * columns:
        raise InvalidArgument(
            f"ragged_masks: {min_total=} must be at most rows * columns, got {rows=}, {columns=}."
        )
    if side not in ("right", "left"):
        raise InvalidArgument(f"ragged_masks: side must be 'right' or 'left', got {side=}.")
    lengths = st.lists(st.integers(0, columns), min_size=rows, max_size=rows)

    def mask(lengths: list[int]) -> Tensor:
        ends = torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
        prefix = torch.arange(columns) < ends
        return prefix if side == "right" else prefix.flip(1)

    return lengths.filter(lambda lengths: sum(lengths) >= min_total).map(mask)


def token_batches(
    *,
    min_rows: int = 1,
    max_rows: int = 4,
    min_columns: int = 1,
    max_columns: int = 5,
    min_vocabulary: int = 2,
    max_vocabulary: int = 5,
) -> SearchStrategy[dict[str, Tensor]]:
    """Batches of token rows, ``B`` rows of ``T`` columns over a vocabulary of ``V``.

    Fields: ``logits`` ``[B, T, V]``, dyadic, float64; ``labels`` ``[B, T]``, some of them -100;
    ``where`` ``[B, T]``, bool; ``sample_ids`` ``[B, T]``, int64: several samples may share a
    row, and no id occurs in two rows.

    Args:
        min_rows: least B.
        max_rows: greatest B.
        min_columns: least T.
        max_columns: greatest T.
        min_vocabulary: least V.
        max_vocabulary: greatest V.

    Raises:
        InvalidArgument: a domain is empty.

    Examples:
        >>> from hypothesis import find
        >>> batch = find(token_batches(), lambda batch: True)
        >>> sorted(batch), batch["logits"].dim()
        (['labels', 'logits', 'sample_ids', 'where'], 3)
    """
    require_interval("token_batches", "rows", min_rows, max_rows)
    require_interval("token_batches", "columns", min_columns, max_columns)
    require_interval("token_batches", "vocabulary", min_vocabulary, max_vocabulary)
    if min_rows < 0 or min_columns < 0 or min_vocabulary < 1:
        raise InvalidArgument(
            "token_batches: rows and columns must be at least 0 and the vocabulary at least 1, "
            f"got {min_rows=}, {min_columns=}, {min_vocabulary=}."
        )
    sizes = st.tuples(
        st.integers(min_rows, max_rows),
        st.integers(min_columns, max_columns),
        st.integers(min_vocabulary, max_vocabulary),
    )
    return sizes.flatmap(lambda size: _token_batches(*size))


def require_interval(function: str, name: str, low: float, high: float) -> None:
    """Raise ``InvalidArgument`` if ``low`` is above ``high``."""
    if low > high:
        raise InvalidArgument(f"{function}: must not have min_{name}={low} > max_{name}={high}.")


def _token_batches(rows: int, columns: int, vocabulary: int) -> SearchStrategy[dict[str, Tensor]]:
    shape = (rows, columns)
    labels = st.one_of(st.integers(0, vocabulary - 1), st.just(-100))
    return st.fixed_dictionaries(
        {
            "logits": dyadic_tensors((*shape, vocabulary)),
            "labels": _tensors(labels, shape, torch.int64),
            "where": masks(shape),
            "sample_ids": masks(shape).map(_sample_ids),
        }
    )


def _sample_ids(starts: Tensor) -> Tensor:
    """Number the samples from a mask of where they start; each row starts one."""
    starts[:, :1] = True
    return starts.reshape(-1).cumsum(0).reshape(starts.shape)


def _tensors(
    elements: SearchStrategy[Any], shape: Sequence[int], dtype: torch.dtype
) -> SearchStrategy[Tensor]:
    size = math.prod(shape)
    values = st.lists(elements, min_size=size, max_size=size)
    return values.map(lambda values: torch.tensor(values, dtype=dtype).reshape(tuple(shape)))


def _mask(shape: Sequence[int], true: set[int]) -> Tensor:
    flat = [place in true for place in range(math.prod(shape))]
    return torch.tensor(flat, dtype=torch.bool).reshape(tuple(shape))
