import math
from functools import partial, reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import (
    CLOSE,
    Ops,
    Rows,
    make_rows,
)
from torch import Tensor
from torch.nn import functional as F

from numden.pure import LossTerms, add, divide, merge, window_grad
from numden.pure.losses import (
    balance_loss,
    balance_per_micro_step,
    balance_stats,
    cross_entropy,
)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tokens, experts = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    chosen = draw(st.integers(1, experts))
    logits = torch.randn(tokens, experts, generator=g, dtype=torch.float64)
    where = torch.rand(tokens, generator=g) < 0.7
    where[0] = True
    return logits, logits.topk(chosen, dim=-1).indices, where


@given(routing=routings())
def test_balance_stats_are_histogram_and_sums(routing):
    logits, selected, where = routing
    probs = logits.softmax(-1)
    terms = balance_stats(probs, selected, where=where)
    counts = torch.bincount(selected[where].reshape(-1), minlength=probs.shape[-1])
    assert torch.equal(terms.num["counts"], counts)
    assert torch.equal(terms.den, where.sum())
    torch.testing.assert_close(terms.num["probs"], probs[where].sum(0), **CLOSE)
    assert torch.equal(balance_stats(probs, selected).den, torch.tensor(len(probs)))


@given(routing=routings(), scorer=st.sampled_from(["softmax", "sigmoid"]))
def test_balance_loss_gradient_closed_form(routing, scorer):
    logits, selected, where = routing
    (num_experts, k), alpha = (logits.shape[-1], selected.shape[-1]), 0.01
    z = logits.clone().requires_grad_()
    score = z.softmax(-1) if scorer == "softmax" else z.sigmoid()
    stats = balance_stats(score, selected, where=where)
    balance_loss(stats, num_selected=k, alpha=alpha).backward()
    p, share = score.detach(), stats.num["counts"].double() / where.sum()
    if scorer == "softmax":
        slope = p * (share - (share * p).sum(-1, keepdim=True))
    else:
        slope = share * p * (1 - p)
    slope = alpha * num_experts / (k * int(where.sum())) * slope * where[:, None]
    torch.testing.assert_close(z.grad, slope, **CLOSE)


@pytest.mark.parametrize(("num_experts", "k"), [(4, 1), (6, 2), (8, 8)])
def test_balance_loss_of_even_and_collapsed_routing(num_experts, k):
    tokens = num_experts * 3
    probs = torch.full((tokens, num_experts), 1 / num_experts, dtype=torch.float64)
    even = (torch.arange(tokens)[:, None] + torch.arange(k)) % num_experts
    loss = balance_loss(balance_stats(probs, even), num_selected=k, alpha=0.5)
    torch.testing.assert_close(loss, torch.tensor(0.5).double())
    collapsed = torch.arange(k).expand(tokens, k)
    probs = F.one_hot(collapsed, num_experts).sum(1).double() / k
    loss = balance_loss(balance_stats(probs, collapsed), num_selected=k, alpha=0.5)
    torch.testing.assert_close(loss, torch.tensor(0.5 * num_experts / k).double())


@given(routing=routings(), cut=st.integers(0, 8))
def test_balance_loss_is_of_the_window_not_of_micro_steps(routing, cut):
    logits, selected, where = routing
    probs = logits.softmax(-1)
    parts = [
        balance_stats(probs[part], selected[part], where=where[part])
        for part in (slice(cut), slice(cut, None))
    ]
    whole = balance_stats(probs, selected, where=where)
    total = add(*parts)
    assert torch.equal(total.num["counts"], whole.num["counts"])
    k = selected.shape[-1]
    torch.testing.assert_close(
        balance_loss(total, num_selected=k), balance_loss(whole, num_selected=k), **CLOSE
    )


