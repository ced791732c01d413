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

from numden.models import dflash, dflash_draft
from numden.models.module import as_module, call
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.pure import random, tree, window_grad

few_examples = settings(max_examples=6)
LOSSES = {
    "ce": {},
    "decay": {"decay_gamma": 3.0},
    "full": {"dpace": "full"},
    "cumulative": {"dpace": "cumulative", "dpace_average": "anchor"},
    "continuation": {"dpace": "continuation", "dpace_average": "row_of_anchors"},
}
each_loss = pytest.mark.parametrize("options", list(LOSSES.values()), ids=list(LOSSES))
batch_of = functools.partial(make_batch, dflash.prepare)
rows_of = functools.partial(rows, dflash.prepare)


def make_config(**changes):
    return dflash.Config(**(SHAPE | changes))


def make_params(config, seed=0):
    return dflash.init(config, random.key(seed), std=0.4, dtype=torch.float64)


def bound(config, target=TARGET):
    return functools.partial(dflash.loss_terms, config=config, target=target)


def results(params, batch, config):
    return value_and_grads(bound(config), dflash.objective(config), params, batch)


VIEWS = {"aten.detach", "aten.t"}

# Known numbers.

IDENTITY = {"embed": torch.eye(13, dtype=torch.float64)}


def known_terms(monkeypatch, which=slice(0, 2), batch=None, **options):
    """The loss of known logits: the network gives them, and the head is the identity."""
    shape = {"vocab_size": 13, "mask_token_id": 12, "block_size": 5}
    config = make_config(**(shape | options))
    values = sines((2, 2, 5, 13), 0.37, 0.1)[which, :, 1:]
    monkeypatch.setattr(dflash, "apply", lambda *_: values)
    batch = {name: value[which] for name, value in (batch or known_batch()).items()}
    terms, metrics = dflash.loss_terms({}, batch, config, IDENTITY)
    assert torch.equal(dflash.den(batch, config), terms.den)
    return terms.num["ce"].item(), terms.den.item(), metrics


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(27.434828, 7), (12.178672, 4), (39.613499, 11)]),
        ({"dpace": "full"}, [(13.759849, 1), (5.082534, 1), (18.842383, 2)]),
        ({"dpace": "cumulative"}, [(8.031417, 1), (2.893929, 1), (10.925346, 2)]),
        ({"dpace": "continuation"}, [(44.023184, 1), (18.069653, 1), (62.092837, 2)]),
        (
            {"dpace": "full", "dpace_average": "row_of_anchors"},
            [(6.879924, 1), (5.082534, 1), (11.962459, 2)],
        ),
        (
            {"dpace": "full", "dpace_average": "anchor"},
            [(13.759849, 2), (5.082534, 1), (18.842383, 3)],
        ),
    ],
)
def test_known_loss_terms(monkeypatch, options, expected):
    for which, (num, den) in zip([slice(0, 1), slice(1, 2), slice(0, 2)], expected, strict=True):
        found = known_terms(monkeypatch, which, **options)
        # The numbers have six digits behind the point, the last one not rounded.
        assert found[:2] == (pytest.approx(num, abs=1e-6), den)


def test_known_mean_of_row_means_is_another_number(monkeypatch):
    by_row = [known_terms(monkeypatch, slice(row, row + 1)) for row in (0, 1)]
    means = [num / den for num, den, _ in by_row]
    num, den, _ = known_terms(monkeypatch)
    assert num / den == pytest.approx(3.601227, abs=1e-6)
    assert sum(means) / 2 == pytest.approx(3.481965, abs=1e-6)


def test_known_dens_with_decay(monkeypatch):
    assert known_terms(monkeypatch, decay_gamma=7.0)[1] == pytest.approx(9.157944, abs=1e-6)
    one_block = known_batch() | {"keep": torch.tensor([[True, False], [False, False]])}
    den = known_terms(monkeypatch, batch=one_block, decay_gamma=7.0)[1]
    assert den == pytest.approx(3.269794, abs=1e-6)


def test_known_accuracy(monkeypatch):
    accuracy = known_terms(monkeypatch)[2]["accuracy"]
    assert (accuracy.num.item(), accuracy.den.item()) == (1, 11)


