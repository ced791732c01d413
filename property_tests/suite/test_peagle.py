import dataclasses
import functools
import math

import pytest
import torch
from block_cases import assert_close, value_and_grads
from dspark_cases import VOCAB, WIDTH, normal
from eagle_cases import (
    DRAFT_IDS,
    SHAPE,
    TARGET,
    make_batch,
    naive_context,
    naive_join,
    naive_layer,
    naive_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from numden.models import decoder, eagle3_draft, eagle_losses, peagle, peagle_draft
from numden.models.cod import draw_depths, list_guesses
from numden.models.decoding import cached_decoder, greedy, speculative_greedy
from numden.models.guess_attention import guess_attention, guess_function, guess_mask
from numden.models.module import as_module, call
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.property_tests.rows import take_rows
from numden.pure import random, tree, window_grad

few_examples = settings(max_examples=3)
NETWORKS = {
    "plain": {},
    "normed": {"norm_before_residual": True, "context_norm": True},
    "one layer": {"num_layers": 1},
}
each_network = pytest.mark.parametrize("network", list(NETWORKS.values()), ids=list(NETWORKS))
batch_of = functools.partial(make_batch, peagle.prepare)


def make_config(**changes):
    shape = {"mask_token_id": VOCAB - 1, "num_layers": 2, "num_depths": 4}
    return peagle.Config(**(SHAPE | shape | changes))


def make_params(config, seed=0):
    params = peagle.init(config, random.key(seed), std=0.4, dtype=torch.float64)
    if config.context_norm:
        params["context"]["norm"] = 1 + normal(9, 2 * WIDTH) / 4
    return params


def bound(config, target=TARGET):
    return functools.partial(peagle.loss_terms, config=config, target=target)


def results(params, batch, config, target=TARGET):
    return value_and_grads(bound(config, target), peagle.objective(config), params, batch)


def texts(batch, which=slice(None)):
    """Rows of a batch before anything was drawn for it."""
    return {k: v[which] for k, v in batch.items() if k not in ("anchors", "depths", "keep")}


# Which guesses there are.

masks = st.lists(st.booleans(), min_size=1, max_size=24).map(lambda row: torch.tensor([row]))
seeds = st.integers(0, 10**6)


def draws(seed, eligible, documents=None, num_depths=5, ratio=0.8, min_ratio=0.2):
    keys = random.split(random.key(seed), len(eligible))
    sizes = {"ratio": ratio, "min_ratio": min_ratio}
    return draw_depths(keys, eligible, num_depths, documents=documents, **sizes)


@given(masks, seeds, st.data())
def test_draws_are_nested_and_of_the_stated_number(eligible, seed, data):
    size = eligible.shape[1]
    starts = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    documents = torch.tensor([starts]).cumsum(-1)
    ends = data.draw(st.integers(0, size))
    documents[0, ends:] = -1  # padding
    drawn = draws(seed, eligible, documents)[0]
    total = int(eligible.sum())
    assert drawn[0].all()
    before = set(range(-1, size))
    for depth in range(1, 5):
        found = set(drawn[depth].nonzero().flatten().tolist())
        candidates = {
            t
            for t in range(depth, size)
            if eligible[0, t]
            and t - 1 in before
            and documents[0, t] == documents[0, t - depth] >= 0
        }
        wanted = math.floor(max(0, total - depth) * max(0.8**depth, 0.2))
        assert found <= candidates
        assert len(found) == min(wanted, len(candidates))
        before = found


@given(masks, masks, seeds)
def test_draws_of_a_row_depend_on_it_alone(first, second, seed):
    size = max(first.shape[1], second.shape[1]) + 3
    keys = random.split(random.key(seed), 2)
    pad = [torch.nn.functional.pad(x, (0, size - x.shape[1])) for x in (first, second)]
    options = {"num_depths": 4, "ratio": 0.7, "min_ratio": 0.2}
    both = draw_depths(keys, torch.cat(pad), **options)
    for row, mask in enumerate((first, second)):
        alone = draw_depths(keys[row, None], mask, **options)
        assert torch.equal(both[row, 1:, : mask.shape[1]], alone[0, 1:])


def test_draws_are_uniform():
    """Each of five candidates is among the two drawn 2/5 of the time."""
    num_keys = 4000
    drawn = draws(0, torch.ones(num_keys, 6, dtype=torch.bool), num_depths=2, ratio=0.5)[:, 1]
    assert (drawn.sum(-1) == 2).all()
    # Five standard deviations of the mean of so many draws: wrong once in 10^6 keys.
    bound = 5 * math.sqrt(0.4 * 0.6 / num_keys)
    assert ((drawn[:, 1:].double().mean(0) - 0.4).abs() < bound).all()


@given(masks, seeds)
def test_lists_hold_each_guess_once(eligible, seed):
    eligible = torch.cat([eligible, eligible.flip(1)])
    drawn = draws(seed, eligible)
    anchors, depths, keep = list_guesses(drawn)
    assert keep.sum(-1).max() == keep.shape[1]
    for b in range(2):
        listed = [
            (int(a), int(d)) for a, d, k in zip(anchors[b], depths[b], keep[b], strict=True) if k
        ]
        expected = [(t - d, d) for d, t in drawn[b].nonzero().tolist()]
        assert listed == expected
    assert (anchors >= 0).all()


def known_guesses():
    anchors, depths = torch.tensor([[0, 1, 1, 2, 4, 4, 5]]), torch.tensor([[0, 0, 1, 0, 0, 1, 0]])
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    return anchors, depths, torch.ones(1, 7, dtype=torch.bool), documents


def test_known_mask():
    mask = guess_mask(*known_guesses())[0]
    known = [(2, 1, True), (2, 0, True), (1, 2, False), (4, 3, False), (6, 6, False)]
    for query, key, expected in known:
        assert mask[query, key] == expected
    rows = [row.nonzero().flatten().tolist() for row in mask]
    assert rows == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [4], [4, 5], []]


