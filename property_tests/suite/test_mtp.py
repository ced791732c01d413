import dataclasses
import functools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_cases import TARGET, VOCAB, WIDTH, make_batch, make_config, make_params, normal, take

from numden import pure
from numden.models import decoder, mtp, mtp_draft
from numden.models.decoding import greedy, speculative_greedy
from numden.models.module import as_module, call
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.pure import random, tree

CONTEXTS = ["sequence", "prefix"]
each_context = pytest.mark.parametrize("context", CONTEXTS)
few_examples = settings(max_examples=3)


def bound(config):
    return functools.partial(mtp.loss_terms, config=config, target=TARGET)


def assert_close(a, b, *, rtol=1e-9, atol=1e-11):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(x, y, msg=message, rtol=rtol, atol=atol)


def value_and_grads(params, batch, config):
    """Sums, metrics, and the gradient of all sums together, each with its weight."""

    def total(params):
        terms, metrics = mtp.loss_terms(params, batch, config, TARGET)
        weighted = [config.weights[name] * num for name, num in terms.num.items()]
        return torch.stack(weighted).sum(), (terms, metrics)

    grads, (terms, metrics) = torch.func.grad(total, has_aux=True)(params)
    return {"grads": grads, "terms": terms, "metrics": metrics}


# The network.


def naive_norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (1 + weight)