def test_block_that_reaches_beyond_the_row_counts_what_is_inside(monkeypatch):
    short = {
        "tokens": torch.tensor([[1, 4, 2, 8]] * 2),
        "loss_mask": torch.ones(2, 4),
        "anchors": torch.tensor([[2, 0]] * 2),
        "keep": torch.tensor([[True, False]] * 2),
        "captured": torch.zeros(2, 4, 1),
    }
    num, den, _ = known_terms(monkeypatch, slice(0, 1), batch=short)
    logits = sines((2, 2, 5, 13), 0.37, 0.1)[0, 0, 1]
    assert den == 1.0
    assert num == pytest.approx(-logits.log_softmax(-1)[8].item())


def test_alpha_of_dpace_matters(monkeypatch):
    nums = [known_terms(monkeypatch, dpace="full", dpace_alpha=a)[0] for a in (0.0, 0.5, 1.0)]
    assert len(set(nums)) == 3


# The whole loss, block by block.


def naive_loss(params, batch, config):
    """The same by loops over blocks and slots, each block run alone."""
    size, total, weights = config.block_size, 0.0, 0.0
    for b, n in batch["keep"].nonzero().tolist():
        anchor = int(batch["anchors"][b, n])
        ids = torch.tensor([int(batch["tokens"][b, anchor])] + [MASK_TOKEN] * (size - 1))
        hidden = naive_block(params, batch["captured"][b], TARGET["embed"][ids], anchor, config)
        log_probs = (hidden @ TARGET["head"].T).log_softmax(-1)
        for k in range(1, size):
            place = anchor + k
            if place < batch["tokens"].shape[1] and batch["loss_mask"][b, place]:
                weight = math.exp(-(k - 1) / config.decay_gamma) if config.decay_gamma else 1.0
                total -= weight * log_probs[k, batch["tokens"][b, place]].item()
                weights += weight
    return total, weights


@pytest.mark.parametrize("sliding", [{}, {"sliding_layers": (1,), "sliding_window": 3}])
@pytest.mark.parametrize("gamma", [None, 2.0])
def test_equivalent_loss_loops(sliding, gamma):
    config = make_config(decay_gamma=gamma, **sliding)
    params, batch = make_params(config), batch_of(config)
    num, den = naive_loss(params, batch, config)
    terms, metrics = dflash.loss_terms(params, batch, config, TARGET)
    # Angles are float32 in the tables and float64 in the loops.
    assert terms.num["ce"].item() == pytest.approx(num, rel=1e-5)
    assert terms.den.item() == pytest.approx(den, rel=1e-12)
    assert metrics["ce_loss"].num.item() == pytest.approx(num, rel=1e-5)


# The laws of the loss that the table of losses does not have.


@each_loss
@pytest.mark.parametrize("chunk_blocks", [1, 7, 1000])
def test_equivalent_chunked_whole(options, chunk_blocks):
    config = make_config(**options)
    params, batch = make_params(config), batch_of(config)
    whole = results(params, batch, dataclasses.replace(config, chunk_blocks=0))
    chunked = results(params, batch, dataclasses.replace(config, chunk_blocks=chunk_blocks))
    assert_close(chunked, whole, rtol=1e-11, atol=1e-12)


@few_examples
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(list(LOSSES)))
def test_additive_over_rows_whose_anchors_are_drawn_anew(seed, first, name):
    config = make_config(**LOSSES[name])
    params, batch = make_params(config), batch_of(config, num_rows=4, seed=seed)
    parts = [
        results(params, rows_of(batch, config, which), config)
        for which in (slice(0, first), slice(first, 4))
    ]
    assert_close(
        tree.map(torch.add, *parts), results(params, batch, config), rtol=1e-10, atol=1e-11
    )


@each_loss
@pytest.mark.parametrize("supervised", ["nowhere", "alone", "no rows"])
def test_empty_batches_give_exact_zeros(options, supervised):
    config = make_config(**options)
    params, batch = make_params(config), batch_of(config)
    if supervised == "no rows":
        batch = rows_of(batch, config, slice(0, 0))
    else:
        mask = torch.zeros_like(batch["loss_mask"])
        mask[:, ::2] = supervised == "alone"  # no two in a row
        batch = rows_of(batch | {"loss_mask": mask}, config, slice(None))
    found = results(params, batch, config)
    assert all(leaf.count_nonzero() == 0 for leaf in tree.leaves(found))
    assert dflash.den(batch, config) == 0


