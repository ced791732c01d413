import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.models.routers import Routing, max_violation, route, update_bias
from numden.pure import LossTerms, add, divide
from numden.pure.losses import balance_loss, balance_per_micro_step, balance_stats, z_loss

CLOSE = {"rtol": 1e-12, "atol": 1e-14}  # float64, sums of tens of numbers
EVEN = [[4.0, 3, 2, 1], [1, 2, 3, 4]]
SKEWED = [[4.0, 3, 2, 1], [3, 4, 1, 2]]


def routed(scores, **options):
    logits = torch.tensor(scores, dtype=torch.float64).log().requires_grad_()
    routing = route(logits, num_selected=2, **options)
    return logits, routing, balance_stats(routing.probs, routing.selected)


def loss_of(stats, k=2):
    return balance_loss(stats, num_selected=k)


# Hand-computed routings.


@pytest.mark.parametrize(
    ("scores", "counts", "balance"), [(EVEN, [1, 1, 1, 1], 1.0), (SKEWED, [2, 2, 0, 0], 1.4)]
)
def test_two_tokens_by_hand(scores, counts, balance):
    logits, _, stats = routed(scores)
    assert stats.num["counts"].tolist() == counts
    torch.testing.assert_close(loss_of(stats).item(), balance, **CLOSE)
    z = divide(z_loss(logits)).item()
    assert z == pytest.approx(math.log(10) ** 2, rel=1e-12) == pytest.approx(5.3018981105)


def test_gradient_by_hand():
    logits, _, stats = routed(SKEWED)
    (grad,) = torch.autograd.grad(loss_of(stats), logits)
    rows = [[0.12, 0.09, -0.14, -0.07], [0.09, 0.12, -0.07, -0.14]]
    torch.testing.assert_close(grad, torch.tensor(rows, dtype=torch.float64), **CLOSE)


def test_two_ranks_by_hand():
    """Each rank adds its share of 0.7; a loss of its own of 1.4 each would add up to 2.8."""
    _, _, whole = routed(SKEWED)
    parts = [routed(SKEWED[i : i + 1])[2] for i in (0, 1)]
    assert loss_of(add(*parts)).item() == pytest.approx(1.4, rel=1e-12)
    # One factor is of all ranks, the other of one: linear in what has a gradient.
    shares = [LossTerms(whole.num | {"probs": part.num["probs"]}, whole.den) for part in parts]
    assert [loss_of(share).item() for share in shares] == pytest.approx([0.7, 0.7], rel=1e-12)
    assert sum(loss_of(part).item() for part in parts) == pytest.approx(2.8, rel=1e-12)


def test_two_micro_steps_by_hand():
    parts = [routed(EVEN[i : i + 1])[2] for i in (0, 1)]
    assert loss_of(add(*parts)).item() == pytest.approx(1.0, rel=1e-12)
    terms = [balance_per_micro_step(part, num_selected=2) for part in parts]
    assert divide(add(*terms)).item() == pytest.approx(1.4, rel=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "biased"])
@pytest.mark.parametrize(("num_experts", "k"), [(4, 1), (8, 2), (6, 3)])
def test_uniform_scores_give_one(kind, num_experts, k):
    logits = torch.zeros(5, num_experts, dtype=torch.float64)
    routing = route(logits, num_selected=k, kind=kind)
    loss = balance_loss(balance_stats(routing.probs, routing.selected), num_selected=k)
    assert loss.item() == pytest.approx(1.0, rel=1e-12)


def test_uniform_sigmoids_give_half_the_number_of_experts():
    """They are no distribution."""
    routing = route(torch.zeros(5, 8, dtype=torch.float64), num_selected=2, kind="sigmoid")
    loss = balance_loss(balance_stats(routing.probs, routing.selected), num_selected=2)
    assert loss.item() == pytest.approx(8 / 2, rel=1e-12)


def test_z_of_zero_logits():
    num_tokens, num_experts = 6, 4
    logits = torch.zeros(num_tokens, num_experts, dtype=torch.float64, requires_grad=True)
    z = divide(z_loss(logits))
    assert z.item() == pytest.approx(math.log(num_experts) ** 2, rel=1e-12)
    (grad,) = torch.autograd.grad(z, logits)
    expected = 2 * math.log(num_experts) / (num_tokens * num_experts)
    torch.testing.assert_close(grad, torch.full_like(grad, expected), **CLOSE)


