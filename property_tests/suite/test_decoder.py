from functools import partial

import pytest
import torch
import torch.distributed as c10d
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from numden import dist
from numden.models import as_module, call, decoder, hf
from numden.property_tests import laws
from numden.pure import divide, fold, random, tree

SMALL = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rope_theta": 100.0,
}
CONFIG = decoder.Config(**SMALL)


def some_params(config, seed=0):
    """Params whose norms are not all ones, so that none can stand for another."""
    params = decoder.init(config, random.key(seed), std=0.3, dtype=torch.float64)
    leaves, structure = tree.flatten(params)
    for key, leaf in zip(random.split(random.key(seed + 1), len(leaves)), leaves, strict=True):
        if leaf.dim() == 1:
            leaf += random.uniform(key, leaf.shape) - 0.5
    return tree.unflatten(structure, leaves)


PARAMS = some_params(CONFIG)
# Float64 states of size about 1 after two blocks.
CLOSE = {"rtol": 0, "atol": 1e-12}


def some_tokens(seed, *shape):
    return random.choice(random.key(seed), CONFIG.vocab_size, shape)


def some_batch(seed, rows, length):
    mask = random.bernoulli(random.key(seed + 1), (rows, length), p=0.7)
    return {"tokens": some_tokens(seed, rows, length), "loss_mask": mask}


def supervised(batch):
    _, where = decoder.next_tokens(batch)
    return where.flatten().nonzero()[:, 0]


def reference(config, params, dtype=torch.float64):
    """transformers' Qwen3 with these params."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
    )
    # Wavelengths stay float32, as in from_pretrained.
    wavelengths = model.model.rotary_emb.inv_freq
    model.to(dtype).model.rotary_emb.inv_freq = wavelengths
    model.load_state_dict(hf.state_dict(params, config), strict=not config.tie_embeddings)
    return model.eval()


def widen_norms(model):
    """With torch's own norms: transformers' round to float32 whatever the dtype of the model is."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Qwen3RMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
