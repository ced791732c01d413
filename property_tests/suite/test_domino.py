import dataclasses
import functools
import math

import pytest
import torch
from block_cases import (
    SHAPE,
    assert_close,
    known_batch,
    make_batch,
    naive_block,
    rows,
    sines,
    value_and_grads,
)
from dspark_cases import MASK_TOKEN, TARGET, VOCAB, WIDTH, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Ops

from numden.models import domino, domino_draft
from numden.models.module import as_module, call
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.pure import random, tree, window_grad

few_examples = settings(max_examples=6)
each_alignment = pytest.mark.parametrize("shift", [False, True], ids=["own label", "shifted"])
# A third of the way: the base has a weight of 1/3.
prepare = functools.partial(domino.prepare, step=4, num_steps=12)
batch_of = functools.partial(make_batch, prepare)
rows_of = functools.partial(rows, prepare)


def make_config(**changes):
    return domino.Config(**(SHAPE | {"gru_size": 5, "correction_rank": 3} | changes))


def make_params(config, seed=0):
    params = domino.init(config, random.key(seed), std=0.4, dtype=torch.float64)
    params["correction"]["out"] = normal(1, config.vocab_size, config.correction_rank)
    return params


def bound(config, target=TARGET):
    return functools.partial(domino.loss_terms, config=config, target=target)


def results(params, batch, config):
    return value_and_grads(bound(config), domino.objective(config), params, batch)


VIEWS = {"aten.detach", "aten.t"}

# Known numbers.


def known(monkeypatch, shift, which=slice(0, 2), weight=0.25, batch=None, **options):
    """The loss of known logits: head and correction are the identity."""
    shape = {"vocab_size": 13, "mask_token_id": 12, "block_size": 5, "shift_label": shift}
    config = make_config(**(shape | options))
    base = sines((2, 2, 5, 13), 0.37, 0.1)
    correction = sines((2, 2, 5, 13), 0.21, 0.4) / 2
    correction[:, :, 0] = 0
    slots = domino.Slots(*(x[which, :, config.first_slot :] for x in (base, correction)))
    monkeypatch.setattr(domino, "apply", lambda *_: slots)
    batch = {name: value[which] for name, value in (batch or known_batch()).items()}
    batch["base_weight"] = torch.full((len(batch["keep"]),), weight, dtype=torch.float64)
    eye = torch.eye(13, dtype=torch.float64)
    terms, metrics = domino.loss_terms({"correction": {"out": eye}}, batch, config, {"embed": eye})
    assert torch.equal(domino.den(batch, config), terms.den)
    return config, terms, metrics


@pytest.mark.parametrize(
    ("shift", "which", "final", "base", "den"),
    [
        (False, slice(0, 1), 30.680032, 27.434828, 7),
        (False, slice(1, 2), 13.015036, 12.178672, 4),
        (False, slice(0, 2), 43.695068, 39.613499, 11),
        (True, slice(0, 1), 28.493610, 29.393601, 9),
        (True, slice(1, 2), 18.761952, 16.726005, 4),
        (True, slice(0, 2), 47.255562, 46.119606, 13),
    ],
)
def test_known_loss_terms(monkeypatch, shift, which, final, base, den):
    _, terms, metrics = known(monkeypatch, shift, which)
    # The numbers have six digits behind the point, the last one not rounded.
    close = functools.partial(pytest.approx, abs=1e-6)
    assert terms.num["final"].item() == close(0.75 * final)
    assert terms.num["base"].item() == close(0.25 * base)
    assert terms.den == den
    assert metrics["ce_loss"].num.item() == close(final)
    assert metrics["base_ce_loss"].num.item() == close(base)
    assert metrics["base_weight"].num.item() == 0.25 * den


def test_known_loss(monkeypatch):
    config, terms, _ = known(monkeypatch, shift=True)
    assert domino.objective(config)(terms).item() == pytest.approx(3.613198, abs=1e-6)


@pytest.mark.parametrize(
    ("shift", "correct", "base_correct", "length", "den"),
    [(False, 0, 1, 3, 11), (True, 1, 1, 4, 13)],
)
def test_known_metrics(monkeypatch, shift, correct, base_correct, length, den):
    metrics = known(monkeypatch, shift)[2]
    assert (metrics["accuracy"].num, metrics["accuracy"].den) == (correct, den)
    assert (metrics["base_accuracy"].num, metrics["base_accuracy"].den) == (base_correct, den)
    assert (metrics["accepted_length"].num, metrics["accepted_length"].den) == (length, 3)
    assert metrics["base_accepted_length"].den == 3


