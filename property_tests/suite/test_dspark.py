import dataclasses
import functools
import math
import re

import pytest
import torch
from dspark_cases import TARGET, VOCAB, make_batch, make_config, make_params, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from numden import pure
from numden.models import dspark
from numden.models.anchors import supervised_slots, take_slots
from numden.models.module import as_module, call
from numden.pure import random, tree

HEADS = ["vanilla", "gated", "rnn"]
few_examples = settings(max_examples=6)


def weighted(terms, config):
    """The numerator of the loss: each term times its weight."""
    return torch.stack([config.alphas[name] * num for name, num in terms.num.items()]).sum()


def value_and_grads(params, batch, config, target=TARGET):
    def loss(params):
        terms, metrics = dspark.loss_terms(params, batch, config, target)
        return weighted(terms, config), (terms, metrics)

    grads, (terms, metrics) = torch.func.grad(loss, has_aux=True)(params)
    return {"grads": grads, "terms": terms, "metrics": metrics}


def assert_close(a, b, **tolerance):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_teacher_and_labels_are_those_of_the_next_tokens(monkeypatch):
    """A draft that equals the teacher: zero L1, and the cross-entropy of the target itself."""
    config = make_config(markov_rank=0, confidence_alpha=0.0, ce_alpha=1.0)
    batch = make_batch(config)
    exact = dspark.Slots(
        take_slots(batch["final"], batch["anchors"], config.block_size), None, None
    )
    logits = batch["final"] @ TARGET["head"].T
    log_probs = logits[:, :-1].log_softmax(-1)
    next_loss = -log_probs.gather(-1, batch["tokens"][:, 1:, None]).squeeze(-1)
    expected = sum(
        next_loss[b, int(a) : int(a) + config.block_size][mask[: next_loss.shape[1] - int(a)]]
        .sum()
        .item()
        for b in range(3)
        for a, mask in zip(
            batch["anchors"][b],
            supervised_slots(batch["loss_mask"], batch["anchors"], batch["keep"], 4)[b],
            strict=True,
        )
    )
    monkeypatch.setattr(dspark, "apply", lambda *_: exact)
    terms, _ = dspark.loss_terms({}, batch, config, TARGET)
    assert terms.num["l1"].item() == pytest.approx(0, abs=1e-12)
    assert terms.num["ce"].item() == pytest.approx(expected, rel=1e-12)


# The laws of the loss.


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_blocks", [2, 7, 1000])
def test_equivalent_chunked_whole(kind, chunk_blocks):
    config = make_config(markov_head=kind, decay_gamma=3.0)
    params, batch = make_params(config), make_batch(config)
    whole = value_and_grads(params, batch, dataclasses.replace(config, chunk_blocks=0))
    chunked = value_and_grads(params, batch, dataclasses.replace(config, chunk_blocks=chunk_blocks))
    assert_close(chunked, whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
def test_equivalent_backward_func_grad(kind):
    config = make_config(markov_head=kind)
    params, batch = make_params(config), make_batch(config)
    grads = value_and_grads(params, batch, config)["grads"]
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    terms, _ = dspark.loss_terms(leaves, batch, config, TARGET)
    weighted(terms, config).backward()
    assert_close(tree.map(lambda leaf: leaf.grad, leaves), grads, rtol=1e-11, atol=1e-12)
    assert all(grad.abs().max() > 0 for grad in tree.leaves(grads))


@few_examples
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(HEADS))
def test_additive_over_rows(seed, first, kind):
    config = make_config(markov_head=kind, decay_gamma=5.0)
    params, batch = make_params(config), make_batch(config, num_rows=4, seed=seed)
    whole = value_and_grads(params, batch, config)
    parts = [
        value_and_grads(params, rows(batch, config, which), config)
        for which in (slice(0, first), slice(first, 4))
    ]
    assert_close(tree.map(torch.add, *parts), whole, rtol=1e-10, atol=1e-11)