def test_equivalent_transformers(tied, heads):
    shape = SMALL | {"num_heads": heads[0], "num_kv_heads": heads[1], "tie_embeddings": tied}
    config = decoder.Config(**shape)
    params = some_params(config, seed=1)
    model = widen_norms(reference(config, params))
    batch = some_batch(0, 3, 9)
    labels = batch["tokens"].masked_fill(~batch["loss_mask"], -100)
    expected = model(batch["tokens"], labels=labels, output_hidden_states=True)

    captured, final = decoder.hidden_states(params, batch["tokens"], config, layers=(0, 1))
    _, first, last = expected.hidden_states  # the last one is normed
    torch.testing.assert_close(captured[..., :8], first, rtol=0, atol=1e-10)
    torch.testing.assert_close(final, last, rtol=0, atol=1e-10)
    logits = decoder.apply(params, batch["tokens"], config)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-10)
    loss = divide(decoder.loss_terms(params, batch, config))
    # transformers computes its loss in float32.
    torch.testing.assert_close(loss.float(), expected.loss.float(), rtol=1e-6, atol=0)
    mean = cross_entropy(expected.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_to_transformers_in_training_dtypes(dtype):
    params = tree.map(lambda x: x.to(dtype), PARAMS)
    model = reference(CONFIG, params, dtype)
    tokens = some_tokens(0, 2, 7)
    assert torch.equal(decoder.apply(params, tokens, CONFIG), model(tokens).logits)


def rows(batch, *which):
    return {name: field[list(which)] for name, field in batch.items()}


def padded(batch, width, token):
    """The batch with so many more columns."""
    extra = torch.full((batch["tokens"].shape[0], width), token)
    return {
        "tokens": torch.cat([batch["tokens"], extra], dim=1),
        "loss_mask": torch.cat([batch["loss_mask"], torch.zeros_like(extra).bool()], dim=1),
    }


def assert_trees_close(a, b):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        # Gradients of sums of some ten tokens, of size up to about 10.
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def value_and_grad(batch, **options):
    def num(params):
        terms = decoder.loss_terms(params, batch, CONFIG, **options)
        return terms.num, terms

    return torch.func.grad(num, has_aux=True)(PARAMS)


batches = st.builds(some_batch, st.integers(0, 2**16), st.integers(1, 3), st.integers(2, 7))
weightings = st.sampled_from(["token", "sample", "square"])


@given(batches, weightings, st.integers(1, 3), st.integers(0, CONFIG.vocab_size - 1))
def test_padding_on_the_right_is_neutral(batch, weighting, width, token):
    grads, terms = value_and_grad(batch, weighting=weighting)
    assert_trees_close(value_and_grad(padded(batch, width, token), weighting=weighting)[1], terms)
    other = value_and_grad(padded(batch, width, 0), weighting=weighting)[0]
    assert_trees_close(other, grads)


def test_padding_tokens_are_never_read_by_others():
    batch = some_batch(3, 2, 5)
    zeros, ones = (decoder.apply(PARAMS, padded(batch, 4, t)["tokens"], CONFIG) for t in (0, 1))
    assert torch.equal(zeros[:, :5], ones[:, :5])
    assert not torch.equal(zeros[:, 5:], ones[:, 5:])


@given(batches, weightings)
def test_additive_over_rows(batch, weighting):
    window = [rows(batch, i) for i in range(len(batch["tokens"]))]
    loss_fn = partial(decoder.loss_terms, config=CONFIG, weighting=weighting)
    assert_trees_close(fold(loss_fn)(PARAMS, window), loss_fn(PARAMS, batch))


@given(batches, weightings, st.integers(1, 5))
def test_equivalent_supervised_positions_whole(batch, weighting, chunk_size):
    listed = batch | {"supervised": supervised(batch)}
    options = {"weighting": weighting, "chunk_size": chunk_size}
    assert_trees_close(value_and_grad(listed, **options), value_and_grad(batch, **options))


@given(batches)
def test_weightings_are_those_of_row_means(batch):
    means, counts = [], []
    for i in range(len(batch["tokens"])):
        terms = decoder.loss_terms(PARAMS, rows(batch, i), CONFIG)
        if terms.den:
            means.append(divide(terms))
            counts.append(terms.den.double())
    for weighting, power in (("sample", 0.0), ("square", 0.5), ("token", 1.0)):
        ratio = divide(decoder.loss_terms(PARAMS, batch, CONFIG, weighting=weighting))
        weights = [count**power for count in counts]
        expected = sum(w * m for w, m in zip(weights, means, strict=True)) / max(sum(weights), 1)
        torch.testing.assert_close(ratio, torch.as_tensor(expected).double(), **CLOSE)


def test_head_runs_on_listed_positions_alone():
    batch = some_batch(4, 2, 6)
    fewer = batch | {"supervised": supervised(batch)[:-1]}
    num_tokens = supervised(batch).numel()
    assert decoder.loss_terms(PARAMS, batch, CONFIG).den == num_tokens
    assert decoder.loss_terms(PARAMS, fewer, CONFIG).den == num_tokens - 1
    assert decoder.metrics(PARAMS, fewer, CONFIG)["accuracy"].den == num_tokens - 1


@pytest.mark.parametrize("weighting", ["token", "sample", "square"])
@pytest.mark.parametrize("fields", [("tokens", "loss_mask"), ("tokens", "loss_mask", "supervised")])
def test_nothing_supervised_gives_exact_zeros(weighting, fields):
    batch = some_batch(0, 2, 4)
    batch["loss_mask"][:] = False
    batch["loss_mask"][:, 0] = True  # there is nothing to predict a first token from
    batch["supervised"] = supervised(batch)
    grads, terms = value_and_grad({name: batch[name] for name in fields}, weighting=weighting)
    assert terms.num == terms.den == 0
    assert not any(grad.any() for grad in tree.leaves(grads))


@pytest.mark.parametrize("as_params", [lambda params: params, partial(as_module, decoder.apply)])
@pytest.mark.parametrize(
    "law", [laws.purity, laws.repeatability, laws.no_collective, laws.no_host_sync]
)
def test_loss_is_a_function_of_its_arguments(law, as_params):
    batch = some_batch(2, 2, 5)
    batch["supervised"] = supervised(batch)
    loss_fn = partial(call, partial(decoder.loss_terms, config=CONFIG))
    law(loss_fn, as_params(PARAMS), batch)


def test_labels_are_the_next_tokens():
    batch = {
        "tokens": torch.tensor([[3, 1, 4], [1, 5, 9]]),
        "loss_mask": torch.tensor([[True, True, False], [False, False, True]]),
    }
    labels, where = decoder.next_tokens(batch)
    assert labels[:, :2].tolist() == [[1, 4], [5, 9]]
    assert where.tolist() == [[True, False, False], [False, True, False]]
    terms = decoder.loss_terms(PARAMS, batch, CONFIG)
    log_probs = decoder.apply(PARAMS, batch["tokens"], CONFIG).log_softmax(-1)
    torch.testing.assert_close(terms.num, -(log_probs[0, 0, 1] + log_probs[1, 1, 9]), **CLOSE)
    assert terms.den == 2


def test_captured_states_are_outputs_of_chosen_layers():
    tokens = some_tokens(1, 2, 5)
    both, final = decoder.hidden_states(PARAMS, tokens, CONFIG, layers=(1, 0))
    shallow = PARAMS | {"layers": PARAMS["layers"][:1]}
    first, _ = decoder.hidden_states(shallow, tokens, CONFIG, layers=(0,))
    assert torch.equal(both[..., 8:], first)
    rms = both[..., :8].square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(final, PARAMS["norm"] * both[..., :8] / rms, rtol=1e-4, atol=0)
    none, _ = decoder.hidden_states(PARAMS, tokens, CONFIG)
    assert none.shape == (2, 5, 0)


@pytest.mark.parametrize("layers", [(2,), (0, -1)])
def test_refuses_layers_that_do_not_exist(layers):
    with pytest.raises(ValueError, match=r"hidden_states: layers must lie in 0..1, got layers="):
        decoder.hidden_states(PARAMS, some_tokens(0, 1, 2), CONFIG, layers=layers)


def test_positions_shift_without_effect_and_count():
    tokens = some_tokens(1, 2, 5)
    logits = decoder.apply(PARAMS, tokens, CONFIG)
    counted = torch.arange(5).expand(2, 5)
    assert torch.equal(decoder.apply(PARAMS, tokens, CONFIG, positions=counted), logits)
    # The angles, up to 100 radians, are rounded to float32.
    shifted = decoder.apply(PARAMS, tokens, CONFIG, positions=torch.arange(5) + 100)
    torch.testing.assert_close(shifted, logits, rtol=0, atol=1e-4)
    spread = decoder.apply(PARAMS, tokens, CONFIG, positions=7 * torch.arange(5))
    assert (spread - logits).abs().max() > 1e-3


@given(batches, st.integers(1, 8), st.booleans())
def test_metrics_count_hits_and_nats(batch, chunk_size, listed):
    fields = batch | {"supervised": supervised(batch)} if listed else batch
    metrics = decoder.metrics(PARAMS, fields, CONFIG, chunk_size=chunk_size)
    assert_trees_close(metrics["cross_entropy"], decoder.loss_terms(PARAMS, batch, CONFIG))
    best = decoder.apply(PARAMS, batch["tokens"], CONFIG).argmax(-1)
    hits = (best[:, :-1] == batch["tokens"][:, 1:]) & batch["loss_mask"][:, 1:]
    assert metrics["accuracy"].num == hits.sum()
    assert metrics["accuracy"].den == batch["loss_mask"][:, 1:].sum()


def test_equivalent_vmap_rows():
    batch = some_batch(5, 3, 4)

    def num(params, row):
        return decoder.loss_terms(params, tree.map(lambda x: x[None], row), CONFIG).num

    with sdpa_kernel(SDPBackend.MATH):
        per_row = torch.func.vmap(torch.func.grad(num), (None, 0))(PARAMS, batch)
    assert_trees_close(tree.map(lambda x: x.sum(0), per_row), value_and_grad(batch)[0])


def test_identical_module_pure():
    batch = some_batch(5, 3, 4)
    leaves = tree.map(lambda x: x.clone().requires_grad_(), PARAMS)
    terms = decoder.loss_terms(leaves, batch, CONFIG)
    terms.num.backward()
    module = as_module(partial(decoder.loss_terms, config=CONFIG), PARAMS)
    module_terms = module(batch)
    module_terms.num.backward()
    assert torch.equal(module_terms.num, terms.num)
    of_module = tree.map(lambda x: x.grad, dict(module.named_parameters()))
    assert torch.equal(of_module["layers.1.attn.k"], leaves["layers"][1]["attn"]["k"].grad)
    assert torch.equal(of_module["embed"], leaves["embed"].grad)


def sharded_grads(config, params, windows):
    """The gradient of a window on this rank's micro-steps, blocks sharded over ranks."""
    module = as_module(decoder.apply, params)
    for layer in module.layers:
        fully_shard(layer)
    dist.sum_gradients(fully_shard(module))
    loss_fn = partial(call, partial(decoder.loss_terms, config=config))
    mesh = init_device_mesh("cpu", (c10d.get_world_size(),))
    grads = dist.window_grad(loss_fn, mesh=mesh)(module, windows[c10d.get_rank()]).grads
    return {name: grad.full_tensor() for name, grad in grads.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_equivalent_fully_shard_whole(tied):
    config = decoder.Config(**SMALL | {"tie_embeddings": tied})
    params, batch = some_params(config), some_batch(5, 3, 6)
    windows = [[rows(batch, 0), rows(batch, 1)], [rows(batch, 2)]]
    module = as_module(partial(decoder.loss_terms, config=config), params)
    divide(module(batch)).backward()
    for grads in dist.run_local(partial(sharded_grads, config, params), 2, windows):
        for name, param in module.named_parameters():
            # Gradients of a mean, of size up to about 1.
            torch.testing.assert_close(grads[name], param.grad, **CLOSE)


def steps_of(tokens, sizes, *, cache):
    """Captured and final states of a text that is fed in pieces."""
    states = []
    for piece in tokens.split(sizes, dim=1):
        *each, cache = decoder.step(PARAMS, piece, cache, CONFIG, layers=(1, 0))
        states.append(each)
    return [torch.cat(each, dim=1) for each in zip(*states, strict=True)], cache


def empty_cache(num_rows, capacity=9):
    return decoder.init_cache(CONFIG, num_rows, capacity, dtype=torch.float64)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 2), st.integers(0, 99))
