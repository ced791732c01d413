import dataclasses
import functools
import math

import pytest
import torch
from block_cases import assert_close, sines, value_and_grads
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
from torch.utils._python_dispatch import TorchDispatchMode

from numden.models import decoder, eagle3, eagle3_draft, eagle_losses
from numden.models.decoding import cached_decoder, greedy, speculative_greedy
from numden.models.draft_vocabulary import (
    choose_draft_ids,
    draft_ids_of_maps,
    maps_of_draft_ids,
    require_draft_ids,
)
from numden.models.module import as_module, call
from numden.models.unrolled_attention import unrolled_attention
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.property_tests.rows import join_rows, take_rows
from numden.pure import LossTerms, divide, random, tree, window_grad

few_examples = settings(max_examples=4)
LOSSES = {
    "kl": {},
    "over tokens": {"average": "token"},
    "over positions": {"average": "position"},
    "lk_alpha": {"loss": "lk_alpha"},
    "lk_lambda": {"loss": "lk_lambda", "kl_scale": 0.5},
}
NETWORKS = {
    "plain": {},
    "normed": {"normed_steps": True, "context_norm": True},
}
each_loss = pytest.mark.parametrize("options", list(LOSSES.values()), ids=list(LOSSES))
each_network = pytest.mark.parametrize("network", list(NETWORKS.values()), ids=list(NETWORKS))


def plain(batch, config):
    return batch


batch_of = functools.partial(make_batch, plain, None, num_rows=2)


def make_config(**changes):
    return eagle3.Config(**(SHAPE | {"num_steps": 3, "chunk_queries": 5} | changes))


def make_params(config, seed=0):
    params = eagle3.init(config, random.key(seed), std=0.4, dtype=torch.float64)
    if config.context_norm:
        params["context"]["norm"] = 1 + normal(9, 2 * WIDTH) / 4
    return params


def bound(config, target=TARGET):
    return functools.partial(eagle3.loss_terms, config=config, target=target)


def results(params, batch, config, target=TARGET):
    return value_and_grads(bound(config, target), eagle3.objective(config), params, batch)


# Known numbers: four positions, six tokens, four of which can be drafted, two steps.


def known_results(monkeypatch, **options):
    """A row whose first two tokens come before the four positions' labels."""
    config = make_config(vocab_size=6, draft_vocab_size=4, hidden_size=3, num_steps=2, **options)
    states = torch.zeros(1, 6, 2, 4, dtype=torch.float64)
    for step in range(2):
        logits = sines((1, 4, 4), 0.83 + 0.1 * step, 0.3)
        for position in range(4):
            row = position + 1 + step
            if row < 6:
                states[0, row, step] = logits[0, position]
    monkeypatch.setattr(eagle3, "apply", lambda *_: states)
    final = torch.zeros(1, 6, 3, dtype=torch.float64)
    final[0, 1:5] = sines((1, 4, 3), 0.61, 0.2)
    batch = {
        "tokens": torch.zeros(1, 6, dtype=torch.int64),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 0, 1]]),
        "captured": torch.zeros(1, 6, 6),
        "final": final,
    }
    draft_ids = draft_ids_of_maps(torch.tensor([1, 0, 1, 1, 0, 1]), torch.tensor([0, 1, 1, 2]))
    head = sines((6, 3), 0.47, 0.5)
    target = {"embed": head, "head": head, "draft_ids": draft_ids}
    params = {"head": torch.eye(4, dtype=torch.float64)}
    terms, metrics = eagle3.loss_terms(params, batch, config, target)
    assert_close(eagle3.den(batch, config, target), terms.den)
    return config, terms, metrics, eagle_losses.with_teacher(batch, config, target)


def near(value):
    return pytest.approx(value, abs=2e-6)  # six digits, and float32 where they come from


def test_known_sums(monkeypatch):
    _, terms, metrics, batch = known_results(monkeypatch)
    assert batch["teacher_token"][0, 1:5].tolist() == [5, 5, 3, 4]
    assert [terms.num[f"kl_{k}"].item() for k in (0, 1)] == near([2.919038, 2.533563])
    assert [terms.den[f"kl_{k}"].item() for k in (0, 1)] == [2, 1]
    assert divide(metrics["acceptance"]).tolist() == near([0.397808, 0.144077])
    assert metrics["accuracy"].num.tolist() == [1, 0]
    assert metrics["accuracy"].den.tolist() == [3, 2]


