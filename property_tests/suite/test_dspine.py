import dataclasses
import functools
import math
import re

import pytest
import torch
from dspine_cases import (
    RANK,
    TARGET,
    make_batch,
    make_config,
    make_params,
    make_texts,
    place,
    rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from numden import pure
from numden.models import dspine
from numden.models.dspine_network import refine
from numden.models.module import as_module, call
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.pure import tree
from numden.pure.terms import LossTerms, divide

few_examples = settings(max_examples=4)


def bound(config, target=TARGET):
    return functools.partial(dspine.loss_terms, config=config, target=target)


def assert_close(a, b, **tolerance):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


close = functools.partial(assert_close, rtol=1e-9, atol=1e-11)


def value_and_grads(params, batch, config, target=TARGET):
    """Sums, metrics, and the gradient of all sums together, each with a weight of its own."""

    def total(params):
        terms, metrics = dspine.loss_terms(params, batch, config, target)
        weighted = [(i + 1) * num for i, num in enumerate(terms.num.values())]
        return torch.stack(weighted).sum(), (terms, metrics)

    grads, (terms, metrics) = torch.func.grad(total, has_aux=True)(params)
    return {"grads": grads, "terms": terms, "metrics": metrics}


# The schedule.


@pytest.mark.parametrize(
    ("step", "alignment", "replacement"),
    [
        (-3, 0.0, 0.5),
        (0, 0.0, 0.5),
        (100, 0.342465753, 0.5),
        (146, 0.5, 0.27),
        (150, 0.5, 0.25),
        (200, 0.5, 0.0),
        (600, 0.5, 0.0),
    ],
)
def test_schedule(step, alignment, replacement):
    found = dspine.schedule(make_config(), step, 600)
    assert found == pytest.approx((alignment, replacement), rel=1e-6, abs=1e-12)


def test_schedule_without_an_end_or_a_warmup():
    assert dspine.schedule(make_config(), 300) == (0.5, 0.0)
    assert dspine.schedule(make_config(alignment_warmup_steps=0), 0, 0) == (0.5, 0.0)


# The sums.


def test_weights_end_at_the_first_gap():
    config = make_config(block_size=6)
    params = make_params(config)
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]])
    batch = place(make_batch(config, num_rows=1) | {"loss_mask": mask}, [1])

    def touched(name, first):
        other = batch[name].index_fill(1, torch.arange(first, 12), 9)
        return value_and_grads(params, batch | {name: other}, config)

    before = value_and_grads(params, batch, config)
    assert before["terms"].den.item() == pytest.approx(1.86687789975, abs=1e-11)
    assert dspine.den(batch, config) == before["terms"].den
    # Slots 1 and 2 count: their teachers are at positions 1 and 2, their labels at 2 and 3.
    for name, first in [("final", 3), ("tokens", 4)]:
        assert_close(touched(name, first), before, rtol=0, atol=0)
        nums = touched(name, first - 1)["terms"].num
        assert any(not torch.equal(num, nums[each]) for each, num in before["terms"].num.items())


def test_den_of_uneven_rows():
    config = make_config()
    mask = torch.zeros(2, 12)
    mask[0, 1:3] = 1
    mask[1, 1:] = 1
    batch = place({"loss_mask": mask}, [1, 1])
    assert dspine.den(batch, config).item() == pytest.approx(3.618355192825, abs=1e-12)


def naive_sums(params, batch, config):
    """Slot by slot, from the network's states."""
    states = dspine.apply(params, batch, config, TARGET)
    tokens, head, codes = batch["tokens"], TARGET["head"], TARGET["codes"]
    sums = dict.fromkeys(("ce", "l1", "refined_ce", "refined_l1", "alignment", "den"), 0.0)
    sums |= {"covered": 0.0, "correct": 0.0, "slots": 0.0}
    for b, n in batch["keep"].nonzero().tolist():
        anchor = int(batch["anchors"][b, n])
        for i in range(1, config.block_size):
            at = anchor + i
            if at >= tokens.shape[1] or not batch["loss_mask"][b, at]:
                break
            w, y = math.exp(-(i - 1) / config.decay_gamma), int(tokens[b, at])
            p = (head @ batch["final"][b, at - 1]).softmax(-1)
            q = (head @ states.hidden[b, n, i - 1]).softmax(-1)
            chosen = q.argsort(descending=True)[: config.top_k]
            u = math.sqrt(RANK) * codes[tokens[b, at - 1]]
            refined = (
                head[chosen] @ refine(params, states.before[b, n, i - 1], u, config)
            ).softmax(-1)
            mass = p[chosen].sum()
            hits = (chosen == y).nonzero().flatten().tolist()
            sums["den"] += w
            sums["ce"] -= w * q[y].log()
            sums["l1"] += w * (p - q).abs().sum()
            for hit in hits:
                sums["refined_ce"] -= w * refined[hit].log()
            if mass > config.candidate_mass_threshold:
                sums["refined_l1"] += w * (refined - p[chosen] / mass).abs().sum()
            for feature in states.features:
                f = feature[b, n, i - 1]
                sums["alignment"] += w * (1 - f @ codes[y] / f.norm() / codes[y].norm())
            sums["covered"] += len(hits)
            sums["correct"] += int(q.argmax() == y)
            sums["slots"] += 1
    return sums


