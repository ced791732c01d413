"""Which fields of a batch say what counts, and how to say that something does not."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..pure import tree
from .rows import join_rows, num_rows, take_rows

__all__ = ["IGNORED", "MaskField", "mask_fields", "mask_out", "pad_columns", "pad_rows"]

IGNORED = -100


class MaskField(NamedTuple):
    """A field that says which rows or positions count.

    Attributes:
        name: its place as code, such as ``batch['labels']``.
        leaf: its place among the leaves of the batch.
        kind: ``"labels"``, integers of which -100 is ignored; ``"mask"``, bools, or numbers named
            so; ``"weights"``; ``"attention"``, an attention mask.
        neutral: what says that a position does not count: -100, False or 0.
    """

    name: str
    leaf: int
    kind: Literal["labels", "mask", "weights", "attention"]
    neutral: int


def mask_fields(batch: Any) -> list[MaskField]:
    """The fields of ``batch``, a pytree of tensors, that are recognised as masks.

    These are ``[B]`` or ``[B, T]``: integers whose name speaks of a label or target or that hold
    a -100; bools; and numbers whose name speaks of a mask or a weight.

    Examples:
        >>> batch = {"labels": torch.tensor([[5, -100]]), "attention_mask": torch.ones(1, 2)}
        >>> [(field.name, field.kind) for field in mask_fields(batch)]
        [("batch['attention_mask']", 'attention'), ("batch['labels']", 'labels')]
    """
    named = tree.named(batch, "batch").items()
    found = [_field(name, index, leaf) for index, (name, leaf) in enumerate(named)]
    return [field for field in found if field is not None]


def _field(name: str, index: int, leaf: Any) -> MaskField | None:
    if not isinstance(leaf, Tensor) or leaf.ndim not in (1, 2):
        return None
    word = name.lower()
    if "attention" in word and "mask" in word:
        return MaskField(name, index, "attention", 0)
    if leaf.dtype == torch.bool or "mask" in word:
        return MaskField(name, index, "mask", 0)
    if leaf.is_floating_point():
        return MaskField(name, index, "weights", 0) if "weight" in word else None
    if "label" in word or "target" in word or bool((leaf == IGNORED).any()):
        return MaskField(name, index, "labels", IGNORED)
    return None


def mask_out(batch: Any, fields: Sequence[MaskField], where: Any = ...) -> Any:
    """``batch`` with its rows or positions at the index ``where``, or all, counted no more.

    Examples:
        >>> batch = {"labels": torch.tensor([[5, 6], [7, 8]])}
        >>> mask_out(batch, mask_fields(batch), (0, 1))
        {'labels': tensor([[   5, -100],
                [   7,    8]])}
    """
    leaves, structure = tree.flatten(batch)
    for field in fields:
        leaf = leaves[field.leaf].clone()
        leaf[where] = field.neutral
        leaves[field.leaf] = leaf
    return tree.unflatten(structure, leaves)


def pad_rows(batch: Any, num: int) -> Any:
    """``batch`` with ``num`` copies of its last row, whose labels and masks are neutral.

    Attention masks are copied: they are neutralised only where a batch has no other mask.

    Raises:
        ValueError: no field is recognised as a mask, or there is no row.
    """
    fields = _loss_masks(batch)
    if not num_rows(batch):
        raise ValueError("pad_rows: needs a row to copy, got a batch of no rows.")
    padding = mask_out(take_rows(batch, [-1] * num), fields)
    return join_rows([batch, padding])


def pad_columns(batch: Any, num: int) -> Any:
    """``batch`` with ``num`` more columns at the right, masked in labels and masks, else zeros.

    Columns are the second dim of fields that have one of the same size as the mask's.

    Raises:
        ValueError: no field ``[B, T]`` is recognised as a mask.
    """
    leaves, structure = tree.flatten(batch)
    fields = {field.leaf: field for field in mask_fields(batch)}
    widths = [leaves[field.leaf].shape[1] for field in _loss_masks(batch, need=2)]
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.ndim >= 2 and leaf.shape[1] == widths[0]:
            value = fields[index].neutral if index in fields else 0
            leaves[index] = F.pad(leaf, (*[0, 0] * (leaf.ndim - 2), 0, num), value=value)
    return tree.unflatten(structure, leaves)


def _loss_masks(batch: Any, need: int = 1) -> list[MaskField]:
    """The fields that mask the loss: attention masks only if there is no other."""
    leaves = tree.leaves(batch)
    fields = [field for field in mask_fields(batch) if leaves[field.leaf].ndim >= need]
    masks = [field for field in fields if field.kind != "attention"] or fields
    if not masks:
        raise ValueError(
            "padding: no field of the batch is recognised as labels or a mask, got "
            f"{tree.names(batch, 'batch')}. Give pad_row or pad_columns, (batch, n) -> batch."
        )
    return masks