def with_positions(terms):
    """SpecForge's rows end with the last position: there are four of them and not six."""
    dens = {k: 4 * den / 6 if k.startswith("kl") else den for k, den in terms.den.items()}
    return terms._replace(den=dens)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"average": "step"}, 3.486369),
        ({"average": "token"}, 2.472944),
        ({"average": "position"}, 1.236472),
        ({"average": "position", "loss": "lk_lambda"}, 0.687891 + 0.8 * 0.663250),
        ({"average": "position", "loss": "lk_alpha"}, 1.015322 + 0.8 * 1.937405),
    ],
)
def test_known_losses(monkeypatch, options, expected):
    config, terms, *_ = known_results(monkeypatch, **options)
    if options["average"] == "position":
        terms = with_positions(terms)
    assert eagle3.objective(config)(terms).item() == near(expected)


def test_lk_lambda_takes_its_weight_for_a_constant():
    config = make_config(loss="lk_lambda", num_steps=2, kl_scale=0.5, kl_decay=2.0)
    names = ("kl_0", "kl_1", "rejection_0", "rejection_1")
    nums = {
        k: torch.tensor(x, requires_grad=True)
        for k, x in zip(names, (6.0, 4.0, 1.0, 0.5), strict=True)
    }
    terms = LossTerms(nums, {name: torch.tensor(2.0) for name in names})
    grads = torch.autograd.grad(eagle3.objective(config)(terms), [nums[name] for name in names])
    first, second = 0.5 * math.exp(-2 * (1 - 0.5)), 0.5 * math.exp(-2 * (1 - 0.25))
    expected = [first / 2, 0.8 * second / 2, (1 - first) / 2, 0.8 * (1 - second) / 2]
    assert [grad.item() for grad in grads] == pytest.approx(expected)


def test_known_acceptance():
    p, q = torch.tensor([[0.7, 0.3], [0.1, 0.9]]), torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    token = p.argmax(-1)
    losses, measures = eagle_losses.distillation_losses(q.log(), p.log(), token, torch.zeros(2))
    torch.testing.assert_close(measures["acceptance"], torch.tensor([0.9, 0.9]))
    torch.testing.assert_close(losses["lk"], -torch.tensor([0.9, 0.9]).log())
    torch.testing.assert_close(losses["rejection"], torch.tensor([0.1, 0.1]))


def test_no_acceptance_has_a_finite_loss():
    q = torch.tensor([-1e5, 0.0], requires_grad=True)
    losses, _ = eagle_losses.distillation_losses(
        q, torch.tensor([0.0, -1e5]), torch.tensor(0), torch.tensor(0.0)
    )
    assert losses["lk"] == 0
    assert torch.autograd.grad(losses["lk"], q)[0].tolist() == [0, 0]


# The whole loss, position by position.


def naive_chain(params, captured, embedded, position, config):
    """The states of one position's steps, alone; ``embedded`` [S, H] are those of the row."""
    layer = params["layers"][0]
    context = naive_context(params, captured[: position + 1], config)
    inputs = naive_join(layer, embedded[1 : position + 2], context)
    hidden, places = context[position], [*range(position + 1)]
    states = []
    for step in range(config.num_steps):
        if step:
            if position + 1 + step >= len(embedded):
                break
            own = naive_join(layer, embedded[position + 1 + step], hidden)
            inputs, places = torch.cat([inputs, own[None]]), [*places, position + step]
        at = torch.tensor(places, dtype=torch.float64)
        hidden = naive_layer(layer, inputs, hidden, at, config)
        normed = hidden * torch.rsqrt(hidden.square().mean() + 1e-6) * params["norm"]
        states.append(normed)
        hidden = normed if config.normed_steps else hidden
    return states