def test_equivalent_mask_function():
    mask, sees = guess_mask(*known_guesses())[0], guess_function(*known_guesses())
    row = torch.tensor(0)
    for query in range(7):
        found = [bool(sees(row, row, torch.tensor(query), torch.tensor(key))) for key in range(7)]
        assert found == mask[query].tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_equivalent_flex_dense():
    guesses = known_guesses()
    q, k, v = (normal(i, 1, heads, 7, 16).float() for i, heads in ((1, 4), (2, 2), (3, 2)))
    dense, flex = (
        guess_attention(*guesses, kernel=kernel)(q, k, v) for kernel in ("dense", "flex")
    )
    torch.testing.assert_close(flex, dense)


# The whole loss, guess by guess.


def naive_state(params, tokens, captured, anchor, depth, config):
    """One guess alone: the text up to its anchor and the guesses before it, all of them seen."""
    embed, layers = params["embed"], params["layers"]
    unknown = naive_context(params, params["unknown"], config).expand(depth, -1)
    hidden = torch.cat([naive_context(params, captured[: anchor + 1], config), unknown])
    masked = embed[config.mask_token_id].expand(depth, -1)
    embedded = torch.cat([embed[tokens[1 : anchor + 2]], masked])
    positions = torch.arange(anchor + depth + 1, dtype=torch.float64)
    for i, layer in enumerate(layers):
        eps = hidden.square().mean(-1, keepdim=True) + 1e-6
        normed = hidden * eps.rsqrt() * layer["attn_norm"]
        inputs = normed if i else naive_join(layer, embedded, hidden)
        residual = normed if config.norm_before_residual and not i else hidden
        outputs = [
            naive_layer(layer, inputs[: t + 1], residual[t], positions[: t + 1], config)
            for t in range(len(hidden))
        ]
        hidden = torch.stack(outputs)
    last = hidden[-1]
    return last * torch.rsqrt(last.square().mean() + 1e-6) * params["norm"]


def naive_sums(params, batch, config):
    """``kl``, acceptance, taught, right and labelled, each summed for each depth."""
    sums = torch.zeros(5, config.num_depths, dtype=torch.float64)
    for b, i in batch["keep"].nonzero().tolist():
        anchor, depth = int(batch["anchors"][b, i]), int(batch["depths"][b, i])
        label = anchor + depth + 2
        if label >= batch["tokens"].shape[1] or not batch["loss_mask"][b, label]:
            continue
        tokens, captured = batch["tokens"][b], batch["captured"][b]
        start = 0
        if "documents" in batch:
            own = batch["documents"][b]
            if own[anchor] < 0 or own[anchor] != own[label]:
                continue
            start = int((own == own[anchor]).nonzero()[0])
        cut = tokens[start:], captured[start:], anchor - start
        state = naive_state(params, *cut, depth, config)
        kl, acceptance, right, taught = naive_values(state, params, batch["final"][b, label - 1])
        learned = torch.tensor([kl, acceptance, 1.0]) * taught
        sums[:, depth] += torch.tensor([*learned, right, 1.0])
    return sums


