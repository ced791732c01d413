import json
import sys

import pytest
import torch

from numden.models import as_module, decoder, hf
from numden.pure import random, tree

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

SHAPE = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rope_theta": 500.0,
    "norm_eps": 1e-5,
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def small(**changes):
    config = decoder.Config(**SHAPE | changes)
    # All params are draws, norms too, so that none can stand for another.
    leaves, structure = tree.flatten(decoder.shapes(config))
    keys = random.split(random.key(0), len(leaves))
    draws = [random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return config, tree.map(lambda x: x / 2, tree.unflatten(structure, draws))


def their_model(**changes):
    torch.manual_seed(1)
    fields = {
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
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields | changes)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.5)
    return model


def assert_same_params(a, b):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name


def edit_config(folder, **changes):
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not ...}
    path.write_text(json.dumps(kept))


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of ours."""
    config, params = small()
    hf.save(tmp_path, params, config)
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["1GB", "2KB"])
def test_reads_what_transformers_writes(tmp_path, tied, shard_size):
    model = their_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "2KB")
    config, params = hf.load(tmp_path)
    assert config == decoder.Config(**SHAPE, tie_embeddings=tied)
    theirs = model.model.layers[1].mlp.down_proj.weight
    assert torch.equal(params["layers"][1]["mlp"]["down"], theirs)
    assert torch.equal(decoder.apply(params, TOKENS, config), model(TOKENS).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [2**30, 2000])
def test_roundtrip_by_transformers(tmp_path, tied, dtype, shard_bytes):
    config, params = small(tie_embeddings=tied)
    params = tree.map(lambda x: x.to(dtype), params)
    hf.save(tmp_path / "ours", params, config, shard_bytes=shard_bytes)
    assert (tmp_path / "ours" / hf.INDEX).exists() == (shard_bytes == 2000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(model(TOKENS).logits, decoder.apply(params, TOKENS, config))
    model.save_pretrained(tmp_path / "theirs")
    for name in ("ours", "theirs"):
        loaded, back = hf.load(tmp_path / name)
        assert loaded == config
        assert_same_params(back, params)


def test_load_casts_on_demand(folder):
    _, params = hf.load(folder, dtype=torch.float64)
    assert_same_params(params, tree.map(lambda x: x.double(), hf.load(folder)[1]))


def test_shards_hold_at_most_the_given_bytes(tmp_path):
    config, params = small()
    hf.save(tmp_path, params, config, shard_bytes=1000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    sizes = [sum(x.nbytes for x in load_file(shard).values()) for shard in shards]
    assert max(sizes) <= 1000
    assert sum(sizes) == sum(x.nbytes for x in tree.leaves(params))
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"


@pytest.mark.parametrize("sizes", [(2**30, 1000), (1000, 2**30)])
def test_save_replaces_an_older_model(tmp_path, sizes):
    config, params = small()
    hf.save(tmp_path, tree.map(torch.zeros_like, params), config, shard_bytes=sizes[0])
    hf.save(tmp_path, params, config, shard_bytes=sizes[1])
    assert_same_params(hf.load(tmp_path)[1], params)


def test_saves_a_module(tmp_path):
    config, params = small()
    hf.save(tmp_path, as_module(decoder.apply, params), config)
    assert_same_params(hf.load(tmp_path)[1], params)


def test_reads_the_rope_field_of_transformers_4(folder):
    edit_config(folder, rope_theta=1234.0, rope_scaling=None, rope_parameters=...)
    assert hf.load_config(folder).rope_theta == 1234.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"got \{'model_type': 'gpt2'\}. Other architectures"),
        ({"model_type": ...}, r"got \{'model_type': None\}"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "'hidden_act': 'gelu'.*bias': True"),
        ({"use_sliding_window": True}, r"got \{'use_sliding_window': True\}"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"got \{'rope_type': 'yarn'\}"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"got \{'rope_type': 'linear'\}"),
        ({"head_dim": ..., "rope_theta": ...}, r"got none for \['head_dim', 'rope_theta'\]"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    ],
)
def test_refuses_other_architectures(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


def test_names_all_weights_that_do_not_fit(folder):
    def edit(weights):
        del weights["model.norm.weight"], weights["model.layers.1.self_attn.q_norm.weight"]
        weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
        weights["lm_head.weight"] = torch.zeros(13, 9)

    edit_weights(folder, edit)
    message = (
        r"missing: model.layers.1.self_attn.q_norm.weight, model.norm.weight; "
        r"unknown: model.layers.2.mlp.up_proj.weight; "
        r"wrong shape: lm_head.weight \(13, 9\) instead of \(13, 8\). Is the checkpoint complete"
    )
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


def test_untied_model_needs_its_head(folder):
    edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"got missing: lm_head.weight. Is"):
        hf.load(folder)


def test_tied_head_may_be_stored_if_it_is_the_embedding(folder):
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="a tied head must equal the embedding, got another lm_h"):
        hf.load(folder)
    embedding = "model.embed_tokens.weight"
    edit_weights(folder, lambda weights: weights["lm_head.weight"].copy_(weights[embedding]))
    config, params = hf.load(folder)
    assert config.tie_embeddings
    assert "head" not in params


def test_names_a_missing_file(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold model.safetensors or .*, got"):
        hf.load(folder)


def test_shard_that_the_index_names_but_is_missing(tmp_path):
    config, params = small()
    hf.save(tmp_path, params, config, shard_bytes=1000)
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of"):
        hf.load(tmp_path)


def test_says_how_to_get_safetensors(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"package safetensors. pip install 'numden\[hf\]'"):
        hf.load(folder)