def naive_sums(params, batch, config):
    """``kl``, acceptance, taught, right and labelled, each summed for each step."""
    sums = torch.zeros(5, config.num_steps, dtype=torch.float64)
    size = batch["tokens"].shape[1]
    for tokens, mask, captured, final in zip(
        *(batch[name] for name in ("tokens", "loss_mask", "captured", "final")), strict=True
    ):
        for position in range(size - 2):
            embedded = TARGET["embed"][tokens]
            chain = naive_chain(params, captured, embedded, position, config)
            for step, state in enumerate(chain[: size - 2 - position]):
                if mask[position + 2 + step]:
                    row = final[position + 1 + step]
                    kl, acceptance, right, taught = naive_values(state, params, row)
                    learned = torch.tensor([kl, acceptance, 1.0]) * taught
                    sums[:, step] += torch.tensor([*learned, right, 1.0])
    return sums


@each_network
def test_equivalent_loss_loops(network):
    config = make_config(**network)
    params, batch = make_params(config), batch_of()
    expected = naive_sums(params, batch, config)
    terms, metrics = eagle3.loss_terms(params, batch, config, TARGET)
    found = torch.stack(
        [
            torch.stack([*terms.num.values()]),
            metrics["acceptance"].num,
            torch.stack([*terms.den.values()]),
            metrics["accuracy"].num,
            metrics["accuracy"].den,
        ]
    )
    assert 0 < expected[2, 0] < expected[4, 0]  # some labels cannot be drafted
    # Angles are float32 in the tables and float64 in the loops.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2:], expected[2:])


def test_accepted_length_counts_the_steps_before_the_first_error():
    config = make_config(num_steps=2)
    params = make_params(config)
    params["head"] = torch.zeros_like(params["head"])  # drafts the lowest id, 0
    batch = batch_of(num_rows=1, size=6, supervised=1.0)
    # Row t is taught token 0 where its final state points to it.
    right = torch.tensor([1, 1, 1, 0, 1, 1])
    batch["teacher_token"] = torch.where(right > 0, 0, 1)[None]
    batch["teacher_logsumexp"] = torch.zeros(1, 6)
    metrics = eagle3.loss_terms(params, batch, config, TARGET)[1]
    # Positions 0, 1, 2, 3 are taught by rows (1, 2), (2, 3), (3, 4), (4, none).
    assert metrics["accepted_length"] == (3 + 2 + 1 + 2, 4)


# The laws of the loss that the table of losses does not have.


@each_loss
@pytest.mark.parametrize("chunks", [(4, 2), (7, 1000)])
def test_equivalent_chunked_whole(options, chunks):
    config = make_config(**options)
    params, batch = make_params(config), batch_of(num_rows=2, size=6)
    whole, chunked = (
        dataclasses.replace(config, chunk_tokens=tokens, chunk_queries=queries)
        for tokens, queries in ((0, 0), chunks)
    )
    found, expected = (results(params, batch, each) for each in (chunked, whole))
    assert_close(found, expected, rtol=1e-10, atol=1e-11)


