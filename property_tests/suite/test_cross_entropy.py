import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import (
    CLOSE,
    WEIGHTINGS,
    assert_terms,
    labels_of,
    make_rows,
    rows,
    value_and_grad,
)
from torch import Tensor
from torch.nn import functional as F

from numden.pure import LossTerms
from numden.pure.losses import (
    cross_entropy,
)


def _by_samples(logits: Tensor, labels: Tensor, samples: Tensor, weighting: str) -> LossTerms:
    """From the means of each sample, one sample after the other."""
    num, den = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples.unique().tolist():
        chosen = (samples == sample) & (labels != -100)
        n = int(chosen.sum())
        if n == 0:
            continue
        mean = F.cross_entropy(logits[chosen], labels[chosen])
        weight = {"token": n, "sample": 1.0, "square": math.sqrt(n)}[weighting]
        num, den = num + weight * mean, den + weight
    return LossTerms(num, torch.tensor(den, dtype=torch.float64))


@given(rows=rows(), weighting=st.sampled_from(WEIGHTINGS), packed=st.booleans(), data=st.data())
def test_weighting_is_of_sample_means(rows, weighting, packed, data):
    labels, samples = labels_of(rows), torch.arange(len(rows.x))[:, None].expand(rows.labels.shape)
    ids = None
    if packed:
        id_ = st.sampled_from([-(2**63), -1, 0, 5, 2**63 - 1])
        size = labels.numel()
        ids = torch.tensor(data.draw(st.lists(id_, min_size=size, max_size=size)))
        samples = ids = ids.reshape(labels.shape)
    terms, grad = value_and_grad(
        lambda x: cross_entropy(x, labels, weighting=weighting, sample_ids=ids), rows.x
    )
    x = rows.x.clone().requires_grad_()
    expected = _by_samples(x, labels, samples, weighting)
    torch.testing.assert_close(terms.num, expected.num.detach(), **CLOSE)
    torch.testing.assert_close(terms.den.double(), expected.den, **CLOSE)
    assert terms.den.dtype == (torch.float64 if weighting == "square" else torch.int64)
    if expected.num.requires_grad:
        (expected_grad,) = torch.autograd.grad(expected.num, x)
        torch.testing.assert_close(grad, expected_grad, **CLOSE)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    weighting=st.sampled_from(WEIGHTINGS),
    seed=st.integers(0, 99),
)
def test_equivalent_packed_unpacked(lengths, weighting, seed):
    padded = make_rows(len(lengths), max(lengths), 4, seed)
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    labels = labels_of(padded).masked_fill(~inside, -100)
    ids = torch.arange(len(lengths))[:, None].expand(labels.shape)[inside] * 7 - 9
    apart = cross_entropy(padded.x, labels, weighting=weighting)
    packed = cross_entropy(
        padded.x[inside][None], labels[inside][None], weighting=weighting, sample_ids=ids[None]
    )
    assert_terms(packed, apart)
    if weighting != "square":
        assert torch.equal(packed.den, apart.den)


def test_weighting_by_hand():
    # Uniform logits: each token costs log 4. Rows of 4, 1 and 0 supervised tokens.
    labels = torch.tensor([[0, 1, 2, 3], [3, -100, -100, -100], [-100] * 4])
    logits = torch.zeros(3, 4, 4, dtype=torch.float64)
    for weighting, den in zip(WEIGHTINGS, (5, 2, 3), strict=True):
        terms = cross_entropy(logits, labels, weighting=weighting)
        torch.testing.assert_close(terms.num, torch.tensor(den * math.log(4)).double())
        assert terms.den == den


def test_weights_multiply_num_and_den():
    labels = torch.tensor([[0, 1, -100, 3], [3, -100, -100, -100]])
    logits = torch.zeros(2, 4, 4, dtype=torch.float64)
    weights = torch.tensor([[0.5, 2.0, math.nan, 0.0], [4.0, 1.0, 1.0, math.inf]])
    for weighting, den in zip(WEIGHTINGS[:2], (6.5, 2.5 / 3 + 4.0), strict=True):
        terms = cross_entropy(logits, labels, weighting=weighting, weights=weights)
        torch.testing.assert_close(terms.den, torch.tensor(den).double())
        torch.testing.assert_close(terms.num, terms.den * math.log(4))


def test_counts_are_exact_integers_in_half_precision():
    logits = torch.zeros(1, 257, 2, dtype=torch.bfloat16)
    terms = cross_entropy(logits, torch.zeros(1, 257, dtype=torch.int64))
    assert torch.equal(terms.den, torch.tensor(257))


@given(rows=rows(min_rows=0), ignore_index=st.sampled_from([-100, -1, 0]))
def test_ignore_index_is_where(rows, ignore_index):
    labels = torch.where(rows.where, rows.labels, ignore_index)
    where = rows.where & (rows.labels != ignore_index)
    a = cross_entropy(rows.x, labels, ignore_index=ignore_index)
    assert_terms(a, cross_entropy(rows.x, rows.labels, where=where, ignore_index=-(2**60)))