def assert_equal_to_loops(params, batch, config):
    kl, acceptance, taught, right, labelled = naive_sums(params, batch, config)
    terms, metrics = peagle.loss_terms(params, batch, config, TARGET)
    assert 0 < taught.sum() < labelled.sum()  # some labels cannot be drafted
    assert terms.den == taught.sum() == metrics["acceptance"].den
    assert torch.equal(metrics["accuracy_depth"].num, right)
    assert torch.equal(metrics["accuracy_depth"].den, labelled)
    assert metrics["accuracy"] == (right.sum(), labelled.sum())
    # Angles are float32 in the tables and float64 in the loops.
    assert terms.num["kl"].item() == pytest.approx(kl.sum().item(), rel=1e-5)
    assert metrics["acceptance"].num.item() == pytest.approx(acceptance.sum().item(), rel=1e-5)


@each_network
def test_equivalent_loss_loops(network):
    config = make_config(**network)
    batch = batch_of(config, num_rows=2, size=8, supervised=0.9)
    assert batch["depths"].max() == 3
    assert_equal_to_loops(make_params(config), batch, config)


def test_equivalent_packed_documents_loops():
    """Documents of a packed row are drawn and seen apart; what is between them is no label."""
    config = make_config(num_layers=1)
    batch = texts(batch_of(config, num_rows=2, size=12, supervised=1.0))
    batch["documents"] = torch.tensor([[0] * 5 + [1] * 7, [4] * 7 + [2] * 3 + [-1] * 2])
    batch = peagle.prepare(batch, config)
    assert_equal_to_loops(make_params(config), batch, config)


def test_known_counts_of_labels_that_cannot_be_drafted():
    """Three labels, one of which the map misses: of the two that are taught one is right."""
    config = make_config(num_depths=1)
    batch = batch_of(config, num_rows=1, size=5, supervised=1.0)
    batch["teacher_token"] = torch.tensor([[0, 0, 3, 1, 0]])  # 3 is not in the map
    batch["teacher_logsumexp"] = torch.zeros(1, 5)
    params = make_params(config)
    params["head"] = torch.zeros_like(params["head"])  # drafts the lowest id, 0
    terms, metrics = peagle.loss_terms(params, batch, config, TARGET)
    assert terms.den == 2
    assert metrics["accuracy"] == (1, 3)


# The laws of the loss that the table of losses does not have.


@pytest.mark.parametrize("chunk_tokens", [4, 1000])
def test_equivalent_chunked_whole(chunk_tokens):
    config = make_config()
    params, batch = make_params(config), batch_of(config)
    whole = results(params, batch, dataclasses.replace(config, chunk_tokens=0))
    chunked = results(params, batch, dataclasses.replace(config, chunk_tokens=chunk_tokens))
    assert_close(chunked, whole, rtol=1e-11, atol=1e-12)


@few_examples
@given(seeds, st.integers(1, 2))
def test_additive_over_rows_whose_guesses_are_drawn_anew(seed, first):
    config = make_config()
    params, batch = make_params(config), batch_of(config, num_rows=3, size=7, seed=seed)
    parts = [
        results(params, peagle.prepare(texts(batch, rows), config), config)
        for rows in (slice(0, first), slice(first, 3))
    ]
    whole = results(params, batch, config)
    assert_close(tree.map(torch.add, *parts), whole, rtol=1e-10, atol=1e-11)


def test_mean_of_row_means_is_another_number():
    config = make_config()
    params, batch = make_params(config), batch_of(config, supervised=0.5)
    parts = [bound(config)(params, take_rows(batch, [b]))[0] for b in range(3)]
    objective = peagle.objective(config)
    mean = sum(objective(part) for part in parts) / 3
    pooled = objective(tree.map(torch.add, tree.map(torch.add, *parts[:2]), parts[2]))
    assert abs(mean - pooled) > 1e-3