class LargestLogits(TorchDispatchMode):
    """The most elements of a result whose last dim is that of one of the vocabularies."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.largest = sizes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves(out):
            if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[-1] in self.sizes:
                self.largest = max(self.largest, x.numel())
        return out


def test_logits_exist_for_a_chunk_only():
    config = make_config(chunk_tokens=4, chunk_queries=0)
    params = tree.map(lambda x: x.requires_grad_(), make_params(config))
    batch = batch_of(num_rows=2, size=20)
    with LargestLogits({VOCAB, len(DRAFT_IDS)}) as seen:
        terms, _ = eagle3.loss_terms(params, batch, config, TARGET)
        terms.num["kl_0"].backward()
    # Of 40 positions of 3 steps.
    assert 0 < seen.largest <= 4 * 3 * VOCAB


@few_examples
@given(st.integers(1, 9), st.integers(0, 9))
def test_teacher_of_slices_is_that_of_all(slice_size, seed):
    final, head = normal(seed, 4, WIDTH), TARGET["head"].clone()
    head[5] = head[9] = 3 * final[0]  # two likeliest tokens
    token, total = eagle_losses.summarise_teacher(final, head, slice_size=slice_size)
    logits = final @ head.T
    assert torch.equal(token, logits.argmax(-1))
    assert token[0] == 5
    torch.testing.assert_close(total, logits.logsumexp(-1))


def test_teacher_that_is_known_is_not_computed():
    config = make_config()
    params, batch = make_params(config), batch_of()
    known = eagle_losses.with_teacher(batch, config, TARGET)
    assert eagle_losses.with_teacher(known, config, {}) is known
    assert_close(results(params, known, config), results(params, batch, config), rtol=0, atol=0)


@few_examples
@given(st.integers(0, 10**6), st.sampled_from(list(LOSSES)))
def test_additive_over_rows(seed, name):
    config = make_config(**LOSSES[name])
    params, batch = make_params(config), batch_of(num_rows=4, seed=seed)

    def sums(rows):
        return bound(config)(params, take_rows(batch, rows))

    added = tree.map(torch.add, sums([0]), sums([1, 2, 3]))
    assert_close(added, sums([0, 1, 2, 3]), rtol=1e-11, atol=1e-12)


@each_loss
@pytest.mark.parametrize("supervised", ["nowhere", "first two", "no draftable", "no rows"])
def test_empty_batches_give_exact_zeros(options, supervised):
    config = make_config(**options)
    params, batch, target = make_params(config), batch_of(), TARGET
    if supervised == "no rows":
        batch = take_rows(batch, [])
    elif supervised == "no draftable":
        # The one token that can be drafted is nowhere the teacher's likeliest.
        likeliest = eagle_losses.with_teacher(batch, config, TARGET)["teacher_token"]
        missing = next(v for v in range(VOCAB) if not (likeliest == v).any())
        config = make_config(draft_vocab_size=1, **options)
        params, target = make_params(config), TARGET | {"draft_ids": torch.tensor([missing])}
    else:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        batch["loss_mask"][:, :2] = supervised == "first two"
    found = results(params, batch, config, target)
    assert all(
        leaf.count_nonzero() == 0 for leaf in tree.leaves((found["grads"], found["terms"].num))
    )
    if config.average != "position":
        assert all(leaf == 0 for leaf in tree.leaves(found["terms"].den))
    value = window_grad(
        bound(config, target), eagle3.objective(config), plan="replay", on_empty="zero"
    )(params, [batch])
    assert value.loss == 0


@pytest.mark.parametrize("size", [1, 2, 4])
@each_loss
def test_rows_shorter_than_the_steps(options, size):
    config = make_config(num_steps=5, **options)
    params, batch = make_params(config), batch_of(size=size, supervised=1.0)
    found = results(params, batch, config)
    expected = naive_sums(params, batch, config)
    assert torch.equal(found["metrics"]["accuracy"].den, expected[4])
    torch.testing.assert_close(found["metrics"]["kl"].num, expected[0], rtol=1e-5, atol=1e-5)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(found))


def test_a_single_token_can_be_drafted():
    config = make_config(draft_vocab_size=1)
    target = TARGET | {"draft_ids": torch.tensor([4])}
    found = results(make_params(config), batch_of(), config, target)
    assert all(num == 0 for num in found["terms"].num.values())  # nothing to choose from
    assert found["metrics"]["accuracy"].num.sum() == sum(found["terms"].den.values())


def test_labels_that_the_map_misses_are_errors_and_no_loss():
    config = make_config()
    params, batch = make_params(config), batch_of(supervised=1.0)
    batch = eagle_losses.with_teacher(batch, config, TARGET)
    missed = batch["teacher_token"].clone()
    missed[:] = 3
    terms, metrics = bound(config)(params, batch | {"teacher_token": missed})
    assert sum(terms.den.values()) == sum(terms.num.values()) == 0
    assert metrics["accuracy"].num.tolist() == [0, 0, 0]
    assert metrics["accuracy"].den.tolist() == [2 * 7, 2 * 6, 2 * 5]


def test_a_map_of_all_tokens_changes_nothing():
    config = make_config(draft_vocab_size=None)
    params, batch = make_params(config), batch_of()
    every = TARGET | {"draft_ids": torch.arange(VOCAB)}
    none = {name: TARGET[name] for name in ("embed", "head")}
    assert_close(results(params, batch, config, none), results(params, batch, config, every))


def pad_columns(batch, num_columns):
    pad = {name: torch.zeros_like(batch[name][:, :1]) for name in batch if name != "key"}
    wide = {k: torch.cat([batch[k]] + num_columns * [x], 1) for k, x in pad.items()}
    return batch | wide


def test_padding_changes_means_over_positions_only():
    batch = batch_of()
    for name, options in LOSSES.items():
        config = make_config(**options)
        objective, params = eagle3.objective(config), make_params(config)
        short, long = (
            objective(bound(config)(params, each)[0]) for each in (batch, pad_columns(batch, 4))
        )
        if name == "over positions":
            assert long < 0.8 * short
        else:
            torch.testing.assert_close(long, short)


def test_the_last_label_is_not_taught_by_padding():
    """The last position has no teacher: what stands behind the row must not become one."""
    config = make_config()
    params, batch = make_params(config), batch_of(supervised=1.0)
    padded = pad_columns(batch, 2)
    padded["final"][:, -2:] = 1e3
    assert_close(results(params, padded, config), results(params, batch, config))


@each_loss
def test_equivalent_window_whole_batch(options):
    """Ragged micro-steps, one with nothing to learn: lk_lambda has the weight of the window."""
    config = make_config(**options)
    params, batch = make_params(config), batch_of(num_rows=3, size=6)
    batch["loss_mask"][2] = False
    parts = [take_rows(batch, rows) for rows in ([0, 1], [2])]
    plan = "replay" if config.loss == "lk_lambda" else "columns"
    grad = functools.partial(window_grad, bound(config), eagle3.objective(config))
    whole = grad(plan="replay")(params, [join_rows(parts)])
    dens = {"den_fn": functools.partial(eagle3.den, config=config, target=TARGET)}
    for how in [{"plan": plan}] + [dens] * (config.loss != "lk_lambda"):
        window = grad(**how)(params, parts)
        assert window.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
        assert_close(window.grads, whole.grads, rtol=1e-9, atol=1e-11)
        assert_close(window.metrics, whole.metrics, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [LOSSES["kl"], LOSSES["lk_lambda"]], ids=["kl", "lk_lambda"])
def test_mean_of_parts_is_another_number(options):
    config = make_config(**options)
    params, batch = make_params(config), batch_of(num_rows=4, supervised=0.6)
    objective = eagle3.objective(config)
    parts = [bound(config)(params, take_rows(batch, rows))[0] for rows in ([0], [1, 2, 3])]
    pooled = objective(tree.map(torch.add, *parts))
    mean = sum(objective(part) for part in parts) / 2
    assert abs(mean - pooled) > 1e-3


@each_loss
def test_no_host_read_and_no_collective(options):
    config = make_config(**options)
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), batch_of()
    with count_host_syncs() as reads, count_collectives() as collectives:
        terms, _ = eagle3.loss_terms(params, batch, config, TARGET)
        sum(terms.num.values()).backward()
    assert (reads.total(), collectives.total()) == (0, 0), reads.places


def test_equivalent_module_pure():
    config = make_config()
    params, batch = make_params(config), batch_of()
    terms, metrics = call(bound(config), as_module(eagle3.apply, params), batch)
    expected = results(params, batch, config)
    assert_close((terms, metrics), (expected["terms"], expected["metrics"]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_params_have_wide_sums(dtype):
    config = make_config()
    batch = eagle_losses.with_teacher(batch_of(), config, TARGET)
    half = lambda x: x.to(dtype) if x.is_floating_point() else x
    params, target = tree.map(half, make_params(config)), tree.map(half, TARGET)
    terms, metrics = eagle3.loss_terms(params, tree.map(half, batch), config, target)
    wide = eagle3.loss_terms(make_params(config), batch, config, TARGET)[0]
    assert {x.dtype for x in tree.leaves((terms, metrics))} == {torch.float64}
    assert terms.den == wide.den
    # Three steps of a layer in bfloat16, which rounds by 2^-9 each time.
    assert sum(terms.num.values()).item() == pytest.approx(sum(wide.num.values()).item(), rel=0.05)


def test_fractional_masks_count_from_one_half_on():
    config = make_config()
    params, batch = make_params(config), batch_of(num_rows=1)
    batch["loss_mask"] = torch.tensor([[0.0, 0.3, 1.0, 0.6, 0.5, 0.9, 0.4, 1.0, 0.7]])
    whole = batch | {"loss_mask": (batch["loss_mask"] > 0.5).float()}
    assert_close(results(params, batch, config), results(params, whole, config), rtol=0, atol=0)


# Attention.


@few_examples
@given(st.integers(0, 9), st.integers(1, 6), st.integers(0, 3), st.integers(0, 4))
def test_equivalent_unrolled_attention_mask(seed, size, num_steps, chunk_size):
    """The keys of all steps side by side, under a mask, by torch's attention."""
    q = normal(seed, 2, 4, size, 3)
    pairs = [
        (normal(10 + k, 2, 2, size, 3), normal(20 + k, 2, 2, size, 3)) for k in range(num_steps + 1)
    ]
    found = unrolled_attention(q, pairs[0], pairs[1:], chunk_size=chunk_size)
    causal = torch.ones(size, size).tril().bool()
    mask = torch.cat([causal] + num_steps * [torch.eye(size).bool()], 1)
    keys, values = (torch.cat(each, 2) for each in zip(*pairs, strict=True))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(found, expected)


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