@pytest.mark.parametrize("threshold", [1e-4, 0.05])
def test_equivalent_sums_slot_by_slot(threshold):
    config = make_config(candidate_mass_threshold=threshold, top_k=12, decay_gamma=3.0)
    params, batch = make_params(config), make_batch(config, num_rows=4)
    expected = naive_sums(params, batch, config)
    terms, metrics = dspine.loss_terms(params, batch, config, TARGET)
    for name, num in terms.num.items():
        assert num.item() == pytest.approx(float(expected[name]), rel=1e-9), name
        assert num > 0
    assert terms.den.item() == pytest.approx(expected["den"], rel=1e-12)
    c = config.ce_weight
    refined = float(c * expected["refined_ce"] + (1 - c) * expected["refined_l1"])
    slots = expected["slots"]
    for name, num, den in [
        ("refinement_loss", refined, expected["den"]),
        ("alignment_loss", float(expected["alignment"]), expected["den"]),
        ("candidate_coverage", expected["covered"], slots),
        ("accuracy", expected["correct"], slots),
    ]:
        got = metrics[name]
        assert (got.num.item(), got.den.item()) == pytest.approx((num, den), rel=1e-9), name
    assert 0 < expected["covered"] < slots


@pytest.mark.parametrize("chunk_blocks", [1, 3, 1000])
def test_equivalent_chunked_whole(chunk_blocks):
    config = make_config()
    params, batch = make_params(config), make_batch(config, num_rows=3)
    whole = value_and_grads(params, batch, dataclasses.replace(config, chunk_blocks=0))
    chunked = value_and_grads(params, batch, dataclasses.replace(config, chunk_blocks=chunk_blocks))
    close(chunked, whole)
    assert all(grad.abs().max() > 0 for grad in tree.leaves(whole["grads"]))


def test_what_learns_at_the_start():
    """While nothing is written, what makes the message has no gradient; the rest has."""
    config = make_config()
    grads = value_and_grads(make_params(config, written=0.0), make_batch(config), config)["grads"]
    still = [name for name, grad in tree.named(grads, "grads").items() if not grad.any()]
    names = ("bias", "message", "predecessor", "receiver")
    assert sorted(still) == [f"grads['injection']['{name}']" for name in names]


def test_target_is_frozen():
    config = make_config()
    target = {name: leaf.clone().requires_grad_() for name, leaf in TARGET.items()}
    params = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config))
    terms, _ = dspine.loss_terms(params, make_batch(config), config, target)
    dspine.objective(config)(terms).backward()
    assert all(leaf.grad is None for leaf in target.values())
    assert all(leaf.grad is not None for leaf in tree.leaves(params))


@pytest.mark.parametrize("supervised", ["nowhere", "alone", "no rows"])
def test_empty_batches_give_exact_zeros(supervised):
    config = make_config()
    params, batch = make_params(config), make_batch(config)
    if supervised == "no rows":
        batch = rows(batch, config, slice(0, 0))
    else:
        mask = torch.zeros_like(batch["loss_mask"])
        mask[:, ::2] = supervised == "alone"  # no two in a row
        batch = rows(batch | {"loss_mask": mask}, config, slice(None))
    result = value_and_grads(params, batch, config)
    assert all(leaf.count_nonzero() == 0 for leaf in tree.leaves(result))
    assert dspine.den(batch, config) == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_shorter_than_a_block(size):
    config = make_config(block_size=6)
    params, batch = make_params(config), make_batch(config, size=size, supervised=1.0)
    result = value_and_grads(params, batch, config)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(result))
    labels = {1: 0, 2: 1, 3: 3}[size]  # of each row: one behind each anchor, and what follows
    assert result["metrics"]["accuracy"].den == 2 * labels