def naive_turn(x, position, config):
    dims = config.rotary_dim or config.head_dim
    half, turned = dims // 2, x.clone()
    for i in range(half):
        angle = position * config.rope_theta ** (-2 * i / dims)
        a, b = x[..., i], x[..., i + half]
        turned[..., i] = a * math.cos(angle) - b * math.sin(angle)
        turned[..., i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def naive_outputs(params, batch, config, row):
    """One position and one step at a time, each key looked up: ``[step][position]``."""
    layer, attn, dim = params["layer"], params["layer"]["attn"], config.head_dim
    tokens = batch["tokens"][row].tolist()
    samples = batch["sample_ids"][row].tolist() if "sample_ids" in batch else [0] * len(tokens)
    hidden, entries, outputs = list(batch["final"][row]), [], []
    for step in range(config.num_steps):
        keys, queries, inputs = [], [], []
        for t in range(len(tokens)):
            token = tokens[t + step + 1] if t + step + 1 < len(tokens) else 0
            read = naive_norm(TARGET["embed"][token], params["embed_norm"])
            said = naive_norm(hidden[t], params["hidden_norm"])
            inputs.append(params["fuse"] @ torch.cat([read, said]))
            normed = naive_norm(inputs[t], layer["attn_norm"])
            heads = (attn["q"] @ normed).reshape(config.num_heads, -1)
            q = naive_norm(heads[:, :dim], attn["q_norm"])
            k = naive_norm((attn["k"] @ normed).reshape(-1, dim), attn["k_norm"])
            v = (attn["v"] @ normed).reshape(-1, dim)
            at = t + step + 1
            queries.append((naive_turn(q, at, config), heads[:, dim:]))
            keys.append((naive_turn(k, at, config), v))
        entries.append(keys)
        said = []
        for t, (q, gates) in enumerate(queries):
            near = [i for i in range(t + 1) if samples[i] == samples[t]]
            if config.chain_context == "sequence":
                seen = [entries[step][i] for i in near]
            else:
                seen = [entries[0][i] for i in near] + [entries[j][t] for j in range(1, step + 1)]
            mixed = []
            for head in range(config.num_heads):
                group = head // (config.num_heads // config.num_kv_heads)
                dots = torch.stack([q[head] @ k[group] for k, _ in seen]) / math.sqrt(dim)
                mixed.append(dots.softmax(0) @ torch.stack([v[group] for _, v in seen]))
            mixed = torch.stack(mixed)
            mixed = mixed * torch.sigmoid(gates) if config.output_gate else mixed
            x = inputs[t] + attn["o"] @ mixed.flatten()
            normed, mlp = naive_norm(x, layer["mlp_norm"]), layer["mlp"]
            gate = mlp["gate"] @ normed
            x = x + mlp["down"] @ (gate * torch.sigmoid(gate) * (mlp["up"] @ normed))
            said.append(naive_norm(x, params["norm"]))
        hidden = said
        outputs.append(said)
    return outputs


@each_context
@pytest.mark.parametrize("num_samples", [None, 3])
@pytest.mark.parametrize("kind", [{}, {"rotary_dim": 2, "output_gate": True}])
def test_equivalent_network_key_by_key(context, num_samples, kind):
    config = make_config(chain_context=context, **kind)
    params, batch = make_params(config), make_batch(num_rows=2, size=7, num_samples=num_samples)
    hidden = mtp.apply(params, batch, config, TARGET)
    for row in range(2):
        expected = torch.stack(
            [torch.stack(each) for each in naive_outputs(params, batch, config, row)], 1
        )
        # Angles are float32 in the tables and float64 here.
        torch.testing.assert_close(hidden[row], expected, rtol=1e-5, atol=1e-5)


def test_equivalent_single_step_by_its_formula():
    """The loss from the network's output, token by token."""
    config = make_config(num_steps=1)
    params, batch = make_params(config), make_batch()
    hidden = mtp.apply(params, batch, config, TARGET)
    num, den, correct = 0.0, 0, 0
    for b in range(3):
        for t in range(9 - 2):
            if batch["loss_mask"][b, t + 2]:
                scores, label = TARGET["head"] @ hidden[b, t, 0], int(batch["tokens"][b, t + 2])
                num -= scores.log_softmax(-1)[label].item()
                correct += int(scores.argmax() == label)
                den += 1
    terms, metrics = mtp.loss_terms(params, batch, config, TARGET)
    assert terms.num["step_0"].item() == pytest.approx(num, rel=1e-12)
    assert terms.den["step_0"] == den
    assert (metrics["accuracy"].num, metrics["accuracy"].den) == (correct, den)


@each_context
def test_steps_read_no_token_that_is_not_known(context):
    """Step j at t knows the tokens up to t + 1 + j, and final states up to t."""
    config = make_config(chain_context=context)
    params, batch = make_params(config), make_batch(num_rows=1)
    before, t = mtp.apply(params, batch, config, TARGET), 3
    for step in range(config.num_steps):
        tokens, final = batch["tokens"].clone(), batch["final"].clone()
        tokens[:, t + step + 2 :] = (tokens[:, t + step + 2 :] + 1) % VOCAB
        final[:, t + 1 :] += 1
        after = mtp.apply(params, batch | {"tokens": tokens, "final": final}, config, TARGET)
        assert torch.equal(before[:, : t + 1, : step + 1], after[:, : t + 1, : step + 1])
        tokens = batch["tokens"].clone()
        tokens[:, t + step + 1] = (tokens[:, t + step + 1] + 1) % VOCAB
        after = mtp.apply(params, batch | {"tokens": tokens}, config, TARGET)
        assert not torch.equal(before[:, t, step], after[:, t, step])


@each_context
def test_equivalent_first_of_several_steps_single(context):
    config = make_config(chain_context=context, step_weights=(1.0, 0.0, 0.0))
    params, batch = make_params(config), make_batch()
    several = value_and_grads(params, batch, config)
    single = value_and_grads(params, batch, make_config(num_steps=1))
    assert_close(several["grads"], single["grads"])
    assert_close(several["terms"].num["step_0"], single["terms"].num["step_0"])


@each_context
def test_gradients_flow_through_the_chain(context):
    """The last step alone teaches the first what to say."""
    config = make_config(chain_context=context, step_weights=(0.0, 0.0, 1.0))
    batch = make_batch()
    final = batch["final"].requires_grad_()
    terms, _ = mtp.loss_terms(make_params(config), batch, config, TARGET)
    terms.num["step_2"].backward()
    assert final.grad is not None
    assert final.grad.abs().sum() > 0.1


# Labels.


@pytest.mark.parametrize(
    ("step", "labels", "supervised"),
    [(0, [12, 13, 14, 0, 0], [1, 1, 1, 0, 0]), (2, [14, 0, 0, 0, 0], [1, 0, 0, 0, 0])],
)
def test_labels_of_a_row(step, labels, supervised):
    tokens = torch.arange(10, 15)[None]
    batch = {"tokens": tokens, "loss_mask": torch.ones(1, 5)}
    found, counted = mtp.labels(batch, make_config())
    assert found[0, :, step].tolist() == labels
    assert counted[0, :, step].int().tolist() == supervised


def test_labels_stay_inside_samples():
    """Also where an id comes again after another sample."""
    batch = {
        "tokens": torch.arange(9)[None],
        "loss_mask": torch.ones(1, 9),
        "sample_ids": torch.tensor([[5, 5, 5, 5, 7, 7, 7, 5, 5]]),
    }
    _, counted = mtp.labels(batch, make_config())
    assert counted[0].int().T.tolist() == [
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [0] * 9,
    ]


@each_context
@few_examples
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 99))
def test_equivalent_packed_rows_separate(context, lengths, seed):
    config = make_config(chain_context=context)
    params, row = make_params(config), make_batch(num_rows=1, size=sum(lengths), seed=seed)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    packed = value_and_grads(params, row | {"sample_ids": ids[None]}, config)
    alone = [
        value_and_grads(params, {k: v[:, ids == i] for k, v in row.items()}, config)
        for i in range(len(lengths))
    ]
    # Positions are counted from the start of the row, and angles are float32.
    assert_close(functools.reduce(pure.add, alone), packed, rtol=1e-4, atol=1e-4)