def test_one_expert_of_each_group():
    logits = torch.arange(10.0, -6.0, -1.0)
    options = {"num_selected": 8, "num_groups": 8, "group_rule": "each"}
    for kind in ("softmax", "sigmoid", "biased"):
        routing = route(logits, kind=kind, **options)
        assert routing.selected.tolist() == list(range(0, 16, 2))
    assert sorted(route(logits, num_selected=8).selected.tolist()) == list(range(8))


def test_choice_made_before():
    _, routing, stats = routed([[4.0, 3, 2, 1]], selected=torch.tensor([[2, 3]]))
    assert stats.num["counts"].tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(routing.weights[0].tolist(), [2 / 3, 1 / 3], **CLOSE)
    assert routed([[4.0, 3, 2, 1]])[1].selected.tolist() == [[0, 1]]


# Closed forms.


@st.composite
def cases(draw):
    """Logits, and a router of any kind for them."""
    kind = draw(st.sampled_from(["softmax", "sigmoid", "biased"]))
    groups = draw(st.sampled_from([1, 2, 4]))
    num_experts = groups * draw(st.integers(2, 3))
    rule = "each" if kind != "biased" else draw(st.sampled_from(["each", "best"]))
    best = draw(st.integers(1, groups)) if rule == "best" else 1
    k = groups if rule == "each" else draw(st.integers(1, best * num_experts // groups))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    logits = 2 * torch.randn(draw(st.integers(1, 6)), num_experts, generator=g, dtype=torch.float64)
    bias = torch.rand(num_experts, generator=g, dtype=torch.float64) if kind == "biased" else None
    options = {"kind": kind, "bias": bias, "num_groups": groups, "num_best_groups": best}
    return logits, options | {"num_selected": k, "group_rule": rule}


def kept_by_loops(u, options):
    groups, best = options["num_groups"], options["num_best_groups"]
    size = len(u) // groups
    blocks = [range(i * size, (i + 1) * size) for i in range(groups)]
    value = [sum(sorted((u[e] for e in block), reverse=True)[:2]) for block in blocks]
    order = sorted(range(groups), key=lambda i: -value[i])
    return [e for i in order[:best] for e in blocks[i]], blocks


def choose_by_loops(u, options):
    """The experts of one token, from its biased scores, a list."""
    k, (kept, blocks) = options["num_selected"], kept_by_loops(u, options)
    if options["group_rule"] == "best":
        return sorted(kept, key=lambda e: -u[e])[:k]
    best = [sorted(block, key=lambda e: -u[e])[: k // len(blocks)] for block in blocks]
    return [e for block in best for e in block]


def scores_of(logits, kind):
    return logits.softmax(-1) if kind == "softmax" else 1 / (1 + (-logits).exp())


@given(case=cases(), normalize=st.booleans())
def test_choice_and_weights_by_loops(case, normalize):
    logits, options = case
    scores = scores_of(logits, options["kind"])
    u = scores if options["bias"] is None else scores + options["bias"]
    routing = route(logits, **options, normalize=normalize, scale=2.5)
    for token, row in enumerate(u.tolist()):
        chosen = choose_by_loops(row, options)
        assert routing.selected[token].tolist() == chosen
        weights = scores[token, chosen]
        weights = weights / weights.sum() if normalize else weights
        torch.testing.assert_close(routing.weights[token], 2.5 * weights, **CLOSE)


@given(case=cases())
def test_balance_gradient_closed_form(case):
    logits, options = case
    (num_tokens, num_experts), k = logits.shape, options["num_selected"]
    z = logits.clone().requires_grad_()
    routing = route(z, **options)
    stats = balance_stats(routing.probs, routing.selected)
    (grad,) = torch.autograd.grad(balance_loss(stats, num_selected=k), z)

    counts = torch.bincount(routing.selected.flatten(), minlength=num_experts)
    share, s = counts.double() / num_tokens, scores_of(logits, options["kind"])
    if options["kind"] == "softmax":
        slope = s * (share - (share * s).sum(-1, keepdim=True))
    elif options["kind"] == "sigmoid":
        slope = share * s * (1 - s)
    else:
        u = s + options["bias"]
        mask = torch.ones_like(u)
        if options["group_rule"] == "best":
            kept = [kept_by_loops(row, options)[0] for row in u.tolist()]
            mask = torch.zeros_like(u).scatter(1, torch.tensor(kept), 1.0)
        total = (mask * u).sum(-1, keepdim=True)
        q = mask * u / total
        slope = mask * s * (1 - s) / total * (share - (share * q).sum(-1, keepdim=True))
    torch.testing.assert_close(grad, num_experts / (k * num_tokens) * slope, **CLOSE)


@given(case=cases())
def test_z_gradient_closed_form(case):
    z = case[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(divide(z_loss(z)), z)
    lse = case[0].exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(grad, 2 / len(z) * lse * (case[0] - lse).exp(), **CLOSE)


# What must hold of any router.


@given(case=cases())
def test_counts_are_of_the_chosen(case):
    logits, options = case
    routing = route(logits, **options)
    counts = balance_stats(routing.probs, routing.selected).num["counts"]
    assert counts.sum() == options["num_selected"] * len(logits)
    for chosen in routing.selected.tolist():
        assert len(set(chosen)) == options["num_selected"]
    if options["kind"] != "sigmoid":
        assert (routing.probs >= 0).all()
        torch.testing.assert_close(routing.probs.sum(-1).tolist(), [1.0] * len(logits), **CLOSE)


def test_weights_do_not_depend_on_the_bias():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    options = {"num_selected": 2, "kind": "biased"}
    plain = route(logits, **options)
    lifted = route(logits, **options, bias=torch.tensor([0.5, 0.5, 0.0, 0.0]))
    assert torch.equal(plain.weights, lifted.weights)
    moved = route(logits, **options, bias=torch.tensor([0.0, 0.0, 0.0, 9.0]))
    assert moved.selected.tolist() == [[3, 0]]


def test_bias_has_no_gradient():
    bias = torch.zeros(4, requires_grad=True)
    routing = route(torch.zeros(1, 4), num_selected=2, kind="biased", bias=bias)
    assert not routing.probs.requires_grad
    assert not routing.weights.requires_grad


def test_negative_scores_do_not_leave_the_best_groups():
    """A bias may make all scores of a kept group negative, below the zeros of the others."""
    bias = torch.full((4,), -3.0)
    options = {"kind": "biased", "num_groups": 2, "num_best_groups": 1, "bias": bias}
    routing = route(torch.tensor([[0.0, 1.0, -1.0, -2.0]]), num_selected=2, **options)
    assert routing.selected.tolist() == [[1, 0]]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "biased"])
@pytest.mark.parametrize("value", [-300.0, 300.0])
def test_extreme_logits_are_finite(kind, value):
    logits = torch.full((3, 4), value, requires_grad=True)
    routing = route(logits, num_selected=2, kind=kind)
    total = routing.probs.sum() + routing.weights.sum()
    assert torch.autograd.grad(total, logits)[0].isfinite().all()
    assert total.isfinite()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "biased"])
def test_half_precision_is_routed_in_float32(kind):
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    half, wide = (route(x, num_selected=2, kind=kind) for x in (logits, logits.float()))
    assert isinstance(half, Routing)
    for got, expected in zip(half[1:], wide[1:], strict=True):
        assert torch.equal(got, expected)


@given(case=cases())
def test_no_tokens(case):
    logits, options = case
    routing = route(logits[:0], **options)
    assert routing.selected.shape == routing.weights.shape == (0, options["num_selected"])


# Balance without a loss.


def test_update_bias_moves_towards_the_mean():
    bias, counts = torch.zeros(2, 4), torch.tensor([[9, 1, 1, 1], [3, 3, 3, 3]])
    moved = update_bias(bias, counts, speed=0.25)
    assert moved.tolist() == [[-0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]]
    assert torch.equal(bias, torch.zeros(2, 4))


def test_update_bias_balances():
    """A router that favours two experts spreads its tokens after some windows."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 4, generator=g) + torch.tensor([2.0, 1.0, 0.0, 0.0])
    bias, violations = torch.zeros(4), []
    for _ in range(60):
        routing = route(logits, num_selected=1, kind="biased", bias=bias)
        counts = balance_stats(routing.probs, routing.selected).num["counts"]
        violations.append(max_violation(counts).item())
        bias = update_bias(bias, counts, speed=0.02)
    assert violations[0] > 1.5
    assert min(violations[-5:]) < 0.2


def test_max_violation_by_hand():
    assert max_violation(torch.tensor([5, 1, 3, 3])).item() == pytest.approx(2 / 3)
    assert max_violation(torch.zeros(2, 4, dtype=torch.int64)).item() == 0.0