def test_low_precision_with_wide_codes():
    config = make_config()
    params = tree.map(lambda leaf: leaf.bfloat16(), make_params(config))
    texts = {name: x.bfloat16() if x.is_floating_point() else x for name, x in make_texts().items()}
    batch = dspine.prepare(texts, config, replacement=0.5)
    target = {name: leaf.bfloat16() for name, leaf in TARGET.items()}
    target["codes"] = TARGET["codes"].float()
    leaves = tree.map(lambda leaf: leaf.requires_grad_(), params)
    terms, _ = dspine.loss_terms(leaves, batch, config, target)
    loss = dspine.objective(config)(terms)
    loss.backward()
    assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in tree.leaves(leaves))
    wide = dspine.loss_terms(make_params(config), make_batch(config), config, TARGET)[0]
    # Eight bits of fraction through three layers.
    assert loss.item() == pytest.approx(dspine.objective(config)(wide).item(), rel=0.1)


# Draws.


def test_draws_depend_on_their_row_and_anchor_alone():
    config = make_config()
    texts = make_texts(num_rows=4)
    whole = dspine.prepare(texts, config, replacement=0.5)
    drawn = drawn_blocks(whole)
    for part in (slice(0, 1), slice(1, 4)):
        assert drawn_blocks(rows(whole, config, part)) == drawn[part]
    pad = torch.nn.functional.pad
    padded = texts | {name: pad(texts[name], (0, 5)) for name in ("tokens", "loss_mask")}
    assert drawn_blocks(dspine.prepare(padded, config, replacement=0.5)) == drawn
    every = dspine.prepare(texts, dataclasses.replace(config, num_anchors=99), replacement=0.5)
    for few, more in zip(drawn, drawn_blocks(every), strict=True):
        assert few.items() <= more.items()


def drawn_blocks(batch):
    """For each row, which of its anchors are replaced."""
    return [
        {int(a): bool(r) for a, k, r in zip(*each, strict=True) if k}
        for each in zip(batch["anchors"], batch["keep"], batch["replaced"], strict=True)
    ]


def test_share_of_replaced_blocks():
    config = make_config(num_anchors=99)
    batch = make_batch(config, replacement=0.25, num_rows=200, size=40, supervised=1.0)
    share = batch["replaced"].sum() / batch["keep"].sum()
    # 7800 draws have a deviation of 0.005.
    assert share.item() == pytest.approx(0.25, abs=0.025)
    assert not make_batch(config, replacement=0.0)["replaced"].any()


# The objective of a window.


def whole_loss(params, batch, config, *, scale=None, undetached=False):
    """The objective by its formula; ``scale`` stands in for the mean cross-entropy."""
    terms, _ = dspine.loss_terms(params, batch, config, TARGET)
    s, d, c = terms.num, terms.den, config.ce_weight
    mean = s["ce"] / d if undetached else (s["ce"] / d).detach()
    refined = c * s["refined_ce"] + (1 - c) * s["refined_l1"]
    total = c * s["ce"] + (1 - c) * s["l1"] + refined
    return (total + 0.5 * (mean if scale is None else scale) * s["alignment"]) / d


partitions = st.lists(st.integers(0, 3), min_size=5, max_size=5)


def cut(batch, config, owners):
    groups = [[row for row, owner in enumerate(owners) if owner == each] for each in range(4)]
    return [rows(batch, config, group) for group in groups]  # some of them without a row


@pytest.mark.parametrize("plan", ["columns", "replay"])
@few_examples
@given(partitions)
def test_equivalent_partition_whole_batch(plan, owners):
    config = make_config(num_layers=2, chunk_blocks=0)
    params, batch = make_params(config), make_batch(config, num_rows=5)
    grads, value = torch.func.grad_and_value(whole_loss)(params, batch, config)
    step = pure.window_grad(bound(config), dspine.objective(config), plan=plan)
    found = step(params, cut(batch, config, owners))
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-12)
    close(found.grads, grads)
    whole = step(params, [batch])
    close(found.metrics, whole.metrics)


def test_scales_of_single_micro_steps_are_another_gradient():
    """What a loop gets that divides by what it has: its own cross-entropy, or one with gradient."""
    config = make_config(num_layers=2, chunk_blocks=0)
    params, batch = make_params(config), make_batch(config, num_rows=5)
    window = cut(batch, config, [0, 1, 1, 2, 2])
    grads = torch.func.grad(whole_loss)(params, batch, config)
    dens = [dspine.den(each, config) for each in window]

    def by_micro_step(params):
        parts = [
            whole_loss(params, each, config) * d
            for each, d in zip(window, dens, strict=True)
            if d > 0
        ]
        return torch.stack(parts).sum() / sum(dens)

    undetached = torch.func.grad(functools.partial(whole_loss, undetached=True))
    for wrong in (torch.func.grad(by_micro_step)(params), undetached(params, batch, config)):
        pairs = zip(tree.leaves(wrong), tree.leaves(grads), strict=True)
        errors = [(x - y).norm() / y.norm() for x, y in pairs]
        assert max(errors) > 0.01
    found = pure.window_grad(bound(config), dspine.objective(config))(params, window)
    close(found.grads, grads)


