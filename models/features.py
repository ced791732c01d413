"""Features of a frozen target model, computed once and kept in safetensors files."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..pure import random
from ._extras import require
from .data import Batch, collate
from .rows import Row

__all__ = ["load_features", "save_features"]

_FORMAT = "numden.features.1"
_ROW = ("tokens", "loss_mask", "sample_id")


def save_features(
    path: str | Path,
    rows: Sequence[Row],
    features_fn: Callable[[Batch], dict[str, Tensor]],
    *,
    num_rows: int = 8,
    pad_id: int = 0,
) -> None:
    """Compute features of rows, and write both to one file.

    Everything is held in memory until it is written: for a large corpus call it with slices of
    the rows and several paths.

    Args:
        path: of the file; it appears when it is complete.
        rows: samples; features that they have already are dropped.
        features_fn: from a batch on the CPU, see ``data.collate``, to tensors ``[B, S, ...]`` by
            name, such as ``hidden_states`` ``[B, S, K H]`` of K layers of the target and
            ``target_last_hidden_states`` ``[B, S, H]``. Padding is cut off.
        num_rows: how many rows a batch has.
        pad_id: the token that fills up.

    Raises:
        ImportError: ``safetensors`` is not installed.
        ValueError: there are no rows, or a feature is not ``[B, S, ...]``.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> row = Row(torch.tensor([5, 6]), torch.tensor([False, True]), sample_id=3)
        >>> with TemporaryDirectory() as folder:
        ...     save_features(
        ...         f"{folder}/f.safetensors", [row], lambda b: {"x": b["tokens"][..., None] / 2}
        ...     )
        ...     load_features(f"{folder}/f.safetensors")[0].features
        {'x': tensor([[2.5000],
                [3.0000]])}
    """
    if not rows:
        raise ValueError("save_features: there must be rows to compute features of, got none.")
    safetensors = require("safetensors.torch", "save_features")
    tensors: dict[str, Tensor] = {}
    plain = [row._replace(features=None) for row in rows]
    for start in range(0, len(plain), num_rows):
        some = plain[start : start + num_rows]
        batch = collate(some, key=random.key(0), pad_id=pad_id)
        for i, row in enumerate(_with_features(some, batch, features_fn(batch)), start=start):
            tensors |= {f"{i}.{name}": tensor for name, tensor in _tensors(row).items()}
    unfinished = Path(f"{path}.part")
    safetensors.save_file(tensors, unfinished, {"format": _FORMAT, "num_rows": str(len(rows))})
    os.replace(unfinished, path)


def load_features(*paths: str | Path) -> list[Row]:
    """The rows of files that ``save_features`` wrote, with their features.

    Raises:
        ImportError: ``safetensors`` is not installed.
        ValueError: a file was written by something else, or there is none.
    """
    if not paths:
        raise ValueError("load_features: there must be a file to read, got no path.")
    return [row for path in paths for row in _read(path)]


def _with_features(rows: Sequence[Row], batch: Batch, features: dict[str, Tensor]) -> Iterator[Row]:
    size = batch["tokens"].shape
    for name, feature in features.items():
        if name in _ROW or feature.shape[:2] != size:
            raise ValueError(
                f"save_features: a feature must be [B, S, ...], here {tuple(size)}, "
                f"and not be called one of {_ROW}, got {name} of shape {tuple(feature.shape)}. "
                "Return one vector for each token."
            )
    for b, row in enumerate(rows):
        own = {name: feature[b, : len(row.tokens)] for name, feature in features.items()}
        yield row._replace(features={name: _copy(feature) for name, feature in own.items()})


def _copy(feature: Tensor) -> Tensor:
    # A view would keep the whole batch, and safetensors refuses memory that is shared or strided.
    return feature.detach().cpu().clone(memory_format=torch.contiguous_format)


def _tensors(row: Row) -> dict[str, Tensor]:
    named = {"tokens": row.tokens, "loss_mask": row.loss_mask}
    return named | {"sample_id": torch.tensor(row.sample_id)} | (row.features or {})


def _read(path: str | Path) -> Iterator[Row]:
    safetensors = require("safetensors", "load_features")
    with safetensors.safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
        if about.get("format") != _FORMAT:
            raise ValueError(
                f"load_features: a file must have been written by save_features, {path} has "
                f"format={about.get('format')}. Compute its features again."
            )
        names: dict[int, list[str]] = {i: [] for i in range(int(about["num_rows"]))}
        for full in file.keys():  # noqa: SIM118
            i, _, name = full.partition(".")
            names[int(i)].append(name)
        for i, own in names.items():
            tensors = {name: file.get_tensor(f"{i}.{name}") for name in own}
            tokens, loss_mask, sample_id = (tensors.pop(name) for name in _ROW)
            yield Row(tokens, loss_mask, int(sample_id), tensors)
