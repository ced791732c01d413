"""Weights in Hugging Face's folder format: one safetensors file, or shards and their index.

Shards are read and written one after the other: one at most is in memory beside the params.
"""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["INDEX", "WEIGHTS", "Shapes", "read_shapes", "read_tensors", "write_tensors"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]


def read_shapes(folder: Path) -> Shapes:
    """The shapes of all weights in a folder by name, from the heads of its files.

    Raises:
        FileNotFoundError: a file is missing.
        ImportError: safetensors is not installed.
    """
    return {name: shape for shard in _shards(folder) for name, shape in _shapes_in(shard)}


def read_tensors(folder: Path, *, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """All weights in a folder with their names, one after the other."""
    for shard in _shards(folder):
        with _safetensors().safe_open(shard, framework="pt", device=str(device)) as file:
            names = file.keys()
            yield from ((name, file.get_tensor(name)) for name in names)


def write_tensors(folder: Path, weights: Mapping[str, Tensor], *, shard_bytes: int) -> None:
    """Write weights in files of at most ``shard_bytes``; a larger weight has a file of its own.

    Raises:
        ImportError: safetensors is not installed.
    """
    shards, save_file = _split(weights, shard_bytes), _safetensors("safetensors.torch").save_file
    num = len(shards)
    names = [f"model-{i + 1:05d}-of-{num:05d}.safetensors" for i in range(num)]
    for name, shard in zip(names if num > 1 else [WEIGHTS], shards, strict=True):
        tensors = {key: tensor.cpu().contiguous() for key, tensor in shard.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if num > 1:
        size = sum(tensor.nbytes for tensor in weights.values())
        files = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _shards(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise FileNotFoundError(
            f"load: the folder must hold {WEIGHTS} or {INDEX}, got {folder}. "
            "Convert other formats to safetensors first."
        )
    index = json.loads((folder / INDEX).read_text())
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def _shapes_in(shard: Path) -> list[tuple[str, tuple[int, ...]]]:
    with _safetensors().safe_open(shard, framework="pt") as file:
        names = file.keys()
        return [(name, tuple(file.get_slice(name).get_shape())) for name in names]


def _split(weights: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards, size = [{}], 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _safetensors(name: str = "safetensors") -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            "Hugging Face checkpoints need the package safetensors. pip install 'numden[hf]'"
        ) from None