@few_examples
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_invariant_padding(seed, padding):
    config = make_config()
    params, batch = make_params(config), make_batch(config, seed=seed, num_rows=2)
    pad = torch.nn.functional.pad
    padded = rows(batch, config, slice(None)) | {
        "tokens": pad(batch["tokens"], (0, padding), value=3),
        "loss_mask": pad(batch["loss_mask"], (0, padding)),
        "captured": pad(batch["captured"], (0, 0, 0, padding), value=7.0),
        "final": pad(batch["final"], (0, 0, 0, padding), value=-7.0),
    }
    padded = rows(padded, config, slice(None))
    assert torch.equal(padded["anchors"], batch["anchors"])
    plain, wide = (value_and_grads(params, each, config) for each in (batch, padded))
    assert_close(wide, plain, rtol=1e-10, atol=1e-11)


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
    assert dspark.den(batch, config) == 0


@few_examples
@given(st.integers(0, 10**6), st.none() | st.floats(0.5, 20))
def test_den_is_counted_from_masks_alone(seed, gamma):
    config = make_config(decay_gamma=gamma)
    batch = make_batch(config, seed=seed, num_rows=2)
    masks = {name: batch[name] for name in ("loss_mask", "anchors", "keep")}
    terms, _ = dspark.loss_terms(make_params(config), batch, config, TARGET)
    assert torch.equal(dspark.den(masks, config), terms.den)


def single_block(config, anchor, loss_mask):
    batch = make_batch(config, num_rows=1)
    return batch | {
        "loss_mask": torch.tensor([loss_mask]),
        "anchors": torch.tensor([[anchor]]),
        "keep": torch.tensor([[True]]),
    }