@pytest.mark.parametrize(
    ("step", "num_steps", "weight"),
    [(0, 10, 1), (2, 10, 0.6), (5, 10, 0), (10, 10, 0), (3, None, 0)],
)
def test_known_schedule(step, num_steps, weight):
    config = make_config()
    assert domino.base_weight(step, num_steps, config) == pytest.approx(weight)
    batch = make_batch(domino.prepare, config)
    again = domino.prepare(batch, config, step=step, num_steps=num_steps)
    assert again["base_weight"].tolist() == [pytest.approx(weight)] * 3
    slow = make_config(base_start=0.5, base_decay_ratio=1.0)
    assert domino.base_weight(5, 10, slow) == 0.25
    assert domino.base_weight(0, 1, make_config(base_decay_ratio=0.1)) == 1.0


@each_alignment
def test_the_schedule_changes_the_weights_of_the_two_losses_alone(shift):
    config = make_config(shift_label=shift)
    params, batch = make_params(config), batch_of(config)
    losses = {}
    for step in (0, 3, 6):
        at = domino.prepare(batch, config, step=step, num_steps=12)
        terms, metrics = domino.loss_terms(params, at, config, TARGET)
        losses[step] = domino.objective(config)(terms).item()
        final, base = (
            (metrics[name].num / terms.den).item() for name in ("ce_loss", "base_ce_loss")
        )
        weight = 1 - step / 6
        assert losses[step] == pytest.approx((1 - weight) * final + weight * base, rel=1e-12)
    assert losses[3] == pytest.approx((losses[0] + losses[6]) / 2, rel=1e-12)
    # The base has no gradient to the correction, and at first it has all the weight.
    first = results(params, domino.prepare(batch, config, step=0, num_steps=12), config)
    assert tree.leaves(first["grads"]["gru"])[0].count_nonzero() == 0
    assert first["grads"]["context"]["weight"].count_nonzero() > 0


# The whole loss, block by block.


def naive_hidden(params, captured, token, anchor, config):
    ids = torch.tensor([int(token)] + [MASK_TOKEN] * (config.block_size - 1))
    hidden = naive_block(params, captured, TARGET["embed"][ids], anchor, config)
    return hidden if config.shift_label else hidden[1:]


def naive_logits(params, hidden, known, config):
    """Base and final logits of the slot behind ``known`` tokens, which torch's GRU reads."""
    gru = torch.nn.GRU(WIDTH, config.gru_size, bias=False, dtype=torch.float64)
    with torch.no_grad():
        gru.weight_ih_l0.copy_(params["gru"]["input"])
        gru.weight_hh_l0.copy_(params["gru"]["state"])
        state = gru(TARGET["embed"][known])[0][-1]
    base = TARGET["head"] @ hidden
    if len(known) <= config.prefix_size:
        return base, base
    joined = params["correction"]["hidden"] @ torch.cat([hidden, state])
    return base, base + params["correction"]["out"] @ (joined * joined.sigmoid())


def naive_loss(params, batch, config):
    final, base, weights = 0.0, 0.0, 0.0
    for b, n in batch["keep"].nonzero().tolist():
        anchor, tokens = int(batch["anchors"][b, n]), batch["tokens"][b]
        hidden = naive_hidden(params, batch["captured"][b], tokens[anchor], anchor, config)
        for i in range(len(hidden)):
            place = anchor + 1 + i
            if place < len(tokens) and batch["loss_mask"][b, place]:
                logits = naive_logits(params, hidden[i], tokens[anchor:place], config)
                ce_base, ce_final = (-z.log_softmax(-1)[tokens[place]].item() for z in logits)
                weight = math.exp(-i / config.decay_gamma) if config.decay_gamma else 1.0
                final, base, weights = (
                    final + weight * ce_final,
                    base + weight * ce_base,
                    weights + weight,
                )
    return final, base, weights