@pytest.mark.parametrize("supervised", ["nowhere", "first two", "no draftable", "no rows"])
def test_empty_batches_give_exact_zeros(supervised):
    config = make_config()
    batch, target = texts(batch_of(config)), TARGET
    if supervised == "no rows":
        batch = texts(batch, slice(0, 0))
    elif supervised == "no draftable":
        likeliest = eagle_losses.with_teacher(batch, config, TARGET)["teacher_token"]
        missing = next(v for v in range(VOCAB) if not (likeliest == v).any())
        config = make_config(draft_vocab_size=1)
        target = TARGET | {"draft_ids": torch.tensor([missing])}
    else:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        batch["loss_mask"][:, :2] = supervised == "first two"
    batch = peagle.prepare(batch, config)
    found = results(make_params(config), batch, config, target)
    sums = found["grads"], found["terms"]
    assert all(leaf.count_nonzero() == 0 for leaf in tree.leaves(sums))
    assert peagle.den(batch, config, target) == 0


def test_rows_without_labels_change_nothing():
    config = make_config()
    params, batch = make_params(config), texts(batch_of(config))
    batch["loss_mask"][1] = False
    masked = peagle.prepare(batch, config)
    without = peagle.prepare(texts(batch, torch.tensor([0, 2])), config)
    assert (masked["depths"][1] == 0).all()
    assert_close(results(params, masked, config), results(params, without, config))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_shorter_than_the_depths(size):
    config = make_config(num_depths=6, down_sample_ratio=1.0)
    params, batch = make_params(config), batch_of(config, size=size, supervised=1.0)
    found = results(params, batch, config)
    expected = naive_sums(params, batch, config)
    assert torch.equal(found["metrics"]["accuracy_depth"].den, expected[4])
    assert all(leaf.isfinite().all() for leaf in tree.leaves(found))


def test_with_a_ratio_of_one_each_label_is_guessed_at_each_depth():
    config = make_config(down_sample_ratio=1.0)
    batch = batch_of(config, num_rows=1, size=9, supervised=1.0)
    # Positions 0 to 6 have labels; of depth d those from d on, and no more than 7 - d.
    counts = [int((batch["depths"] == depth).sum()) for depth in range(4)]
    assert counts == [9, 6, 5, 4]


def test_embeddings_and_the_unknown_state_are_trained():
    config = make_config()
    found = results(make_params(config), batch_of(config), config)
    assert all(leaf.count_nonzero() > 0 for leaf in tree.leaves(found["grads"]))
    started = peagle.init(config, random.key(0), TARGET, dtype=torch.float64)
    assert torch.equal(started["embed"], TARGET["embed"])
    assert started["embed"].data_ptr() != TARGET["embed"].data_ptr()


def test_no_host_read_and_no_collective():
    config = make_config()
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), batch_of(config)
    with count_host_syncs() as reads, count_collectives() as collectives:
        terms, _ = peagle.loss_terms(params, batch, config, TARGET)
        terms.num["kl"].backward()
    assert (reads.total(), collectives.total()) == (0, 0), reads.places


def test_equivalent_module_pure():
    config = make_config()
    params, batch = make_params(config), batch_of(config)
    terms, metrics = call(bound(config), as_module(peagle.apply, params), batch)
    expected = results(params, batch, config)
    assert_close((terms, metrics), (expected["terms"], expected["metrics"]), rtol=0, atol=0)