@each_loss
def test_rows_without_anchors_change_nothing(options):
    """Padding rows: also the number of rows that D-PACE averages over."""
    config = make_config(**options)
    params, batch = make_params(config), batch_of(config)
    mask = batch["loss_mask"].clone()
    mask[1] = False
    masked = rows_of(batch | {"loss_mask": mask}, config, slice(None))
    without = rows_of(masked, config, torch.tensor([0, 2]))
    assert not masked["keep"][1].any()
    assert_close(results(params, masked, config), results(params, without, config))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_shorter_than_a_block(size):
    config = make_config(block_size=6)
    params, batch = make_params(config), batch_of(config, size=size, supervised=1.0)
    found = results(params, batch, config)
    num, den = naive_loss(params, batch, config)
    assert found["terms"].den == den == 3 * sum(range(size))
    assert found["terms"].num["ce"].item() == pytest.approx(num, rel=1e-5)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(found))


def single_block(loss_mask):
    config = make_config(block_size=5)
    batch = batch_of(config, num_rows=1, size=len(loss_mask))
    batch |= {"loss_mask": torch.tensor([loss_mask]), "anchors": torch.tensor([[1]])}
    return config, batch | {"keep": torch.tensor([[True]])}


def test_labels_behind_a_gap_count_in_the_loss_and_end_the_accepted_length():
    config, batch = single_block([1, 1, 1, 0, 1, 1, 1])
    batch["tokens"] = torch.zeros_like(batch["tokens"])  # of equal logits the first is the highest
    silent = tree.map(torch.zeros_like, TARGET)
    terms, metrics = dflash.loss_terms(make_params(config), batch, config, silent)
    assert terms.den == metrics["accuracy"].num == 3
    assert metrics["accepted_length"].num == 2  # one slot before the gap, and one more token
    assert metrics["accepted_length"].den == 1


def test_fractional_masks_count_from_one_half_on():
    config, batch = single_block([1.0, 0.6, 0.9, 0.4, 0.7, 0.5, 1.0])
    whole = batch | {"loss_mask": (batch["loss_mask"] > 0.5).float()}
    params = make_params(config)
    assert_close(results(params, batch, config), results(params, whole, config), rtol=0, atol=0)
    assert dflash.den(batch, config) == 2


@each_loss
def test_no_host_read_and_no_collective(options):
    config = make_config(chunk_blocks=2, **options)
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), batch_of(config)
    with count_host_syncs() as reads, count_collectives() as collectives:
        terms, _ = dflash.loss_terms(params, batch, config, TARGET)
        terms.num["ce"].backward()
    assert (reads.total(), collectives.total()) == (0, 0), reads.places


def test_logits_exist_for_a_few_blocks_only():
    config = make_config(vocab_size=1000, chunk_blocks=2)
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), batch_of(config)
    target = {"embed": normal(2, 1000, WIDTH)}
    with Ops() as ops:
        terms, _ = dflash.loss_terms(params, batch, config, target)
        torch.stack(list(terms.num.values())).sum().backward()
    # Two blocks at once, of three slots each; what is as large as embedding and head is a view.
    assert max(size for name, _, size in ops.calls if name not in VIEWS) == 6 * 1000


@each_loss
def test_equivalent_module_pure(options):
    config = make_config(**options)
    params, batch = make_params(config), batch_of(config)
    terms, metrics = call(bound(config), as_module(dflash.apply, params), batch)
    expected = results(params, batch, config)
    assert_close((terms, metrics), (expected["terms"], expected["metrics"]), rtol=0, atol=0)