@each_alignment
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_size": 1, "decay_gamma": 2.0},
        {"prefix_size": 2, "sliding_layers": (1,), "sliding_window": 3},
    ],
)
def test_equivalent_loss_loops(shift, options):
    config = make_config(shift_label=shift, **options)
    params, batch = make_params(config), batch_of(config)
    final, base, den = naive_loss(params, batch, config)
    terms, metrics = domino.loss_terms(params, batch, config, TARGET)
    # Angles are float32 in the tables and float64 in the loops.
    close = functools.partial(pytest.approx, rel=1e-5)
    assert terms.num["final"].item() == close(final * 2 / 3)
    assert terms.num["base"].item() == close(base / 3)
    assert terms.den.item() == pytest.approx(den, rel=1e-12)
    assert metrics["ce_loss"].num.item() == close(final)
    assert metrics["base_ce_loss"].num.item() == close(base)
    assert final != base


def test_untrained_corrects_nothing():
    config = make_config()
    params, batch = domino.init(config, random.key(0), dtype=torch.float64), batch_of(config)
    final, base = domino.logits(params, domino.apply(params, batch, config, TARGET), TARGET)
    assert torch.equal(final, base)


def test_prefix_is_not_corrected():
    config = make_config(prefix_size=2)
    params, batch = make_params(config), batch_of(config)
    final, base = domino.logits(params, domino.apply(params, batch, config, TARGET), TARGET)
    same = (final == base).all(-1).flatten(0, 1).all(0)
    assert same.tolist() == [True, True, False]


# The laws of the loss that the table of losses does not have.


@each_alignment
@pytest.mark.parametrize("chunk_blocks", [1, 7, 1000])
def test_equivalent_chunked_whole(shift, chunk_blocks):
    config = make_config(shift_label=shift, decay_gamma=3.0, prefix_size=1)
    params, batch = make_params(config), batch_of(config)
    whole = results(params, batch, dataclasses.replace(config, chunk_blocks=0))
    chunked = results(params, batch, dataclasses.replace(config, chunk_blocks=chunk_blocks))
    assert_close(chunked, whole, rtol=1e-11, atol=1e-12)
    assert all(grad.count_nonzero() > 0 for grad in tree.leaves(whole["grads"]))


@few_examples
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
def test_additive_over_rows_whose_anchors_are_drawn_anew(seed, first, shift):
    config = make_config(shift_label=shift)
    params, batch = make_params(config), batch_of(config, num_rows=4, seed=seed)
    parts = [
        results(params, rows_of(batch, config, which), config)
        for which in (slice(0, first), slice(first, 4))
    ]
    assert_close(
        tree.map(torch.add, *parts), results(params, batch, config), rtol=1e-10, atol=1e-11
    )


@each_alignment
@pytest.mark.parametrize("supervised", ["nowhere", "alone", "no rows"])
def test_empty_batches_give_exact_zeros(shift, supervised):
    config = make_config(shift_label=shift)
    params, batch = make_params(config), batch_of(config)
    if supervised == "no rows":
        batch = rows_of(batch, config, slice(0, 0))
    else:
        mask = torch.zeros_like(batch["loss_mask"])
        mask[:, ::2] = supervised == "alone"  # no two in a row
        batch = rows_of(batch | {"loss_mask": mask}, config, slice(None))
    found = results(params, batch, config)
    assert all(leaf.count_nonzero() == 0 for leaf in tree.leaves(found))


@each_alignment
def test_rows_shorter_than_a_block(shift):
    config = make_config(block_size=6, shift_label=shift)
    params = make_params(config)
    for size in (1, 2, 3):
        batch = batch_of(config, size=size, supervised=1.0)
        found = results(params, batch, config)
        final, _, den = naive_loss(params, batch, config)
        assert found["terms"].den == den == 3 * sum(range(size))
        assert found["terms"].num["final"].item() == pytest.approx(final * 2 / 3, rel=1e-5)
        assert all(leaf.isfinite().all() for leaf in tree.leaves(found))


def single_block(config, loss_mask, anchor=1):
    batch = batch_of(config, num_rows=1, size=len(loss_mask))
    batch |= {"loss_mask": torch.tensor([loss_mask]), "anchors": torch.tensor([[anchor]])}
    return batch | {"keep": torch.tensor([[True]])}


