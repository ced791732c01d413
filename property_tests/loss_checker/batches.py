"""Batches to try a loss function on, drawn from those that were given."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from ...pure import tree
from ...pure.terms import LossFn
from .._mask_laws import den_of_nums
from .._value_strategies import masks, ragged_masks
from ..evaluation import evaluate, forward
from ..mask_fields import MaskField, mask_fields, mask_out
from ..rows import batch_list, has_rows, num_rows, take_rows

__all__ = [
    "as_strategy",
    "copied",
    "fewest_rows",
    "is_alive",
    "is_hollow",
    "pool_of",
    "reached",
]

MAX_ROWS = 6


def pool_of(batches: Any, join: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """The batches that were given, as ``batch_list`` takes them.

    Batches of one row are joined, so that there is something to cut.

    Raises:
        ValueError: there is none.
    """
    pool = batch_list(batches)
    if not pool:
        raise ValueError("check_loss: needs at least one batch, got none. Give a batch.")
    if len(pool) > 1 and all(has_rows(batch) and num_rows(batch) == 1 for batch in pool):
        try:
            return [join(pool)]
        except (ValueError, RuntimeError):
            return pool
    return pool


def as_strategy(pool: list[Any], *, ragged: bool = False) -> SearchStrategy[Any]:
    """Some rows of one of the batches, in their order, at most 6.

    Args:
        pool: the batches.
        ragged: whether to mask more of the fields that are recognised as labels, masks or weights:
            the end of each row from a drawn column on, the same in all of these fields.
    """
    rows = st.sampled_from(range(len(pool))).flatmap(lambda i: _rows(pool[i]))
    return rows.flatmap(_ragged) if ragged else rows


def copied(batch: Any) -> Any:
    """``batch`` with containers and tensors of its own."""
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def is_hollow(batch: Any) -> bool:
    """Whether ``batch`` looks as if there is nothing to learn from: no rows, or all masked.

    What stands in column 0 does not count, as many losses shift their labels.
    """
    if has_rows(batch) and not num_rows(batch):
        return True
    leaves = tree.leaves(batch)
    for field in mask_fields(batch):
        leaf = leaves[field.leaf]
        leaf = leaf[:, 1:] if leaf.ndim == 2 and leaf.shape[1] > 1 else leaf
        if bool((leaf == field.neutral).all()):
            return True
    return False


def reached(loss_fn: LossFn, params: Any, batch: Any) -> frozenset[str]:
    """The sums that vanish, or are NaN, when all labels and masks of ``batch`` are neutral."""
    fields = [field for field in mask_fields(batch) if field.kind != "attention"]
    if not fields:
        return frozenset()
    before = evaluate(loss_fn, params, batch)
    after = evaluate(loss_fn, params, mask_out(batch, fields))
    vanished = {name for name in before if is_alive(before[name]) and not is_alive(after[name])}
    passed = forward(loss_fn, params, batch)
    pairs = den_of_nums(passed)
    pairs |= {f"metrics[{n!r}].den": [f"metrics[{n!r}].num"] for n in passed.metrics}
    found: set[str] = set()
    for den, nums in pairs.items():
        if vanished & {den, *nums}:
            found |= {den, *nums}
    return frozenset(found)


def is_alive(value: Tensor) -> bool:
    """Whether some element is neither 0 nor NaN nor infinite."""
    return bool((value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) != 0).any())


def fewest_rows(batch: Any, fails: Callable[[Any], bool]) -> Any:
    """``batch`` without the rows that it needs not in order to fail."""
    if not has_rows(batch):
        return batch
    rows = list(range(num_rows(batch)))
    for row in list(rows):
        fewer = [each for each in rows if each != row]
        if fewer and fails(take_rows(batch, fewer)):
            rows = fewer
    return take_rows(batch, rows)


def _rows(batch: Any) -> SearchStrategy[Any]:
    if not has_rows(batch):
        return st.just(batch)
    size = num_rows(batch)
    if not size:
        return st.just(batch)
    rows = st.sets(st.integers(0, size - 1), min_size=1, max_size=MAX_ROWS)
    return rows.map(lambda rows: take_rows(batch, sorted(rows)))


@st.composite
def _ragged(draw: DrawFn, batch: Any) -> Any:
    fields = [field for field in mask_fields(batch) if field.kind != "attention"]
    if not fields or not draw(st.booleans()):
        return batch
    leaves, structure = tree.flatten(batch)
    kept: dict[torch.Size, Tensor] = {}
    for field in fields:
        leaf = leaves[field.leaf]
        if leaf.shape not in kept:
            kept[leaf.shape] = draw(_kept(leaf))
        leaves[field.leaf] = _masked(leaf, kept[leaf.shape], field)
    return tree.unflatten(structure, leaves)


def _kept(leaf: Tensor) -> SearchStrategy[Tensor]:
    return ragged_masks(leaf.shape[0], leaf.shape[1]) if leaf.ndim == 2 else masks(leaf.shape)


def _masked(leaf: Tensor, kept: Tensor, field: MaskField) -> Tensor:
    return leaf.masked_fill(~kept.to(leaf.device), field.neutral)
