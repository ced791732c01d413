"""Qwen3 checkpoints in Hugging Face's folder format: ``config.json`` and safetensors.

Shards are read and written one after the other: one at most is in memory beside the params.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import decoder

__all__ = ["load", "load_config", "save", "state_dict"]

Params = Any
Shapes = dict[str, tuple[int, ...]]
Place = tuple[str | int, ...]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
"""Names in ``config.json`` and in ``decoder.Config``; that of ``rope_theta`` has changed."""

FIXED = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_type": "default",
}
"""What ``decoder`` computes and its config cannot change."""

BLOCK: dict[str, Place] = {
    "input_layernorm": ("attn_norm",),
    "self_attn.q_proj": ("attn", "q"),
    "self_attn.k_proj": ("attn", "k"),
    "self_attn.v_proj": ("attn", "v"),
    "self_attn.o_proj": ("attn", "o"),
    "self_attn.q_norm": ("attn", "q_norm"),
    "self_attn.k_norm": ("attn", "k_norm"),
    "post_attention_layernorm": ("mlp_norm",),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.up_proj": ("mlp", "up"),
    "mlp.down_proj": ("mlp", "down"),
}
"""Modules of one block and where their weights are in its params."""


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[decoder.Config, Params]:
    """A Qwen3 model from a local folder.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``, or shards and their index.
        dtype: of the params; default: as stored.
        device: of the params.

    Returns:
        The config and the params for ``decoder``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another architecture; or weights that are missing, unknown or of another shape,
            all of them named.
        ImportError: safetensors is not installed.

    References:
        Yang et al., Qwen3 Technical Report, 2025; the format is that of huggingface/safetensors.
    """
    config, shards = load_config(folder), _shards(Path(folder))
    found = {name: shape for shard in shards for name, shape in _shapes_in(shard).items()}
    # A tied head may be stored nevertheless.
    tied = config.tie_embeddings and HEAD not in found
    params = decoder.shapes(replace(config, tie_embeddings=tied))
    places = _places(config.num_layers, tied=tied)
    _check_shapes(
        folder, found, {name: tuple(_at(params, at).shape) for name, at in places.items()}
    )
    for name, tensor in _tensors(shards, device):
        _at(params, places[name][:-1])[places[name][-1]] = tensor.to(dtype or tensor.dtype)
    if config.tie_embeddings and not tied and not torch.equal(params.pop("head"), params["embed"]):
        raise ValueError(
            f"load: a tied head must equal the embedding, got another {HEAD} in {folder}. "
            "Set tie_word_embeddings to false in config.json if it is not meant to be tied."
        )
    return config, params


def load_config(folder: str | Path) -> decoder.Config:
    """The config of a Qwen3 model in a local folder.

    Raises:
        FileNotFoundError: there is no ``config.json``.
        ValueError: the model is another one than ``decoder`` computes, or a field is missing.
    """
    path = Path(folder) / "config.json"
    theirs = json.loads(path.read_text())
    # transformers 4 has rope_theta and rope_scaling; 5 has rope_parameters.
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    found = {"model_type": None, "rope_type": rope.get("rope_type", "default")}
    found = FIXED | found | {name: theirs[name] for name in FIXED if name in theirs}
    wrong = {name: value for name, value in found.items() if value != FIXED[name]}
    if wrong:
        raise ValueError(
            f"load: {path} must describe a decoder with {FIXED}, got {wrong}. "
            "Other architectures are not supported."
        )
    fields = {ours: theirs.get(name) for name, ours in FIELDS.items()}
    fields["rope_theta"] = rope.get("rope_theta", theirs.get("rope_theta"))
    missing = [name for name, value in fields.items() if value is None]
    if missing:
        raise ValueError(f"load: {path} must give the whole shape, got none for {missing}. Add it.")
    return decoder.Config(**fields)


def save(
    folder: str | Path, params: Params, config: decoder.Config, *, shard_bytes: int = 5 * 2**30
) -> None:
    """Write a folder that ``load`` and transformers read back bit for bit.

    Args:
        folder: is made if need be. A model that is in it already is replaced.
        params: of ``decoder``, or a module made of them.
        config: of ``decoder``.
        shard_bytes: the size of a file; a larger weight has a file of its own.

    Raises:
        ImportError: safetensors is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("config.json", WEIGHTS, INDEX):
        (folder / old).unlink(missing_ok=True)
    weights = state_dict(params, config)
    _write(folder, _split(weights, shard_bytes))
    # Last: a folder that was written in part does not look like a model.
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(_their_config(config, dtype), indent=2))


def state_dict(params: Params, config: decoder.Config) -> dict[str, Tensor]:
    """The params by the names that transformers' ``Qwen3ForCausalLM`` gives them.

    Args:
        params: of ``decoder``, or a module made of them.
        config: of ``decoder``.

    Returns:
        Detached tensors that share memory with the params.

    Examples:
        >>> from numden.pure import random
        >>> config = decoder.Config(vocab_size=16, hidden_size=8, intermediate_size=12,
        ...                         num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
        >>> sorted(state_dict(decoder.init(config, random.key(0)), config))[:2]
        ['lm_head.weight', 'model.embed_tokens.weight']
    """
    places = _places(config.num_layers, tied=config.tie_embeddings)
    return {name: _at(params, place).detach() for name, place in places.items()}


def _places(num_layers: int, *, tied: bool) -> dict[str, Place]:
    places: dict[str, Place] = {"model.embed_tokens.weight": ("embed",)}
    for index in range(num_layers):
        for name, place in BLOCK.items():
            places[f"model.layers.{index}.{name}.weight"] = ("layers", index, *place)
    places["model.norm.weight"] = ("norm",)
    return places if tied else places | {HEAD: ("head",)}


def _at(params: Params, place: Place) -> Any:
    return reduce(getitem, place, params)


def _check_shapes(folder: str | Path, found: Shapes, expected: Shapes) -> None:
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


def _shapes_in(shard: Path) -> Shapes:
    with _safetensors().safe_open(shard, framework="pt") as file:
        names = file.keys()
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def _tensors(shards: list[Path], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    for shard in shards:
        with _safetensors().safe_open(shard, framework="pt", device=str(device)) as file:
            names = file.keys()
            yield from ((name, file.get_tensor(name)) for name in names)


def _split(weights: dict[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards, size = [{}], 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    save_file = _safetensors("safetensors.torch").save_file
    num = len(shards)
    names = [f"model-{i + 1:05d}-of-{num:05d}.safetensors" for i in range(num)]
    for name, shard in zip(names if num > 1 else [WEIGHTS], shards, strict=True):
        tensors = {key: tensor.cpu().contiguous() for key, tensor in shard.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if num > 1:
        size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        files = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _their_config(config: decoder.Config, dtype: str) -> dict[str, Any]:
    # The fields of transformers 4, which 5 reads too.
    fields = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    fixed = {name: value for name, value in FIXED.items() if name != "rope_type"}
    rope = {"rope_theta": config.rope_theta, "rope_scaling": None}
    return {"architectures": ["Qwen3ForCausalLM"], "dtype": dtype} | fixed | fields | rope


def _safetensors(name: str = "safetensors") -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            "Hugging Face checkpoints need the package safetensors. pip install 'numden[hf]'"
        ) from None
