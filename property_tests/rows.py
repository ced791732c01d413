"""Batches as rows: how many there are, some of them, and several batches joined.

A batch is a pytree of tensors with rows on the leading axis. Leaves that are no tensors, and
scalar tensors, belong to all rows and stay as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..pure import tree

__all__ = ["batch_list", "has_rows", "join_rows", "num_elements", "num_rows", "take_rows"]


def batch_list(batches: Any, at_most: int = 16) -> list[Any]:
    """The batches that were given: one, or the first of several.

    A tensor, a mapping, and a list or tuple of bare tensors (as data loaders return it) are one
    batch; any other iterable is a sequence of batches.

    Examples:
        >>> len(batch_list((torch.zeros(3, 2), torch.zeros(3))))
        1
        >>> len(batch_list([{"x": torch.zeros(3)}, {"x": torch.zeros(2)}]))
        2
    """
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        return [batches]
    if isinstance(batches, list | tuple) and batches:
        is_record = hasattr(batches, "_fields")
        if is_record or all(isinstance(each, Tensor) for each in batches):
            return [batches]
    return list(islice(batches, at_most))


def num_rows(batch: Any) -> int:
    """The number of rows of ``batch``.

    Raises:
        ValueError: the tensors differ in their leading size, or none has rows.

    Examples:
        >>> num_rows({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
        3
    """
    sizes = {leaf.shape[0] for leaf in tree.leaves(batch) if _is_of_rows(leaf)}
    if len(sizes) != 1:
        raise ValueError(
            f"num_rows: the tensors of a batch must have one leading size, got {sorted(sizes)}. "
            "Put rows on the leading axis of each tensor."
        )
    return sizes.pop()


def has_rows(batch: Any) -> bool:
    """Whether the tensors of ``batch`` have one leading size.

    Examples:
        >>> has_rows({"x": torch.zeros(3, 2)}), has_rows({"x": torch.zeros(())})
        (True, False)
    """
    try:
        num_rows(batch)
    except ValueError:
        return False
    return True


def num_elements(values: Any) -> int:
    """The number of elements of the tensors of a tree: what a reader has to read.

    Examples:
        >>> num_elements([{"x": torch.zeros(3, 2)}, {"x": torch.zeros(2)}, "no tensor"])
        8
    """
    return sum(leaf.numel() for leaf in tree.leaves(values) if isinstance(leaf, Tensor))


def take_rows(batch: Any, rows: Sequence[int]) -> Any:
    """The given rows of ``batch``, in the given order.

    Examples:
        >>> take_rows({"x": torch.tensor([1.0, 2.0, 3.0])}, [2, 0])
        {'x': tensor([3., 1.])}
    """
    num_rows(batch)

    def take(leaf: Any) -> Any:
        if not _is_of_rows(leaf):
            return leaf
        return leaf[torch.tensor(list(rows), dtype=torch.long, device=leaf.device)]

    return tree.map(take, batch)


def join_rows(batches: Sequence[Any]) -> Any:
    """One batch with the rows of all ``batches``.

    Raises:
        ValueError: a value that belongs to all rows differs between the batches.

    Examples:
        >>> join_rows([{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0, 3.0])}])
        {'x': tensor([1., 2., 3.])}
    """
    return tree.map(lambda *leaves: _join(leaves), *batches)


def _join(leaves: Sequence[Any]) -> Any:
    if _is_of_rows(leaves[0]):
        return torch.cat(list(leaves))
    if any(leaf is not leaves[0] and bool(leaf != leaves[0]) for leaf in leaves):
        raise ValueError(
            "join_rows: a value that belongs to all rows must be the same in each batch, "
            f"got {leaves[0]} and others. Give each row its own."
        )
    return leaves[0]


def _is_of_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