def known_text(num_rows=3, size=6):
    tokens = random.choice(random.split(random.key(5), num_rows), VOCAB, (size + 1,))
    captured = normal(7, num_rows, size, 2 * WIDTH)
    beside = torch.cat([captured, TARGET["embed"][tokens[:, :-1]]], -1)
    return tokens, captured, beside


@each_network
def test_equivalent_draft_chain_alone(network):
    config = make_config(**network)
    params, (tokens, captured, beside) = make_params(config), known_text()
    drafted = eagle3_draft.draft(params, beside, tokens[:, -1], config, TARGET)
    assert drafted.confidence is None
    for b in range(3):
        text = tokens[b].tolist()
        for step in range(config.num_steps):
            embedded = TARGET["embed"][text]
            state = naive_chain(params, captured[b], embedded, 5, config)[step]
            text.append(int(DRAFT_IDS[(params["head"] @ state).argmax()]))
        assert drafted.tokens[b].tolist() == text[7:]


@each_network
def test_draft_is_what_training_would_predict(network):
    """In a text that goes on with the draft, each step of training predicts the drafted token."""
    config = make_config(**network)
    params, (tokens, captured, beside) = make_params(config), known_text()
    drafted = eagle3_draft.draft(params, beside, tokens[:, -1], config, TARGET).tokens
    later = torch.full((3, 4, 2 * WIDTH), 1e3, dtype=torch.float64)  # it must not be read
    batch = {"tokens": torch.cat([tokens, drafted], 1), "captured": torch.cat([captured, later], 1)}
    states = eagle3.apply(params, batch, config, TARGET)
    for step in range(config.num_steps):
        index = eagle3.logits(params, states[:, 6 + step, step]).argmax(-1)
        assert torch.equal(DRAFT_IDS[index], drafted[:, step])


