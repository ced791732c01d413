"""Hugging Face checkpoints of the Qwen3, Qwen3-MoE and Llama kinds: config.json and safetensors.

The class of a config says which model computes it: ``decoder.Config`` or ``moe.Config``.
"""

import json
import operator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import decoder
from .hf_files import INDEX, WEIGHTS, Shapes, read_shapes, read_tensors, write_tensors
from .hf_kinds import HEAD, KINDS, Place, kind_of, places, read_config, written_config

__all__ = ["INDEX", "load", "load_config", "save", "state_dict"]

Params = Any


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[decoder.Config, Params]:
    """A model from a local folder.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``, or shards and their index.
        dtype: of the params; default: as stored.
        device: of the params.

    Returns:
        The config and the params: for ``moe`` where the config is a ``moe.Config``, else for
        ``decoder``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another architecture; or weights that are missing, unknown or of another shape,
            all of them named.
        ImportError: safetensors is not installed.

    References:
        Yang et al., Qwen3 Technical Report, 2025; Grattafiori et al., The Llama 3 Herd of Models,
        2024; the format is that of huggingface/safetensors.
    """
    folder = Path(folder)
    config = load_config(folder)
    kind, found = KINDS[kind_of(config)], read_shapes(folder)
    # A tied head may be stored nevertheless.
    tied = config.tie_embeddings and HEAD not in found
    params = kind.model.shapes(replace(config, tie_embeddings=tied))
    where = places(kind, config, tied=tied)
    _check_shapes(folder, found, {name: tuple(_at(params, at).shape) for name, at in where.items()})
    for name, tensor in read_tensors(folder, device=device):
        _put(params, where[name], tensor.to(dtype or tensor.dtype))
    if config.tie_embeddings and not tied and not torch.equal(params.pop("head"), params["embed"]):
        raise ValueError(
            f"load: a tied head must equal the embedding, got another {HEAD} in {folder}. "
            "Set tie_word_embeddings to false in config.json if it is not meant to be tied."
        )
    return config, params


def load_config(folder: str | Path) -> decoder.Config:
    """The config of a model in a local folder; a ``moe.Config`` of a mixture of experts.

    Weights of losses are not part of a checkpoint: a ``moe.Config`` has its defaults for them.

    Raises:
        FileNotFoundError: there is no ``config.json``.
        ValueError: the model is another one than ours compute, or a field is missing.
    """
    path = Path(folder) / "config.json"
    return read_config(json.loads(path.read_text()), str(path))[1]


def save(
    folder: str | Path, params: Params, config: decoder.Config, *, shard_bytes: int = 5 * 2**30
) -> None:
    """Write a folder that ``load`` and transformers read back bit for bit.

    Args:
        folder: is made if need be. A model that is in it already is replaced.
        params: of ``decoder`` or ``moe``, or a module made of them.
        config: of the same.
        shard_bytes: the size of a file; a larger weight has a file of its own.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: no architecture of transformers computes what ``config`` says.
    """
    folder, weights = Path(folder), state_dict(params, config)
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("config.json", WEIGHTS, INDEX):
        (folder / old).unlink(missing_ok=True)
    write_tensors(folder, weights, shard_bytes=shard_bytes)
    # Last: a folder that was written in part does not look like a model.
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(written_config(config, dtype), indent=2))


def state_dict(params: Params, config: decoder.Config) -> dict[str, Tensor]:
    """The params by the names that they have in checkpoints.

    Args:
        params: of ``decoder`` or ``moe``, or a module made of them.
        config: of the same.

    Returns:
        Detached tensors that share memory with the params.

    Examples:
        >>> from numden.pure import random
        >>> config = decoder.Config(vocab_size=16, hidden_size=8, intermediate_size=12,
        ...                         num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
        >>> sorted(state_dict(decoder.init(config, random.key(0)), config))[:2]
        ['lm_head.weight', 'model.embed_tokens.weight']
    """
    where = places(KINDS[kind_of(config)], config, tied=config.tie_embeddings)
    return {name: _at(params, place).detach() for name, place in where.items()}


def _at(params: Params, place: Place) -> Any:
    return reduce(operator.getitem, place, params)


def _put(params: Params, place: Place, tensor: Tensor) -> None:
    parent: Any = _at(params, place[:-1])
    # The first of the experts that share a tensor makes it.
    if getattr(parent, "is_meta", False):
        parent = torch.empty_like(parent, dtype=tensor.dtype, device=tensor.device)
        _put(params, place[:-1], parent)
    operator.setitem(parent, place[-1], tensor)


def _check_shapes(folder: Path, found: Shapes, expected: Shapes) -> None:
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys()),
        "wrong shape": [
            f"{name} {found[name]} instead of {shape}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ],
    }
    got = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if got:
        raise ValueError(
            f"load: the weights in {folder} must be those of its config.json, got "
            f"{'; '.join(got)}. Is the checkpoint complete, and of this model?"
        )