# The sums.


@each_context
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("listed", [False, True])
def test_equivalent_chunked_listed_whole(context, chunk_size, listed):
    config = make_config(chain_context=context, chunk_size=chunk_size)
    params, batch = make_params(config), make_batch()
    whole = value_and_grads(params, batch, dataclasses.replace(config, chunk_size=0))
    batch = mtp.prepare(batch, config) if listed else batch
    assert_close(value_and_grads(params, batch, config), whole)
    assert all(grad.abs().max() > 0 for grad in tree.leaves(whole["grads"]))


def test_dens_are_counted_from_masks_alone():
    config, batch = make_config(), make_batch(num_samples=2)
    terms, _ = mtp.loss_terms(make_params(config), batch, config, TARGET)
    masks = {name: value for name, value in batch.items() if name != "final"}
    assert tree.map(float, mtp.den(masks, config)) == tree.map(float, terms.den)
    assert len({float(den) for den in terms.den.values()}) == 3


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("empty", ["unsupervised", "no rows", "alone"])
def test_empty_batches_give_exact_zeros(empty, listed):
    config, batch = make_config(), make_batch(size=2 if empty == "alone" else 9)
    if empty == "no rows":
        batch = take(batch, slice(0, 0))
    if empty == "unsupervised":
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    batch = mtp.prepare(batch, config) if listed else batch
    result = value_and_grads(make_params(config), batch, config)
    assert all(leaf.count_nonzero() == 0 for leaf in tree.leaves(result))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_shorter_than_the_chain(size):
    config = make_config()
    batch = make_batch(num_rows=2, size=size, supervised=1.0)
    result = value_and_grads(make_params(config), batch, config)
    dens = [den.item() for den in result["terms"].den.values()]
    assert dens == [2 * max(0, size - 2 - step) for step in range(3)]
    assert all(leaf.isfinite().all() for leaf in tree.leaves(result))


def test_low_precision():
    config = make_config(output_gate=True)
    params, batch = make_params(config), make_batch()
    low = lambda x: x.bfloat16() if x.is_floating_point() else x
    leaves = tree.map(lambda leaf: low(leaf).requires_grad_(), params)
    terms, _ = mtp.loss_terms(leaves, tree.map(low, batch), config, tree.map(low, TARGET))
    loss = mtp.objective(config)(terms)
    loss.backward()
    assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in tree.leaves(leaves))
    wide, _ = mtp.loss_terms(params, batch, config, TARGET)
    # Eight bits of fraction through three steps.
    assert loss.item() == pytest.approx(mtp.objective(config)(wide).item(), rel=0.05)


# The objective of a window.


def test_weights_of_steps():
    weights = list(make_config().weights.values())
    assert weights == pytest.approx([0.5102, 0.3061, 0.1837], abs=5e-5)
    assert list(make_config(step_weights=(3, 0, 1)).weights.values()) == [3, 0, 1]


