"""Architectures of Hugging Face checkpoints: how their configs and weights are called there."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from . import decoder, moe

__all__ = ["KINDS", "Kind", "Place", "kind_of", "places", "read_config", "written_config"]

Place = tuple[str | int, ...]
"""Where a weight is in the params; a last index into a tensor is that of one expert."""

Fields = dict[str, Any]

HEAD = "lm_head.weight"


class Kind(NamedTuple):
    """An architecture.

    Attributes:
        model: the module of its functions.
        architecture: the class of transformers.
        fields: names in ``config.json`` and in the config of ``model``.
        fixed: fields of ``config.json`` that ``model`` computes with one value only.
        assumed: fields of ``config`` that have one value only.
        defaults: fields of ``config.json`` that may be missing, each made of the others.
        block: weights of the i-th block, ``(config, i) -> {module: place in the block}``.
    """

    model: ModuleType
    architecture: str
    fields: dict[str, str]
    fixed: Fields
    assumed: Fields
    defaults: dict[str, Callable[[Fields], Any]]
    block: Callable[[Any, int], dict[str, Place]]


SHARED_FIELDS = {
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
"""That of ``rope_theta`` is in one of two places."""

MOE_FIELDS = SHARED_FIELDS | {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_selected",
    "moe_intermediate_size": "expert_size",
    "norm_topk_prob": "norm_topk_prob",
    "mlp_only_layers": "dense_layers",
}

FIXED: Fields = {"hidden_act": "silu", "attention_bias": False, "rope_type": "default"}
QWEN_FIXED = FIXED | {"use_sliding_window": False}

ATTENTION: dict[str, Place] = {
    "input_layernorm": ("attn_norm",),
    "self_attn.q_proj": ("attn", "q"),
    "self_attn.k_proj": ("attn", "k"),
    "self_attn.v_proj": ("attn", "v"),
    "self_attn.o_proj": ("attn", "o"),
    "post_attention_layernorm": ("mlp_norm",),
}
HEAD_NORMS: dict[str, Place] = {
    "self_attn.q_norm": ("attn", "q_norm"),
    "self_attn.k_norm": ("attn", "k_norm"),
}
GATED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
MLP: dict[str, Place] = {f"mlp.{theirs}": ("mlp", ours) for theirs, ours in GATED.items()}


def _llama_block(config: Any, index: int) -> dict[str, Place]:
    return ATTENTION | MLP


def _qwen_block(config: Any, index: int) -> dict[str, Place]:
    return ATTENTION | HEAD_NORMS | MLP


def _moe_block(config: Any, index: int) -> dict[str, Place]:
    if index in config.dense_layers:
        return _qwen_block(config, index)
    experts: dict[str, Place] = {
        f"mlp.experts.{i}.{theirs}": ("experts", ours, i)
        for i in range(config.num_experts)
        for theirs, ours in GATED.items()
    }
    return ATTENTION | HEAD_NORMS | {"mlp.gate": ("router",)} | experts


def _dense_layers(theirs: Fields) -> list[int]:
    step, num_layers = theirs.get("decoder_sparse_step", 1), theirs.get("num_hidden_layers", 0)
    named = theirs.get("mlp_only_layers") or []
    return [i for i in range(num_layers) if i in named or (i + 1) % step]


def _head_dim(theirs: Fields) -> int | None:
    width, num_heads = theirs.get("hidden_size"), theirs.get("num_attention_heads")
    return width // num_heads if width and num_heads else None


KINDS = {
    "qwen3": Kind(
        decoder, "Qwen3ForCausalLM", SHARED_FIELDS, QWEN_FIXED, {"qk_norm": True}, {}, _qwen_block
    ),
    "qwen3_moe": Kind(
        moe,
        "Qwen3MoeForCausalLM",
        MOE_FIELDS,
        QWEN_FIXED,
        {
            "qk_norm": True,
            "router": "softmax",
            "group_rule": "best",
            "num_groups": 1,
            "weight_scale": 1.0,
        },
        {
            # transformers 4 has num_experts, 5 has num_local_experts.
            "num_experts": lambda theirs: theirs.get("num_local_experts"),
        },
        _moe_block,
    ),
    "llama": Kind(
        decoder,
        "LlamaForCausalLM",
        SHARED_FIELDS,
        FIXED | {"mlp_bias": False},
        {"qk_norm": False},
        {
            "head_dim": _head_dim,
            "num_key_value_heads": lambda theirs: theirs.get("num_attention_heads"),
            "tie_word_embeddings": lambda theirs: False,
        },
        _llama_block,
    ),
}
"""By ``model_type``."""


def read_config(theirs: Mapping[str, Any], source: str) -> tuple[Kind, Any]:
    """The kind and config that a ``config.json`` describes.

    Raises:
        ValueError: another architecture, another variant of one, or a field is missing.
    """
    name = theirs.get("model_type")
    if name not in KINDS:
        raise ValueError(
            f"load: {source} must describe one of {sorted(KINDS)}, got {{'model_type': {name!r}}}. "
            "Other architectures are not supported."
        )
    kind = KINDS[name]
    # transformers 4 has rope_theta and rope_scaling; 5 has rope_parameters.
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    found = {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    found = kind.fixed | found | {key: theirs[key] for key in kind.fixed if key in theirs}
    wrong = {key: value for key, value in found.items() if value != kind.fixed[key]}
    if wrong:
        raise ValueError(
            f"load: {source} must describe a {name} with {kind.fixed}, got {wrong}. "
            "Other variants are not supported."
        )
    fields = {ours: _field(theirs, key, kind) for key, ours in kind.fields.items()}
    fields["rope_theta"] = rope.get("rope_theta", theirs.get("rope_theta"))
    if "dense_layers" in fields:
        fields["dense_layers"] = tuple(_dense_layers(dict(theirs)))
    missing = [key for key, value in fields.items() if value is None]
    if missing:
        raise ValueError(
            f"load: {source} must give the whole shape, got none for {missing}. Add it."
        )
    return kind, kind.model.Config(**fields, **kind.assumed)


def _field(theirs: Mapping[str, Any], key: str, kind: Kind) -> Any:
    value = theirs.get(key)
    return kind.defaults[key](dict(theirs)) if value is None and key in kind.defaults else value


def written_config(config: Any, dtype: str) -> Fields:
    """The ``config.json`` of a config, in the fields of transformers 4, which 5 reads too."""
    name = kind_of(config)
    kind = KINDS[name]
    fields = {theirs: getattr(config, ours) for theirs, ours in kind.fields.items()}
    fixed = {key: value for key, value in kind.fixed.items() if key != "rope_type"}
    rope = {"rope_theta": config.rope_theta, "rope_scaling": None}
    head = {"model_type": name, "architectures": [kind.architecture], "dtype": dtype}
    return head | fixed | fields | rope


def kind_of(config: Any) -> str:
    """The ``model_type`` of a config.

    Raises:
        ValueError: no architecture computes what it says.
    """
    wrong = {}
    for name, kind in KINDS.items():
        if type(config) is kind.model.Config:
            found = {key: getattr(config, key) for key in kind.assumed}
            wrong[name] = {k: value for k, value in found.items() if value != kind.assumed[k]}
            if not wrong[name]:
                return name
    raise ValueError(
        f"save: config must be what an architecture of transformers computes, got {wrong} that it "
        "does not have. Save such a model with torch.save or numden.dist.save."
    )


def places(kind: Kind, config: Any, *, tied: bool) -> dict[str, Place]:
    """Names of all weights and where they are in the params."""
    found: dict[str, Place] = {"model.embed_tokens.weight": ("embed",)}
    for index in range(config.num_layers):
        for name, place in kind.block(config, index).items():
            found[f"model.layers.{index}.{name}.weight"] = ("layers", index, *place)
    found["model.norm.weight"] = ("norm",)
    return found if tied else found | {HEAD: ("head",)}