def test_block_ends_at_the_first_unsupervised_label():
    config = make_config(markov_head="rnn", block_size=5)
    params = make_params(config)
    batch = single_block(config, 2, [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    before = value_and_grads(params, batch, config)
    assert before["terms"].den == 2
    changed = {
        name: batch[name].index_fill(1, torch.arange(first, 11), fill)
        for name, first, fill in [("tokens", 5, 9), ("final", 4, 9.0), ("captured", 2, 9.0)]
    }
    assert_close(value_and_grads(params, batch | changed, config), before, rtol=0, atol=0)
    # One earlier of each, and the loss is another.
    for name, index in [("tokens", 4), ("final", 3), ("captured", 1)]:
        touched = batch | {name: batch[name].index_fill(1, torch.tensor([index]), 9)}
        terms = value_and_grads(params, touched, config)["terms"]
        assert not torch.equal(terms.num["ce"] + terms.num["l1"], sum_of(before)), name


def sum_of(result):
    return result["terms"].num["ce"] + result["terms"].num["l1"]


class Recorder(TorchDispatchMode):
    """Names of the ops that ran, and the largest tensor with one entry a vocabulary item."""

    def __init__(self):
        super().__init__()
        self.ops, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops.add(func.name())
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (VOCAB,) and out.dim() > 2:
            self.largest = max(self.largest, out.numel())
        if func.name() == "aten::index.Tensor":
            assert not any(i is not None and i.dtype == torch.bool for i in args[1])
        return out


@pytest.mark.parametrize("kind", HEADS)
def test_no_host_read_and_no_collective(kind):
    config = make_config(markov_head=kind, chunk_blocks=2)
    params, batch = tree.map(lambda x: x.requires_grad_(), make_params(config)), make_batch(config)
    with Recorder() as recorder:
        terms, _ = dspark.loss_terms(params, batch, config, TARGET)
        weighted(terms, config).backward()
    reads = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
    assert not recorder.ops & reads
    assert not [name for name in recorder.ops if "c10d" in name]
    assert "aten::_log_softmax" in recorder.ops  # it did see what ran
    assert recorder.largest == config.chunk_blocks * config.block_size * VOCAB


def test_without_teacher_terms_no_teacher_is_read():
    config = make_config(l1_alpha=0.0, confidence_alpha=0.0)
    params, batch = make_params(config), make_batch(config)
    del batch["final"]
    assert "confidence" not in params
    terms, metrics = dspark.loss_terms(params, batch, config, TARGET)
    assert set(terms.num) == {"ce"}
    assert "tau_probabilistic" not in metrics
    with Recorder() as recorder:
        dspark.loss_terms(params, batch, config, TARGET)
    assert "aten::_log_softmax" in recorder.ops


def test_tied_target_needs_no_head():
    config = make_config()
    params, batch = make_params(config), make_batch(config)
    tied = value_and_grads(params, batch, config, {"embed": TARGET["embed"]})
    both = value_and_grads(
        params, batch, config, {"embed": TARGET["embed"], "head": TARGET["embed"]}
    )
    assert_close(tied, both, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_blocks", [0, 2])
def test_target_is_frozen(chunk_blocks):
    target = {name: leaf.clone().requires_grad_() for name, leaf in TARGET.items()}
    config = make_config(chunk_blocks=chunk_blocks)
    params = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config))
    terms, _ = dspark.loss_terms(params, make_batch(config), config, target)
    weighted(terms, config).backward()
    assert all(leaf.grad is None for leaf in target.values())


# D-PARD.


def dpard_config(**changes):
    return make_config(**({"ce_alpha": 0.0, "l1_alpha": 0.0, "dpard_alpha": 0.25} | changes))


def dpard_loops(params, batch, config):
    """P, the number of rows, and the sum of credits by slot, one block and slot at a time."""
    slots = dspark.apply(params, batch, config, TARGET)
    draft = dspark.logits(params, slots, TARGET).softmax(-1)
    alive = supervised_slots(batch["loss_mask"], batch["anchors"], batch["keep"], config.block_size)
    total, rows_counted, credits = 0.0, set(), [0.0] * config.block_size
    for b, n in alive.any(-1).nonzero().tolist():
        rows_counted.add(b)
        length, anchor = int(alive[b, n].sum()), int(batch["anchors"][b, n])
        teacher = (batch["final"][b] @ TARGET["head"].T).softmax(-1)[anchor:]
        survival, reached = 1.0, []
        for p, t in zip(draft[b, n, :length], teacher, strict=False):
            survival *= 0.25 + 0.75 * torch.minimum(p, t).sum().item()
            reached.append(survival)
        for i in range(length):
            overlap = (draft[b, n, i] * teacher[i]).sqrt().sum()
            credits[i] += sum(reached[i:])
            total = total - 2 * sum(reached[i:]) * overlap.log()
    return total, len(rows_counted), credits


@pytest.mark.parametrize("kind", HEADS)
def test_equivalent_dpard_loops(kind):
    """The loss, and its gradient, in which credit is a constant."""
    config = dpard_config(markov_head=kind, confidence_alpha=0.0)
    params, batch = make_params(config), make_batch(config)
    found = value_and_grads(params, batch, config)
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    total, num_rows, credits = dpard_loops(leaves, batch, config)
    grads = torch.autograd.grad(total, tree.leaves(leaves))
    assert found["terms"].num["dpard"].item() == pytest.approx(total.item(), rel=1e-10)
    assert found["terms"].den["dpard"] == num_rows == 3
    assert_close(tree.leaves(found["grads"]), list(grads), rtol=1e-9, atol=1e-10)
    loss, by_slot = (found["metrics"][name] for name in ("dpard_loss", "dpard_credit_position"))
    assert (loss.num, loss.den) == (found["terms"].num["dpard"], num_rows)
    assert by_slot.num.tolist() == pytest.approx(credits, rel=1e-10)
    assert torch.equal(by_slot.den, found["metrics"]["accuracy_position"].den)


def test_dpard_reaches_all_params_and_keeps_metrics_detached():
    config = dpard_config(decay_gamma=3.0)
    params = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config))
    terms, metrics = dspark.loss_terms(params, make_batch(config), config, TARGET)
    weighted(terms, config).backward()
    assert all(leaf.grad.count_nonzero() > 0 for leaf in tree.leaves(params))
    assert not any(leaf.requires_grad for leaf in tree.leaves((metrics, terms.den)))