@each_alignment
def test_accepted_length_ends_at_the_first_unsupervised_label(shift):
    config = make_config(block_size=5, shift_label=shift)
    params, silent = make_params(config), tree.map(torch.zeros_like, TARGET)
    params["correction"]["out"].zero_()
    batch = single_block(config, [1, 1, 1, 0, 1, 1, 1])
    batch["tokens"] = torch.zeros_like(batch["tokens"])  # of equal logits the first is the highest
    _, metrics = domino.loss_terms(params, batch, config, silent)
    assert metrics["accuracy"].num == 3 + shift
    for name in ("accepted_length", "base_accepted_length"):
        assert (metrics[name].num, metrics[name].den) == (2, 1)


@each_alignment
def test_fractional_masks_count_from_one_half_on(shift):
    config = make_config(block_size=5, shift_label=shift)
    batch = single_block(config, [1.0, 0.6, 0.9, 0.4, 0.7, 0.5, 1.0])
    whole = batch | {"loss_mask": (batch["loss_mask"] > 0.5).float()}
    params = make_params(config)
    assert_close(results(params, batch, config), results(params, whole, config), rtol=0, atol=0)
    assert domino.den(batch, config) == 2 + shift


def test_a_corrected_slot_reads_the_tokens_before_it_and_no_other():
    config = make_config(block_size=5)
    params = make_params(config)
    batch = single_block(config, [1] * 8, anchor=2)
    final = lambda batch: domino.logits(
        params, domino.apply(params, batch, config, TARGET), TARGET
    )[0][0, 0]
    for place in range(8):
        changed = batch | {"tokens": batch["tokens"].clone()}
        changed["tokens"][0, place] = (changed["tokens"][0, place] + 1) % MASK_TOKEN
        differs = (final(changed) != final(batch)).any(-1).tolist()
        # The slot with label 3 + i reads the tokens from 2 to 2 + i.
        assert differs == [2 <= place <= 2 + i for i in range(4)]


@each_alignment
def test_no_host_read_and_no_collective(shift):
    config = make_config(chunk_blocks=2, shift_label=shift)
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), batch_of(config)
    with count_host_syncs() as reads, count_collectives() as collectives:
        terms, _ = domino.loss_terms(params, batch, config, TARGET)
        (terms.num["final"] + terms.num["base"]).backward()
    assert (reads.total(), collectives.total()) == (0, 0), reads.places


def test_logits_exist_for_a_few_blocks_only():
    config = make_config(vocab_size=1000, chunk_blocks=2)
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), batch_of(config)
    target = {"embed": normal(2, 1000, WIDTH)}
    with Ops() as ops:
        terms, _ = domino.loss_terms(params, batch, config, target)
        torch.stack(list(terms.num.values())).sum().backward()
    # Two blocks at once, of three slots each; what is as large as embedding and head is a view.
    assert max(size for name, _, size in ops.calls if name not in VIEWS) == 6 * 1000


@each_alignment
def test_equivalent_module_pure(shift):
    config = make_config(shift_label=shift)
    params, batch = make_params(config), batch_of(config)
    terms, metrics = call(bound(config), as_module(domino.apply, params), batch)
    expected = results(params, batch, config)
    assert_close((terms, metrics), (expected["terms"], expected["metrics"]), rtol=0, atol=0)


