"""What a trainer might count in a batch, by row: the candidates for a denominator."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pure import tree
from ..mask_fields import IGNORED

__all__ = ["Count", "counts"]


class Count(NamedTuple):
    """One way to count a batch.

    Attributes:
        code: as an expression on the batch, such as ``batch['labels'] != -100``.
        kind: ``"rows"``; ``"positions"``, padding included; ``"labels"``, where an integer field is
            not -100; ``"mask"``, the sum of a mask or of weights; ``"documents"``, the number of
            sample ids; ``"positions less documents"``.
        shifted: column 0 is left out, as the first token of a row is never predicted.
        by_row: the count of each row, ``[B]``, float64.
    """

    code: str
    kind: str
    shifted: bool
    by_row: Tensor


def counts(batch: Any) -> list[Count]:
    """All the ways to count ``batch``, a pytree of tensors with rows on the leading axis.

    Which ways there are depends on names and dtypes of the fields alone: integer and bool fields
    ``[B, T]`` or ``[B]``, and floats whose name speaks of a weight or a mask.

    Examples:
        >>> labels = torch.tensor([[5, 6, -100], [7, -100, -100]])
        >>> for count in counts({"labels": labels}):
        ...     print(count.code, count.by_row.tolist())
        len(batch) [1.0, 1.0]
        batch['labels'].numel() [3.0, 3.0]
        batch['labels'][:, 1:].numel() [2.0, 2.0]
        (batch['labels'] != -100).sum() [2.0, 1.0]
        (batch['labels'][:, 1:] != -100).sum() [1.0, 0.0]
    """
    fields = [
        (name, leaf)
        for name, leaf in tree.named(batch, "batch").items()
        if isinstance(leaf, Tensor) and leaf.ndim in (1, 2)
    ]
    if not fields:
        return []
    found = [Count("len(batch)", "rows", False, _ones(fields[0][1]))]
    matrix = next(((name, leaf) for name, leaf in fields if leaf.ndim == 2), None)
    if matrix:
        found += _with_shifted("{}.numel()", "positions", matrix[0], torch.ones_like(matrix[1]))
    for name, leaf in fields:
        found += _of_field(name, leaf)
    return found


def _of_field(name: str, leaf: Tensor) -> list[Count]:
    word = name.lower()
    if "sample_id" in word or "document" in word:
        return _of_documents(name, leaf)
    if leaf.dtype == torch.bool or "mask" in word or "weight" in word:
        return _with_shifted("{}.sum()", "mask", name, leaf)
    if not leaf.is_floating_point() and leaf.ndim == 2:
        return _with_shifted("({} != -100).sum()", "labels", name, leaf != IGNORED)
    return []


def _with_shifted(code: str, kind: str, name: str, values: Tensor) -> list[Count]:
    values = values.detach().double().cpu()
    if values.ndim == 1:
        return [Count(code.format(name), kind, False, values)]
    return [
        Count(code.format(name), kind, False, values.sum(1)),
        Count(code.format(f"{name}[:, 1:]"), kind, True, values[:, 1:].sum(1)),
    ]


def _of_documents(name: str, ids: Tensor) -> list[Count]:
    if ids.ndim != 2:
        return []
    documents = torch.tensor([float(row.unique().numel()) for row in ids], dtype=torch.float64)
    code, width = f"{name}.unique().numel()", ids.shape[1]
    return [
        Count(code, "documents", False, documents),
        Count(f"{name}.numel() - {code}", "positions less documents", False, width - documents),
    ]


def _ones(leaf: Tensor) -> Tensor:
    return torch.ones(leaf.shape[0], dtype=torch.float64)