def test_equivalent_window_whole_batch():
    """Ragged micro-steps, one of them with nothing to learn from, and dens that come first."""
    config = make_config()
    params, batch = make_params(config), texts(batch_of(config, num_rows=4))
    batch["loss_mask"][3] = False
    parts = [
        peagle.prepare(texts(batch, rows), config)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    grad = functools.partial(window_grad, bound(config), peagle.objective(config))
    whole = grad()(params, [peagle.prepare(batch, config)])
    dens = {"den_fn": functools.partial(peagle.den, config=config, target=TARGET)}
    for options in ({}, dens):
        window = grad(**options)(params, parts)
        assert window.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
        assert_close(window.grads, whole.grads, rtol=1e-9, atol=1e-11)
        assert_close(window.metrics, whole.metrics, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_params_have_wide_sums(dtype):
    config = make_config()
    batch = eagle_losses.with_teacher(batch_of(config), config, TARGET)
    half = lambda x: x.to(dtype) if x.is_floating_point() else x
    params, target = tree.map(half, make_params(config)), tree.map(half, TARGET)
    terms, metrics = peagle.loss_terms(params, tree.map(half, batch), config, target)
    wide = peagle.loss_terms(make_params(config), batch, config, TARGET)[0]
    assert {x.dtype for x in tree.leaves((terms, metrics))} == {torch.float64}
    assert torch.equal(terms.den, wide.den)
    # Two layers of bfloat16, which rounds by 2^-9 each time.
    assert terms.num["kl"].item() == pytest.approx(wide.num["kl"].item(), rel=0.05)


# Drafting.

DECODER = decoder.Config(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)


def known_text(params, num_rows=2, size=6):
    tokens = random.choice(random.split(random.key(5), num_rows), VOCAB, (size + 1,))
    captured = normal(7, num_rows, size, 2 * WIDTH)
    beside = torch.cat([captured, params["embed"][tokens[:, :-1]]], -1)
    return tokens, captured, beside


@each_network
def test_equivalent_draft_guesses_alone(network):
    config = make_config(**network)
    params = make_params(config)
    tokens, captured, beside = known_text(params)
    drafted = peagle_draft.draft(params, beside, tokens[:, -1], config, TARGET)
    assert drafted.confidence is None
    for b in range(2):
        for depth in range(config.num_depths):
            state = naive_state(params, tokens[b], captured[b], 5, depth, config)
            expected = DRAFT_IDS[(params["head"] @ state).argmax()]
            assert drafted.tokens[b, depth] == expected


def test_draft_is_what_training_would_predict():
    """The guesses of the last known position, whatever comes behind it."""
    config = make_config()
    params = make_params(config)
    tokens, captured, beside = known_text(params)
    drafted = peagle_draft.draft(params, beside, tokens[:, -1], config, TARGET).tokens
    later = torch.full((2, 5, 2 * WIDTH), 1e3, dtype=torch.float64)  # it must not be read
    positions, deep = torch.arange(11).expand(2, -1), torch.tensor([[1, 2, 3]] * 2)
    batch = {
        "tokens": torch.cat([tokens, torch.zeros(2, 4, dtype=torch.int64)], 1),
        "captured": torch.cat([captured, later], 1),
        "anchors": torch.cat([positions, torch.full_like(deep, 5)], 1),
        "depths": torch.cat([torch.zeros_like(positions), deep], 1),
        "keep": torch.ones(2, 14, dtype=torch.bool),
    }
    states = peagle.apply(params, batch, config)[:, [5, 11, 12, 13]]
    assert torch.equal(DRAFT_IDS[peagle.logits(params, states).argmax(-1)], drafted)


@pytest.mark.parametrize("whole", [False, True])
def test_equivalent_speculative_greedy(whole):
    config = make_config(draft_vocab_size=None) if whole else make_config()
    frozen = decoder.init(DECODER, random.key(0), std=0.7, dtype=torch.float64)
    target = {} if whole else {"draft_ids": DRAFT_IDS}
    params, prompt = make_params(config), torch.tensor([3, 1, 4])
    plain_target = cached_decoder(frozen, DECODER, capacity=64, layers=(0, 2))
    decoded = speculative_greedy(
        eagle3_draft.with_embeddings(plain_target, params["embed"]),
        lambda captured, token: peagle_draft.draft(params, captured, token, config, target).tokens,
        prompt,
        16,
    )
    assert torch.equal(decoded.tokens, greedy(plain_target, prompt, 16))
    assert all(0 <= kept <= config.num_depths for kept in decoded.accepted)


# Errors.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask_token_id", VOCAB),
        ("num_layers", 0),
        ("num_depths", 0),
        ("down_sample_ratio", 1.5),
        ("down_sample_ratio", math.nan),
        ("down_sample_ratio_min", 0.0),
        ("down_sample_ratio_min", 0.9),
        ("kernel", "fast"),
        ("draft_vocab_size", 0),
    ],
)
def test_config_names_the_bad_field(name, value):
    with pytest.raises(ValueError, match=rf"Config: {name} must be .*, got {name}="):
        make_config(**{name: value})


def test_missing_fields_are_named():
    config = make_config()
    with pytest.raises(ValueError, match=r"peagle.*none of \['anchors', 'depths', 'keep'\]"):
        peagle.loss_terms(make_params(config), texts(batch_of(config)), config, TARGET)