@pytest.mark.parametrize("plan", ["before", "columns", "replay"])
@few_examples
@given(st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_equivalent_partition_whole_batch(plan, owners):
    config = make_config(chunk_size=0)
    params, batch = make_params(config), make_batch(num_rows=5)
    window = [take(batch, [i for i, owner in enumerate(owners) if owner == j]) for j in range(4)]

    def loss(params):
        terms, _ = mtp.loss_terms(params, batch, config, TARGET)
        means = [config.weights[name] * terms.num[name] / terms.den[name] for name in terms.num]
        return torch.stack(means).sum()

    grads, value = torch.func.grad_and_value(loss)(params)
    den_fn = functools.partial(mtp.den, config=config) if plan == "before" else None
    step = pure.window_grad(bound(config), mtp.objective(config), plan=plan, den_fn=den_fn)
    found = step(params, window)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-12)
    assert_close(found.grads, grads)
    assert_close(found.metrics, step(params, [batch]).metrics)


def test_one_den_for_all_steps_depends_on_the_cut():
    """Means of micro-steps, weighted by the labels of the first step, are another loss."""
    config = make_config()
    params = make_params(config)
    window = [make_batch(size=size, num_rows=2, supervised=1.0, seed=size) for size in (3, 5, 9)]
    terms = [mtp.loss_terms(params, batch, config, TARGET)[0] for batch in window]
    weights = config.weights

    def mean(terms):
        ratios = [weights[k] * terms.num[k] / terms.den[k].clamp_min(1) for k in weights]
        return torch.stack(ratios).sum()

    dens = torch.stack([each.den["step_0"] for each in terms])
    paired = (torch.stack([mean(each) for each in terms]) * dens).sum() / dens.sum()
    value = pure.window_value(bound(config), mtp.objective(config))(params, window).loss
    whole = mean(functools.reduce(pure.add, terms))
    assert value.item() == pytest.approx(whole.item(), rel=1e-12)
    assert abs(paired - whole) > 0.02 * whole


@pytest.mark.parametrize(("num_steps", "plan"), [(1, "after"), (2, "columns"), (3, "replay")])
def test_plan_follows_the_number_of_steps(num_steps, plan):
    config = make_config(num_steps=num_steps)
    arguments = bound(config), mtp.objective(config), make_params(config), make_batch()
    assert pure.explain_plan(*arguments).plan == plan
    den_fn = functools.partial(mtp.den, config=config)
    assert pure.explain_plan(*arguments, den_fn=den_fn).plan == "before"


# With the rest of the library.


@each_context
def test_no_host_read_and_no_collective(context):
    config = make_config(chain_context=context)
    params = tree.map(lambda x: x.requires_grad_(), make_params(config))
    batch = mtp.prepare(make_batch(num_samples=2), config)
    with count_host_syncs() as reads, count_collectives() as collectives:
        terms, _ = mtp.loss_terms(params, batch, config, TARGET)
        mtp.objective(config)(terms).backward()
    assert not reads, reads.places
    assert not collectives


def test_equivalent_module_pure():
    config = make_config(chain_context="prefix")
    params, batch = make_params(config), make_batch()
    module = as_module(mtp.apply, params)
    terms, metrics = call(bound(config), module, batch)
    expected = value_and_grads(params, batch, config)
    assert_close((terms, metrics), (expected["terms"], expected["metrics"]))
    weighted = [config.weights[name] * num for name, num in terms.num.items()]
    torch.stack(weighted).sum().backward()
    parameters = dict(module.named_parameters())
    names = [re.sub(r"\W+", ".", name).strip(".") for name in tree.names(params)]
    assert_close([parameters[name].grad for name in names], tree.leaves(expected["grads"]))


@pytest.mark.slow
def test_equivalent_compiled_eager():
    config = make_config(chain_context="prefix")
    batch = mtp.prepare(make_batch(num_samples=2), config)

    def loss(params):
        terms, _ = mtp.loss_terms(params, batch, config, TARGET)
        return torch.stack(list(terms.num.values())).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_close(*(with_grads(fn, make_params(config)) for fn in (loss, compiled)))


def with_grads(fn, params):
    leaves = tree.map(lambda leaf: leaf.requires_grad_(), params)
    value = fn(leaves)
    value.backward()
    return value.detach(), tree.map(lambda leaf: leaf.grad, leaves)


def test_target_is_frozen():
    config = make_config()
    target = {name: leaf.clone().requires_grad_() for name, leaf in TARGET.items()}
    params = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config))
    terms, _ = mtp.loss_terms(params, make_batch(), config, target)
    mtp.objective(config)(terms).backward()
    assert all(leaf.grad is None for leaf in target.values())
    assert all(leaf.grad is not None for leaf in tree.leaves(params))