@pytest.mark.parametrize("chunk_blocks", [2, 7])
def test_equivalent_dpard_chunked_whole(chunk_blocks):
    config = dpard_config()
    params, batch = make_params(config), make_batch(config)
    whole = value_and_grads(params, batch, dataclasses.replace(config, chunk_blocks=0))
    chunked = value_and_grads(params, batch, dataclasses.replace(config, chunk_blocks=chunk_blocks))
    assert_close(chunked, whole, rtol=1e-11, atol=1e-12)


def test_rows_without_anchors_are_no_rows_of_dpard():
    config = dpard_config()
    params, batch = make_params(config), make_batch(config)
    mask = batch["loss_mask"].clone()
    mask[1] = False
    masked = rows(batch | {"loss_mask": mask}, config, slice(None))
    without = rows(masked, config, torch.tensor([0, 2]))
    assert dspark.den(masked, config)["dpard"] == 2
    few, many = (value_and_grads(params, each, config) for each in (without, masked))
    assert_close(many, few, rtol=1e-11, atol=1e-12)
    nothing = rows(batch | {"loss_mask": torch.zeros_like(mask)}, config, slice(None))
    found = value_and_grads(params, nothing, config)
    assert all(leaf.count_nonzero() == 0 for leaf in tree.leaves(found))


@few_examples
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0]))
def test_dens_of_dpard_are_counted_from_masks_alone(seed, confidence_alpha):
    config = dpard_config(decay_gamma=5.0, confidence_alpha=confidence_alpha)
    batch = make_batch(config, seed=seed, num_rows=2)
    masks = {name: batch[name] for name in ("loss_mask", "anchors", "keep")}
    terms, _ = dspark.loss_terms(make_params(config), batch, config, TARGET)
    assert_close(dspark.den(masks, config), terms.den, rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["before", "columns", "replay"])
def test_equivalent_dpard_window_whole_batch(plan):
    """Two dens: the whole window's loss, and not a mean over micro-steps."""
    config = dpard_config(confidence_alpha=0.5)
    params, batch = make_params(config), make_batch(config, num_rows=4)
    den_fn = functools.partial(dspark.den, config=config) if plan == "before" else None
    grad = pure.window_grad(bound(config), dspark.objective(config), plan=plan, den_fn=den_fn)
    whole, (terms, _) = grad(params, [batch]), bound(config)(params, batch)
    parts = [rows(batch, config, which) for which in (slice(0, 1), slice(1, 4))]
    window = grad(params, parts)
    expected = sum(config.alphas[name] * terms.num[name] / terms.den[name] for name in terms.num)
    assert window.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_close(window.grads, whole.grads, rtol=1e-9, atol=1e-11)
    means = [grad(params, [part]).loss.item() for part in parts]
    assert abs(sum(means) / 2 - window.loss.item()) > 1e-3


# With the rest of the library.


def bound(config):
    return functools.partial(dspark.loss_terms, config=config, target=TARGET)


