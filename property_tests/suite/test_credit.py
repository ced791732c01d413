import math

import pytest
import torch
from dspark_cases import normal
from hypothesis import given
from hypothesis import strategies as st

from numden.models.credit import AVERAGES, CREDITS, block_average, credit
from numden.pure import random

ALL = torch.ones(3, dtype=torch.bool)
# By hand for probabilities 1/2 and 1/4 and alpha 1/2: s = 3/4, 5/8.
BY_HAND = {"full": [1.21875, 0.46875], "cumulative": [0.75, 0.46875], "continuation": [1.625, 1.0]}


@pytest.mark.parametrize("kind", CREDITS)
def test_known_credits(kind):
    probs = torch.tensor([0.5, 0.25], dtype=torch.float64)
    weights = credit(probs, ALL[:2], 0.5, kind)
    assert weights.tolist() == BY_HAND[kind]
    if kind == "full":
        nats = torch.tensor([2.0, 4.0], dtype=torch.float64).log()
        assert (weights * nats).sum().item() == pytest.approx(2.15625 * math.log(2))


def test_known_credit_of_hopeless_slots():
    assert credit(torch.zeros(3), ALL, 0.25).tolist() == [0.328125, 0.078125, 0.015625]


@given(st.integers(0, 999), st.floats(0, 1), st.sampled_from(CREDITS))
def test_equivalent_credit_loop(seed, alpha, kind):
    probs = random.uniform(random.key(seed), (4,), dtype=torch.float64)
    counted = random.bernoulli(random.key(seed + 1), (4,), p=0.7)
    reached, all_reached = 1.0, []
    for prob, e in zip(probs.tolist(), counted.tolist(), strict=True):
        reached *= alpha + (1 - alpha) * prob if e else 1.0
        all_reached.append(reached)
    for j, e in enumerate(counted.tolist()):
        later = sum(all_reached[i] for i in range(j, 4) if counted[i])
        continued = later / max(all_reached[j], 1e-300)
        one = {"full": later, "cumulative": all_reached[j], "continuation": continued}[kind]
        found = credit(probs, counted, alpha, kind)[j].item()
        assert found == pytest.approx(one if e else 0.0, rel=1e-12)


@pytest.mark.parametrize("kind", CREDITS)
def test_credit_is_finite_where_nothing_is_reached(kind):
    weights = credit(torch.tensor([0.0, 0.5, 1.0]), ALL, 0.0, kind)
    assert weights.isfinite().all()


def test_no_gradient_to_probabilities():
    assert not credit(torch.rand(3, requires_grad=True), ALL, 0.5).requires_grad


@given(st.integers(0, 999), st.sampled_from(AVERAGES))
def test_equivalent_block_average_loop(seed, average):
    values = normal(seed, 3, 2, 4)
    counted = random.bernoulli(random.key(seed), (3, 2, 4), p=0.3)
    total, rows, blocks = 0.0, 0, 0
    for b in range(3):
        live = [n for n in range(2) if counted[b, n].any()]
        rows, blocks = rows + bool(live), blocks + len(live)
        for n in live:
            share = 1 / len(live) if average == "row_of_anchors" else 1
            total += share * values[b, n][counted[b, n]].sum().item()
    terms = block_average(values, counted, average)
    assert terms.num.item() == pytest.approx(total, rel=1e-12, abs=1e-12)
    assert terms.den.item() == (blocks if average == "anchor" else rows)


@pytest.mark.parametrize("average", AVERAGES)
def test_values_that_do_not_count_add_exact_zeros(average):
    values = torch.tensor([[[2.0, math.inf]], [[math.nan, math.inf]]], requires_grad=True)
    counted = torch.tensor([[[True, False]], [[False, False]]])
    terms = block_average(values, counted, average)
    assert (terms.num.item(), terms.den.item()) == (2, 1)
    (grad,) = torch.autograd.grad(terms.num, values)
    assert grad.tolist() == [[[1, 0]], [[0, 0]]]