def test_training_lowers_the_loss():
    config, batch = make_config(), make_batch()
    leaves = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config))
    optimizer = torch.optim.AdamW(tree.leaves(leaves), lr=1e-2)
    losses = []
    for _ in range(15):
        terms, _ = mtp.loss_terms(leaves, batch, config, TARGET)
        loss = mtp.objective(config)(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# Drafting.


@each_context
@few_examples
@given(st.integers(0, 99), st.integers(1, 6))
def test_equivalent_draft_training_pass(context, seed, length):
    """The whole chain run anew for each token, on a row that what is drafted is appended to."""
    config = make_config(chain_context=context)
    rows = make_batch(num_rows=20, size=length + 1, seed=seed)
    params = tree.map(lambda leaf: 3 * leaf, make_params(config))  # attention that is decided
    tokens, final = rows["tokens"], rows["final"]
    captured = torch.cat([final, TARGET["embed"][tokens]], -1)[:, :-1]
    drafted = mtp_draft.draft(params, captured, tokens[:, -1], config, TARGET).tokens
    for step in range(config.num_steps):
        unknown = normal(seed, 20, tokens.shape[1] - length, WIDTH)
        batch = {"tokens": tokens, "final": torch.cat([final[:, :length], unknown], 1)}
        hidden = mtp.apply(params, batch, config, TARGET)[:, length - 1, step]
        token = (hidden @ TARGET["head"].T).argmax(-1)
        assert torch.equal(token, drafted[:, step])
        tokens = torch.cat([tokens, token[:, None]], 1)


SHAPE = decoder.Config(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


@each_context
def test_equivalent_speculative_greedy_with_it(context):
    """And the accepted length that training reports is the one that decoding has."""
    model = decoder.init(SHAPE, random.key(0), std=0.4, dtype=torch.float64)
    target = mtp_draft.cached_target(model, SHAPE, capacity=40)
    config = make_config(chain_context=context)
    params = make_params(config)
    draft = lambda captured, token: mtp_draft.draft(params, captured, token, config, model).tokens
    prompt = torch.tensor([3, 1, 4])
    expected = greedy(target, prompt, 24)
    assert torch.equal(speculative_greedy(target, draft, prompt, 24).tokens, expected)
    row = torch.cat([prompt, expected])
    _, final = decoder.hidden_states(model, row[None], SHAPE)
    captured = torch.cat([final, model["embed"][row][None]], -1)
    batch = {"tokens": row[None], "final": final, "loss_mask": torch.ones(1, len(row))}
    batch["loss_mask"][0, : len(prompt) + 1] = 0
    accepted = 0
    for anchor in range(len(prompt), len(row) - 1):
        drafted = draft(captured[:, :anchor], row[anchor : anchor + 1])[0]
        following = row[anchor + 1 : anchor + 1 + config.num_steps]
        right = drafted[: len(following)] == following
        accepted += 1 + int(right.long().cumprod(0).sum())
    _, metrics = mtp.loss_terms(params, batch, config, model)
    assert metrics["accepted_length"].num == accepted
    assert accepted > metrics["accepted_length"].den  # some are right


# Errors.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("num_kv_heads", 3),
        ("num_steps", 0),
        ("num_steps", 1.5),
        ("rotary_dim", 3),
        ("rotary_dim", 6),
        ("rotary_dim", 0),
        ("step_decay", 0.0),
        ("step_weights", (1.0, 1.0)),
        ("step_weights", (1.0, -1.0, 0.0)),
        ("step_weights", (0.0, 0.0, 0.0)),
        ("chain_context", "suffix"),
        ("chunk_size", -1),
        ("rope_theta", math.inf),
        ("norm_eps", 0.0),
    ],
)
def test_config_names_the_bad_field(name, value):
    with pytest.raises(ValueError, match=rf"Config: {name} must be .*, got {name}="):
        make_config(**{name: value})


def test_missing_fields_are_named():
    config, batch = make_config(), make_batch()
    del batch["final"]
    with pytest.raises(ValueError, match=r"mtp.loss_terms: batch must have .* of \['final'\]"):
        mtp.loss_terms(make_params(config), batch, config, TARGET)