def test_equivalent_steps_whole(sizes, num_rows, seed):
    tokens = some_tokens(seed, num_rows, sum(sizes))
    states, cache = steps_of(tokens, sizes, cache=empty_cache(num_rows, sum(sizes)))
    assert cache.length == sum(sizes)
    whole = decoder.hidden_states(PARAMS, tokens, CONFIG, layers=(1, 0))
    for stepped, expected in zip(states, whole, strict=True):
        torch.testing.assert_close(stepped, expected, **CLOSE)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99))
def test_taking_tokens_back_forgets_them(kept, rejected, more, seed):
    prefix, wrong, right = some_tokens(seed, 1, 12).split([kept, rejected, 12 - kept - rejected], 1)
    right = right[:, : more + 1]
    _, cache = steps_of(prefix, kept, cache=empty_cache(1))
    _, cache = steps_of(wrong, rejected, cache=cache)
    (_, final), _ = steps_of(right, more + 1, cache=cache._replace(length=kept))
    whole = decoder.hidden_states(PARAMS, torch.cat([prefix, right], 1), CONFIG)[1]
    torch.testing.assert_close(final, whole[:, kept:], **CLOSE)


def test_rows_may_have_their_own_lengths():
    prefix, more = some_tokens(0, 2, 6).split([4, 2], dim=1)
    _, cache = steps_of(prefix, 4, cache=empty_cache(2))
    lengths = torch.tensor([1, 3])
    (_, final), cache = steps_of(more, 1, cache=cache._replace(length=lengths))
    assert cache.length.tolist() == [3, 5]
    for row, length in enumerate(lengths):
        text = torch.cat([prefix[row, :length], more[row]])[None]
        whole = decoder.hidden_states(PARAMS, text, CONFIG)[1]
        torch.testing.assert_close(final[row], whole[0, length:], **CLOSE)