@each_alignment
def test_equivalent_window_whole_batch(shift):
    """Ragged micro-steps: one ratio of sums, no mean of ratios, and no bias of the den."""
    config = make_config(shift_label=shift)
    params, batch = make_params(config), batch_of(config, num_rows=4)
    grad = functools.partial(window_grad, bound(config), domino.objective(config))
    whole = grad()(params, [batch])
    parts = [rows_of(batch, config, which) for which in (slice(0, 1), slice(1, 4))]
    for options in ({}, {"den_fn": functools.partial(domino.den, config=config)}):
        window = grad(**options)(params, parts)
        assert window.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
        assert_close(window.grads, whole.grads, rtol=1e-9, atol=1e-11)
        assert_close(window.metrics, whole.metrics, rtol=1e-10, atol=1e-12)
    final, base = whole.metrics["ce_loss"], whole.metrics["base_ce_loss"]
    assert whole.loss.item() == pytest.approx((2 * final + base).item() / 3, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_params_have_wide_sums(dtype):
    config = make_config()
    batch = batch_of(config)
    half = lambda x: x.to(dtype) if x.is_floating_point() else x
    params, target = tree.map(half, make_params(config)), tree.map(half, TARGET)
    narrow = batch | {"captured": half(batch["captured"])}
    terms, metrics = domino.loss_terms(params, narrow, config, target)
    wide = domino.loss_terms(make_params(config), batch, config, TARGET)[0]
    assert {x.dtype for x in tree.leaves((terms, metrics))} == {torch.float64}
    assert torch.equal(terms.den, wide.den)
    # Two layers of bfloat16, which rounds by 2^-9 each time.
    assert terms.num["final"].item() == pytest.approx(wide.num["final"].item(), rel=0.05)


# Drafting.


@each_alignment
@pytest.mark.parametrize("prefix_size", [0, 1])
def test_equivalent_draft_loops(shift, prefix_size):
    config = make_config(shift_label=shift, prefix_size=prefix_size)
    params, captured, token = make_params(config), normal(7, 3, 6, 16), torch.tensor([5, 0, 11])
    drafted = domino_draft.draft(params, captured, token, config, TARGET)
    assert drafted.confidence is None
    for b in range(3):
        known = token[b : b + 1]
        for hidden in naive_hidden(params, captured[b], token[b], 6, config):
            best = naive_logits(params, hidden, known, config)[1].argmax(-1, keepdim=True)
            known = torch.cat([known, best])
        assert torch.equal(drafted.tokens[b], known[1:])


@each_alignment
def test_draft_is_what_training_would_predict(shift):
    """In a text that goes on with the draft, each slot of training predicts the drafted token."""
    config = make_config(shift_label=shift)
    params, batch = make_params(config), batch_of(config, num_rows=2)
    batch |= {"anchors": torch.tensor([[6], [6]]), "keep": torch.ones(2, 1, dtype=torch.bool)}
    captured, token = batch["captured"][:, :6], batch["tokens"][:, 6]
    drafted = domino_draft.draft(params, captured, token, config, TARGET).tokens
    batch["tokens"][:, 7 : 7 + config.num_drafted] = drafted
    batch["loss_mask"][:] = True
    metrics = domino.loss_terms(params, batch, config, TARGET)[1]
    assert metrics["accuracy"].num == metrics["accuracy"].den == 2 * config.num_drafted
    assert metrics["accepted_length"].num == 2 * (1 + config.num_drafted)


@each_alignment
def test_draft_corrects_each_token_by_those_before(shift):
    """A correction that knows what follows each token, on a base that says 0 at all places."""
    eye = torch.eye(WIDTH, dtype=torch.float64)
    config = make_config(
        vocab_size=WIDTH,
        mask_token_id=WIDTH - 1,
        gru_size=WIDTH,
        correction_rank=WIDTH,
        shift_label=shift,
    )
    params, zero = make_params(config), torch.zeros_like(eye)
    # The state is that of the last token alone: the update gate is shut, the new state saturates.
    params["gru"] = {
        "input": torch.cat([zero, zero - 50, 50 * eye]),
        "state": torch.cat([zero] * 3),
    }
    params["correction"] = {"hidden": torch.cat([zero, 50 * eye], 1), "out": eye.roll(1, 0)}
    target = {"embed": eye, "head": zero}
    captured = normal(6, 2, 5, 16)
    draft = functools.partial(domino_draft.draft, params, captured, target=target)
    tokens = draft(torch.tensor([3, 6]), config).tokens
    assert tokens[:, :3].tolist() == [[4, 5, 6], [7, 0, 1]]
    later = dataclasses.replace(config, prefix_size=1)
    assert draft(torch.tensor([3, 6]), later).tokens[:, :3].tolist() == [[0, 1, 2]] * 2


# Errors.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 1),
        ("mask_token_id", VOCAB),
        ("decay_gamma", -1.0),
        ("gru_size", 0),
        ("correction_rank", 0),
        ("prefix_size", 3),
        ("prefix_size", -1),
        ("base_start", 1.1),
        ("base_decay_ratio", -0.1),
        ("base_decay_ratio", math.nan),
    ],
)
def test_config_names_the_bad_field(name, value):
    with pytest.raises(ValueError, match=rf"Config: {name} must be .*, got {name}="):
        make_config(**{name: value})


def test_one_slot_may_draft_where_labels_are_shifted():
    assert make_config(block_size=1, shift_label=True).num_drafted == 1


def test_missing_fields_are_named():
    config = make_config()
    batch = batch_of(config)
    del batch["base_weight"]
    with pytest.raises(ValueError, match=r"domino.loss_terms.*got none of \['base_weight'\]"):
        domino.loss_terms(make_params(config), batch, config, TARGET)