@pytest.mark.parametrize("whole", [False, True])
def test_equivalent_speculative_greedy(whole):
    config = make_config(draft_vocab_size=None) if whole else make_config()
    frozen = decoder.init(DECODER, random.key(0), std=0.7, dtype=torch.float64)
    target = frozen if whole else frozen | {"draft_ids": DRAFT_IDS}
    params, prompt = make_params(config), torch.tensor([3, 1, 4])
    plain_target = cached_decoder(frozen, DECODER, capacity=64, layers=(0, 2))
    expected = greedy(plain_target, prompt, 16)
    decoded = speculative_greedy(
        eagle3_draft.with_embeddings(plain_target, target["embed"]),
        lambda captured, token: eagle3_draft.draft(params, captured, token, config, target).tokens,
        prompt,
        16,
    )
    assert torch.equal(decoded.tokens, expected)
    assert all(0 <= kept <= config.num_steps for kept in decoded.accepted)


def test_trained_drafter_is_accepted():
    """The pieces fit: a drafter that has learned one text drafts it."""
    config = make_config(draft_vocab_size=None, num_steps=2, chunk_tokens=0, chunk_queries=0)
    frozen = decoder.init(DECODER, random.key(0), std=0.7, dtype=torch.float64)
    prompt = torch.tensor([3, 1, 4])
    plain_target = cached_decoder(frozen, DECODER, capacity=64, layers=(0, 2))
    text = torch.cat([prompt, greedy(plain_target, prompt, 20)])[None]
    captured, final = decoder.hidden_states(frozen, text, DECODER, layers=(0, 2))
    mask = torch.ones_like(text)
    batch = {"tokens": text, "loss_mask": mask, "captured": captured, "final": final}
    params = tree.map(lambda x: x.requires_grad_(), make_params(config))
    optimizer = torch.optim.Adam(tree.leaves(params), lr=0.03)
    for _ in range(60):
        terms, _ = eagle3.loss_terms(params, batch, config, frozen)
        optimizer.zero_grad()
        eagle3.objective(config)(terms).backward()
        optimizer.step()
    decoded = speculative_greedy(
        eagle3_draft.with_embeddings(plain_target, frozen["embed"]),
        lambda captured, token: eagle3_draft.draft(params, captured, token, config, frozen).tokens,
        prompt,
        18,
    )
    assert torch.equal(decoded.tokens, text[0, 3:21])
    assert decoded.tau > 2.5  # of at most 3