@each_loss
def test_equivalent_window_whole_batch(options):
    """Ragged micro-steps, one of them with nothing to learn from, and dens that come first."""
    config = make_config(**options)
    params, batch = make_params(config), batch_of(config, num_rows=4)
    mask = batch["loss_mask"].clone()
    mask[3] = False
    batch = rows_of(batch | {"loss_mask": mask}, config, slice(None))
    grad = functools.partial(window_grad, bound(config), dflash.objective(config))
    whole = grad()(params, [batch])
    parts = [rows_of(batch, config, which) for which in (slice(0, 1), slice(1, 3), slice(3, 4))]
    for options in ({}, {"den_fn": functools.partial(dflash.den, config=config)}):
        window = grad(**options)(params, parts)
        assert window.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
        assert_close(window.grads, whole.grads, rtol=1e-9, atol=1e-11)
        assert_close(window.metrics, whole.metrics, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_params_have_wide_sums(dtype):
    config = make_config(dpace="full")
    batch = batch_of(config)
    half = lambda x: x.to(dtype) if x.is_floating_point() else x
    params, target = tree.map(half, make_params(config)), tree.map(half, TARGET)
    terms, metrics = dflash.loss_terms(params, tree.map(half, batch), config, target)
    wide = dflash.loss_terms(make_params(config), batch, config, TARGET)[0]
    assert {x.dtype for x in tree.leaves((terms, metrics))} == {torch.float64}
    assert torch.equal(terms.den, wide.den)
    # Two layers of bfloat16, which rounds by 2^-9 each time.
    assert terms.num["ce"].item() == pytest.approx(wide.num["ce"].item(), rel=0.05)


# Drafting.


@pytest.mark.parametrize("sliding", [{}, {"sliding_layers": (0,), "sliding_window": 2}])
def test_equivalent_draft_block_alone(sliding):
    config = make_config(**sliding)
    params, captured, token = make_params(config), normal(7, 3, 6, 16), torch.tensor([5, 0, 11])
    drafted = dflash_draft.draft(params, captured, token, config, TARGET)
    assert drafted.confidence is None
    for b in range(3):
        ids = torch.tensor([int(token[b]), MASK_TOKEN, MASK_TOKEN, MASK_TOKEN])
        hidden = naive_block(params, captured[b], TARGET["embed"][ids], 6, config)
        expected = (hidden[1:] @ TARGET["head"].T).argmax(-1)
        assert torch.equal(drafted.tokens[b], expected)


def test_draft_is_what_training_would_predict():
    """The first drafted token is the one that training predicts behind the anchor, and so on."""
    config = make_config()
    params, batch = make_params(config), batch_of(config, num_rows=2)
    batch |= {"anchors": torch.tensor([[6], [6]]), "keep": torch.ones(2, 1, dtype=torch.bool)}
    drafted = dflash_draft.draft(
        params, batch["captured"][:, :6], batch["tokens"][:, 6], config, TARGET
    )
    hidden = dflash.apply(params, batch, config, TARGET)
    assert torch.equal(dflash.logits(hidden, TARGET)[:, 0].argmax(-1), drafted.tokens)
    # A text that goes on as drafted is right everywhere.
    batch["tokens"][:, 7:10] = drafted.tokens
    batch["loss_mask"][:] = True
    accuracy = dflash.loss_terms(params, batch, config, TARGET)[1]["accuracy"]
    assert (accuracy.num, accuracy.den) == (6, 6)


# Errors.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 1),
        ("vocab_size", 0),
        ("mask_token_id", VOCAB),
        ("num_anchors", 0),
        ("decay_gamma", 0.0),
        ("chunk_blocks", -1),
        ("kernel", "fast"),
        ("dpace", "half"),
        ("dpace_alpha", 1.5),
        ("dpace_alpha", math.nan),
        ("dpace_average", "batch"),
    ],
)
def test_config_names_the_bad_field(name, value):
    with pytest.raises(ValueError, match=rf"Config: {name} must be .*, got {name}="):
        make_config(**{name: value})


def test_decay_and_dpace_exclude_each_other():
    with pytest.raises(ValueError, match="decay_gamma must be None with dpace"):
        make_config(decay_gamma=2.0, dpace="full")


def test_missing_fields_are_named():
    config = make_config()
    batch = batch_of(config)
    del batch["captured"], batch["keep"]
    with pytest.raises(ValueError, match=r"dflash.*none of \['captured', 'keep'\]. `prepare` adds"):
        dflash.loss_terms(make_params(config), batch, config, TARGET)