@pytest.mark.parametrize(("alignment", "plan"), [(0.0, "after"), (0.5, "columns")])
def test_plan_follows_the_weight_of_alignment(alignment, plan):
    config = make_config()
    arguments = dspine.objective(config, alignment=alignment), make_params(config)
    report = pure.explain_plan(bound(config), *arguments, make_batch(config))
    assert report.plan == plan
    if plan == "columns":
        assert report.reason.startswith("2 term groups")


def test_objective_weighs_the_sums():
    nums = {"ce": 2.0, "l1": 3.0, "refined_ce": 5.0, "refined_l1": 7.0, "alignment": 11.0}
    terms = LossTerms(tree.map(torch.tensor, nums), torch.tensor(4.0))
    loss = dspine.objective(make_config(ce_weight=0.25), alignment=2.0)(terms)
    expected = (0.25 * (2 + 5) + 0.75 * (3 + 7) + 2 * (2 / 4) * 11) / 4
    assert loss.item() == pytest.approx(expected)
    assert divide(terms)["ce"] == 0.5


# With the rest of the library.


def test_no_host_read_and_no_collective():
    config = make_config(chunk_blocks=2)
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), make_batch(config)
    with count_host_syncs() as reads, count_collectives() as collectives:
        terms, _ = dspine.loss_terms(params, batch, config, TARGET)
        dspine.objective(config)(terms).backward()
    assert not reads, reads.places
    assert not collectives


def test_equivalent_module_pure():
    config = make_config()
    params, batch = make_params(config), make_batch(config)
    module = as_module(dspine.apply, params)
    terms, metrics = call(bound(config), module, batch)
    expected, expected_metrics = dspine.loss_terms(params, batch, config, TARGET)
    close((terms, metrics), (expected, expected_metrics))
    dspine.objective(config)(terms).backward()
    names = [re.sub(r"\W+", ".", name).strip(".") for name in tree.names(params)]
    parameters = dict(module.named_parameters())
    assert sorted(names) == sorted(parameters)
    assert all(parameter.grad is not None for parameter in parameters.values())


@pytest.mark.slow
def test_equivalent_compiled_eager():
    config = make_config(num_layers=2)
    batch = make_batch(config)

    def loss(params):
        terms, _ = dspine.loss_terms(params, batch, config, TARGET)
        return torch.stack(list(terms.num.values())).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    close(*(with_grads(fn, make_params(config)) for fn in (loss, compiled)))


def with_grads(fn, params):
    leaves = tree.map(lambda leaf: leaf.requires_grad_(), params)
    value = fn(leaves)
    value.backward()
    return value.detach(), tree.map(lambda leaf: leaf.grad, leaves)


def test_training_lowers_the_loss():
    config = make_config(num_layers=2)
    batch = make_batch(config, replacement=0.5)
    leaves = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config, written=0.0))
    optimizer = torch.optim.AdamW(tree.leaves(leaves), lr=1e-2)
    losses = []
    for _ in range(15):
        terms, _ = dspine.loss_terms(leaves, batch, config, TARGET)
        loss = dspine.objective(config)(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# Errors.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transfer_rank", 17),
        ("transfer_rank", 0),
        ("transfer_rank", True),
        ("message_size", 0),
        ("top_k", 0),
        ("top_k", 2.5),
        ("top_k", 33),
        ("ce_weight", 1.1),
        ("alignment_weight", math.nan),
        ("alignment_weight", math.inf),
        ("alignment_weight", -0.5),
        ("alignment_warmup_steps", -1),
        ("replacement_layers", 1.0),
        ("replacement_probability", -0.1),
        ("replacement_hold_ratio", 0.5),
        ("replacement_hold_ratio", -0.1),
        ("replacement_end_ratio", 1.5),
        ("candidate_mass_threshold", 1.0),
        ("block_size", 1),
        ("sliding_window", 3),
        ("decay_gamma", 0.0),
    ],
)
def test_config_names_the_bad_field(name, value):
    with pytest.raises(ValueError, match=rf"Config: {name} must be .*, got {name}="):
        make_config(**{name: value})


def test_missing_fields_are_named():
    config = make_config()
    params, batch = make_params(config), make_batch(config)
    without = {name: value for name, value in batch.items() if name not in ("keep", "final")}
    with pytest.raises(ValueError, match=r"got none of \['final', 'keep'\]. `prepare` adds"):
        dspine.loss_terms(params, without, config, TARGET)
    uncoded = {"embed": TARGET["embed"]}
    with pytest.raises(ValueError, match=r"target must have codes.*got \['embed'\]. Add those"):
        dspine.loss_terms(params, batch, config, uncoded)