# The vocabulary.


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_roundtrip_maps(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    draft_ids = choose_draft_ids(torch.tensor(counts), size)
    assert torch.equal(draft_ids_of_maps(*maps_of_draft_ids(draft_ids, len(counts))), draft_ids)
    by_frequency = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    assert draft_ids.tolist() == sorted(by_frequency[:size])


@pytest.mark.parametrize(
    ("t2d", "d2t", "message"),
    [
        ([1, 0, 1], [0, 1, 1], "t2d has 2 ids and d2t has 3"),
        ([1, 0, 1], [0, 0], "draft id 1 is 1 by d2t and 2 by t2d"),
        ([1, 0, 1], [0, 2], "3 is no id of the target, which has 3; draft id 1 is 3 by d2t"),
        ([1, 0, 1], [2, -1], "2 stands before 0; draft id 0 is 2 by d2t and 0 by t2d"),
    ],
)
def test_wrong_maps_are_told(t2d, d2t, message):
    with pytest.raises(ValueError, match=rf"draft_ids_of_maps: d2t \+ arange must .*{message}"):
        draft_ids_of_maps(torch.tensor(t2d), torch.tensor(d2t))


def test_wrong_draft_ids_are_told():
    check = functools.partial(require_draft_ids, "train", vocab_size=5, draft_vocab_size=3)
    check(torch.tensor([0, 1, 4]))
    with pytest.raises(ValueError, match=r"train: .*there are 2 ids; 7 is no id of the target"):
        check(torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=r"train: .*4 stands before 1"):
        check(torch.tensor([0, 4, 1]))
    with pytest.raises(ValueError, match="there are 5 ids"):
        check(None)
    with pytest.raises(TypeError, match=r"draft_ids must be int64, got torch.int32"):
        check(torch.tensor([0, 1, 4], dtype=torch.int32))


@pytest.mark.parametrize("size", [0, 6])
def test_size_of_a_vocabulary_is_checked(size):
    with pytest.raises(ValueError, match=f"from 1 to the 5 ids of the target, got size={size}"):
        choose_draft_ids(torch.zeros(5), size)


# Errors.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("draft_vocab_size", VOCAB + 1),
        ("head_dim", 3),
        ("num_kv_heads", 3),
        ("norm_eps", 0.0),
        ("num_steps", 0),
        ("step_decay", 1.5),
        ("step_decay", math.nan),
        ("loss", "ce"),
        ("average", "row"),
        ("kl_scale", -1.0),
        ("kl_decay", math.inf),
        ("chunk_tokens", -1),
        ("chunk_queries", -1),
    ],
)
def test_config_names_the_bad_field(name, value):
    with pytest.raises(ValueError, match=rf"Config: {name} must be .*, got {name}="):
        make_config(**{name: value})


def test_missing_fields_are_named():
    config = make_config()
    batch = batch_of()
    del batch["captured"], batch["final"]
    with pytest.raises(ValueError, match=r"eagle3.*none of \['captured', 'final'\]"):
        eagle3.loss_terms(make_params(config), batch, config, TARGET)


def test_another_target_is_named():
    config = make_config()
    target = TARGET | {"draft_ids": DRAFT_IDS[:-1]}
    with pytest.raises(ValueError, match="draft_vocab_size=12 rows, got 17 and 11"):
        eagle3.loss_terms(make_params(config), batch_of(), config, target)
