"""Checkpoints of each architecture: read as transformers writes them, and written as it reads."""

import json

import pytest
import torch
from moe_cases import SHAPE, make_config, make_params

from numden.models import as_module, decoder, hf, moe
from numden.models.hf_kinds import KINDS, kind_of
from numden.pure import random, tree

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
DENSE = {name: SHAPE[name] for name in SHAPE if name in decoder.Config.__dataclass_fields__}
FIELDS = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "rms_norm_eps": 1e-5,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "experts_implementation": "eager",
}
MODELS = {
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, FIELDS),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, FIELDS | EXPERTS),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, FIELDS),
}
CONFIGS = {
    "qwen3": decoder.Config(**DENSE),
    "qwen3_moe": make_config(),
    "llama": decoder.Config(**DENSE, qk_norm=False),
}

each_kind = pytest.mark.parametrize("name", sorted(KINDS))


def their_model(name, **changes):
    torch.manual_seed(1)
    model_class, config_class, fields = MODELS[name]
    model = model_class(config_class(**fields | changes)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.5)
    return model


def our_params(config, dtype=torch.float32):
    model = moe if isinstance(config, moe.Config) else decoder
    leaves, structure = tree.flatten(model.shapes(config))
    keys = random.split(random.key(0), len(leaves))
    draws = [random.normal(key, leaf.shape) / 2 for key, leaf in zip(keys, leaves, strict=True)]
    return tree.map(lambda x: x.to(dtype), tree.unflatten(structure, draws))


def run(params, config):
    model = moe if isinstance(config, moe.Config) else decoder
    return model.apply(params, TOKENS, config)


def assert_same_params(a, b):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name


def edit(folder, **changes):
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


@each_kind
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["1GB", "2KB"])
def test_reads_what_transformers_writes(tmp_path, name, tied, shard_size):
    model = their_model(name, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    config, params = hf.load(tmp_path)
    assert config == type(config)(**vars(CONFIGS[name]) | {"tie_embeddings": tied})
    assert kind_of(config) == name
    # Experts are added in another order.
    torch.testing.assert_close(run(params, config), model(TOKENS).logits, rtol=1e-5, atol=1e-5)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [2**30, 2000])
def test_roundtrip_by_transformers(tmp_path, name, dtype, shard_bytes):
    config = CONFIGS[name]
    params = our_params(config, dtype)
    hf.save(tmp_path / "ours", params, config, shard_bytes=shard_bytes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(model) is MODELS[name][0]
    model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        loaded, back = hf.load(tmp_path / folder)
        assert loaded == config
        assert_same_params(back, params)


@each_kind
def test_names_are_those_of_transformers(tmp_path, name):
    model = their_model(name)
    model.save_pretrained(tmp_path)
    names = hf.state_dict(our_params(CONFIGS[name]), CONFIGS[name])
    assert names.keys() == hf.state_dict(*reversed(hf.load(tmp_path))).keys()


def test_dense_layers_of_a_mixture(tmp_path):
    changes = {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    model = their_model("qwen3_moe", **changes)
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert isinstance(config, moe.Config)
    assert config.dense_layers == (0, 1, 2)
    torch.testing.assert_close(run(params, config), model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    hf.save(tmp_path / "ours", params, config)
    options = {"experts_implementation": "eager"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **options)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_number_of_experts_by_either_name(tmp_path):
    hf.save(tmp_path, our_params(CONFIGS["qwen3_moe"]), CONFIGS["qwen3_moe"])
    assert hf.load_config(tmp_path) == CONFIGS["qwen3_moe"]
    edit(tmp_path, num_experts=..., num_local_experts=4)
    assert hf.load_config(tmp_path) == CONFIGS["qwen3_moe"]
    edit(tmp_path, num_local_experts=...)
    with pytest.raises(ValueError, match=r"got none for \['num_experts'\]\. Add it"):
        hf.load_config(tmp_path)


def test_llama_may_leave_fields_out(tmp_path):
    config = decoder.Config(**DENSE | {"head_dim": 2, "num_kv_heads": 4}, qk_norm=False)
    hf.save(tmp_path, our_params(config), config)
    edit(tmp_path, head_dim=..., num_key_value_heads=..., tie_word_embeddings=...)
    assert hf.load_config(tmp_path) == config


def test_saves_a_module_with_experts(tmp_path):
    config, params = make_config(), make_params(make_config())
    hf.save(tmp_path, as_module(moe.apply, params), config)
    assert_same_params(hf.load(tmp_path)[1], params)


def test_names_experts_that_are_missing(tmp_path):
    config = make_config()
    hf.save(tmp_path, make_params(config), config)
    edit(tmp_path, num_experts=5)
    message = (
        r"missing: model.layers.0.mlp.experts.4.down_proj.weight, .*router|instead of \(5, 8\)"
    )
    with pytest.raises(ValueError, match=message):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"router": "sigmoid"}, {"weight_scale": 2.0}, {"qk_norm": False}]
)
def test_refuses_to_write_what_transformers_does_not_compute(tmp_path, changes):
    config = make_config(**changes)
    message = rf"save: config must be what .* got \{{'qwen3_moe': \{repr(changes)[:-1]}\}}"
    with pytest.raises(ValueError, match=message):
        hf.save(tmp_path / "new", make_params(config), config)
    assert not (tmp_path / "new").exists()