def test_balance_loss_without_tokens_is_zero():
    probs = torch.full((2, 3), math.nan, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(2, dtype=torch.bool)
    stats = balance_stats(probs, torch.full((2, 1), 99), where=none)
    loss = balance_loss(stats, num_selected=1)
    (grad,) = torch.autograd.grad(loss, probs)
    assert loss == 0
    assert torch.equal(grad, torch.zeros_like(probs))


def test_balance_loss_is_an_objective_of_a_window():
    def loss_fn(gate: Tensor, rows: Rows) -> LossTerms:
        logits = rows.x.flatten(0, 1) @ gate
        stats = balance_stats(logits.softmax(-1), logits.topk(2).indices)
        return merge(ce=cross_entropy(logits, rows.labels.flatten()), balance=stats)

    def objective(totals: LossTerms) -> Tensor:
        balance = LossTerms(totals.num["balance"], totals.den["balance"])
        ce = totals.num["ce"] / totals.den["ce"]
        return ce + balance_loss(balance, num_selected=2, alpha=0.1)

    gate, rows = torch.randn(4, 4, dtype=torch.float64), make_rows(5, 3, 4, seed=0)
    window = [rows.take(slice(0, 1)), rows.take(slice(1, 2)), rows.take(slice(2, 5))]
    result = window_grad(loss_fn, objective)(gate, window)
    whole = torch.func.grad(lambda gate: objective(loss_fn(gate, rows)))(gate)
    torch.testing.assert_close(result.grads, whole, **CLOSE)


def test_balance_stats_wait_for_no_device():
    with Ops() as ops:
        balance_stats(torch.rand(4, 3), torch.zeros(4, 2).long(), where=torch.ones(4).bool())
    assert ops.syncs == []


def test_layers_are_added():
    probs = torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    selected = torch.tensor([[[0, 1]] * 6, [[1, 2]] * 6])
    each = [balance_stats(*layer) for layer in zip(probs, selected, strict=True)]
    stacked = LossTerms(
        {n: torch.stack([s.num[n] for s in each]) for n in each[0].num}, each[0].den
    )
    losses = [balance_loss(stats, num_selected=2, alpha=0.3) for stats in each]
    torch.testing.assert_close(balance_loss(stacked, num_selected=2, alpha=0.3), sum(losses))


def test_columns_keep_the_experts_of_several_layers_apart():
    """The cotangent of each sum of probabilities has its own scale, in made-up totals too."""
    selected = torch.tensor([[[0, 1]] * 3 + [[2, 3]] * 2, [[0, 2]] * 2 + [[1, 3]] * 3])

    def loss_fn(params, batch):
        each = [balance_stats(params.softmax(-1), chosen) for chosen in selected]
        num = {name: torch.stack([s.num[name] for s in each]) for name in each[0].num}
        return LossTerms(num, each[0].den)

    params = torch.arange(20, dtype=torch.float64).reshape(5, 4).sin()
    objective = partial(balance_loss, num_selected=2)
    columns, replay = (
        window_grad(loss_fn, objective, plan=plan)(params, [None]) for plan in ("columns", "replay")
    )
    torch.testing.assert_close(columns.grads, replay.grads, **CLOSE)


@given(routing=routings(), repeats=st.integers(1, 3))
def test_balance_per_micro_step_is_the_mean_by_tokens(routing, repeats):
    logits, selected, where = routing
    k, probs = selected.shape[-1], logits.softmax(-1)
    parts = [slice(0, 1), slice(1, None)] if len(probs) > 1 else [slice(None)]
    stats = [balance_stats(probs[s], selected[s], where=where[s]) for s in parts]
    terms = [balance_per_micro_step(each, num_selected=k) for each in stats] * repeats
    losses = [balance_loss(each, num_selected=k) for each in stats]
    sizes = [int(where[s].sum()) for s in parts]
    expected = sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    torch.testing.assert_close(divide(reduce(add, terms)), expected, **CLOSE)


def test_balance_per_micro_step_of_no_token_is_zero():
    probs = torch.full((3, 2), 0.5, requires_grad=True)
    empty = balance_stats(probs, torch.zeros(3, 1).long(), where=torch.zeros(3).bool())
    terms = balance_per_micro_step(empty, num_selected=1)
    assert terms.num == 0
    assert torch.equal(torch.autograd.grad(terms.num, probs)[0], torch.zeros(3, 2))