def test_step_leaves_its_cache_as_it_is():
    _, cache = steps_of(some_tokens(0, 1, 3), 3, cache=empty_cache(1))
    before = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, cache)
    decoder.step(PARAMS, some_tokens(1, 1, 2), cache, CONFIG)
    assert all(map(torch.equal, cache.keys + cache.values, before.keys + before.values))


def test_step_refuses_what_does_not_fit():
    _, cache = steps_of(some_tokens(0, 1, 8), 8, cache=empty_cache(1))
    with pytest.raises(ValueError, match=r"got 2 tokens behind length=8 of capacity=9. Make a"):
        decoder.step(PARAMS, some_tokens(1, 1, 2), cache, CONFIG)


def test_layers_are_drawn_by_index():
    deeper = decoder.Config(**SMALL | {"num_layers": 3, "tie_embeddings": True})
    params = decoder.init(deeper, random.key(0))
    same = decoder.init(CONFIG, random.key(0))
    del same["head"]
    shallow = params | {"layers": params["layers"][:2]}
    assert tree.structure(shallow) == tree.structure(same)
    assert all(map(torch.equal, tree.leaves(shallow), tree.leaves(same)))
    # Of so many draws of 23 bits hardly any two are equal, so no two weights are.
    draws = torch.cat([x.flatten() for x in tree.leaves(params) if x.dim() == 2])
    assert len(draws.unique()) > 0.99 * len(draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_init_has_the_shapes_and_the_dtype(dtype):
    params, shapes = decoder.init(CONFIG, random.key(0), dtype=dtype), decoder.shapes(CONFIG)
    assert tree.structure(params) == tree.structure(shapes)
    pairs = zip(tree.leaves(params), tree.leaves(shapes), strict=True)
    assert all(a.shape == b.shape and a.dtype == dtype for a, b in pairs)


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ValueError, {"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads.*=3"),
        (ValueError, {"head_dim": 5}, "head_dim must be even.*head_dim=5"),
        (ValueError, {"num_layers": 0}, "num_layers must be positive, got num_layers=0"),
        (ValueError, {"norm_eps": -1e-6}, "norm_eps must be positive, got norm_eps=-1e-06"),
        (TypeError, {"hidden_size": 8.0}, "hidden_size must be int, got hidden_size=8.0"),
        (TypeError, {"vocab_size": True}, "vocab_size must be int, got vocab_size=True"),
        (TypeError, {"rope_theta": "1e6"}, "rope_theta must be int or float, got rope_theta='1e6'"),
        (TypeError, {"tie_embeddings": 1}, "tie_embeddings must be bool, got tie_embeddings=1"),
    ],
)
def test_config_names_the_wrong_field(error, changes, message):
    with pytest.raises(error, match=f"Config: {message}"):
        decoder.Config(**SMALL | changes)