@pytest.mark.parametrize("plan", ["after", "before", "replay"])
def test_equivalent_window_whole_batch(plan):
    config = make_config(decay_gamma=4.0)
    params, batch = make_params(config), make_batch(config, num_rows=5)
    den_fn = functools.partial(dspark.den, config=config) if plan == "before" else None
    grad = functools.partial(
        pure.window_grad, bound(config), dspark.objective(config), plan=plan, den_fn=den_fn
    )
    whole = grad()(params, [batch])
    ragged = [rows(batch, config, which) for which in (slice(0, 1), slice(1, 4), slice(4, 5))]
    window = grad()(params, ragged)
    assert window.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert_close(window.grads, whole.grads, rtol=1e-9, atol=1e-11)
    assert_close(window.metrics, whole.metrics, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
def test_equivalent_module_pure(kind):
    config = make_config(markov_head=kind)
    params, batch = make_params(config), make_batch(config)
    module = as_module(dspark.apply, params)
    terms, metrics = call(bound(config), module, batch)
    expected = value_and_grads(params, batch, config)
    assert_close((terms, metrics), (expected["terms"], expected["metrics"]), rtol=0, atol=0)
    weighted(terms, config).backward()
    parameters = dict(module.named_parameters())
    names = [re.sub(r"\W+", ".", name).strip(".") for name in tree.names(params)]
    grads = {name: parameters[name].grad for name in names}
    expected_grads = dict(zip(names, tree.leaves(expected["grads"]), strict=True))
    assert len(parameters) == len(names)
    assert_close(grads, expected_grads, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_equivalent_compiled_eager():
    config = make_config(num_layers=1, block_size=2)
    batch = make_batch(config)

    def loss(params):
        terms, _ = dspark.loss_terms(params, batch, config, TARGET)
        return weighted(terms, config)

    results = []
    for fn in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        params = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config))
        value = fn(params)
        value.backward()
        results.append((value.detach(), tree.map(lambda leaf: leaf.grad, params)))
    assert_close(*results, rtol=1e-11, atol=1e-12)


def test_training_lowers_the_loss():
    config = make_config(markov_head="gated")
    params, batch = dspark.init(config, random.key(0)), make_batch(config)
    batch = tree.map(lambda x: x.float() if x.is_floating_point() else x, batch)
    target = tree.map(lambda x: x.float(), TARGET)
    leaves = tree.map(lambda leaf: leaf.requires_grad_(), params)
    optimizer = torch.optim.AdamW(tree.leaves(leaves), lr=1e-2)
    losses = []
    for _ in range(30):
        terms, _ = dspark.loss_terms(leaves, batch, config, target)
        loss = dspark.objective(config)(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# Errors.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", 0),
        ("intermediate_size", -1),
        ("num_heads", 0),
        ("num_kv_heads", 3),
        ("num_kv_heads", 0),
        ("head_dim", 3),
        ("num_target_layers", 0),
        ("num_layers", 0),
        ("block_size", 0),
        ("block_size", "7"),
        ("num_anchors", 0),
        ("mask_token_id", VOCAB),
        ("mask_token_id", -1),
        ("sliding_layers", (2,)),
        ("sliding_window", 0),
        ("markov_rank", -1),
        ("markov_head", "lstm"),
        ("ce_alpha", -0.1),
        ("l1_alpha", math.nan),
        ("confidence_alpha", math.inf),
        ("decay_gamma", 0.0),
        ("chunk_blocks", -1),
        ("rope_theta", 0.0),
        ("norm_eps", -1e-6),
    ],
)
def test_config_names_the_bad_field(name, value):
    with pytest.raises(ValueError, match=rf"Config: {name} must be .*, got {name}="):
        make_config(**{name: value})


def test_config_needs_a_window_for_sliding_layers():
    with pytest.raises(ValueError, match="sliding_window must be at least 1 where layers slide"):
        make_config(sliding_layers=(0,))


def test_config_needs_a_loss():
    with pytest.raises(ValueError, match="ce_alpha must be positive, or another alpha"):
        make_config(ce_alpha=0.0, l1_alpha=0.0, confidence_alpha=0.0)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, math.nan])
def test_config_names_a_bad_alpha_of_dpard(alpha):
    with pytest.raises(ValueError, match="dpard_alpha must be between 0 and 1, or None"):
        dpard_config(dpard_alpha=alpha)


@pytest.mark.parametrize("name", ["ce_alpha", "l1_alpha"])
def test_dpard_replaces_the_other_losses(name):
    with pytest.raises(ValueError, match=f"{name} must be 0 where dpard_alpha is given"):
        dpard_config(**{name: 0.1})


def test_missing_fields_are_named():
    config = make_config()
    batch = make_batch(config)
    del batch["final"], batch["keep"]
    with pytest.raises(ValueError, match=r"got none of \['keep', 'final'\]. `prepare` adds"):
        dspark.loss_terms(make_params(config), batch, config, TARGET)
