import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import (
    CLOSE,
    LOSSES,
    WEIGHTINGS,
    Ops,
    Rows,
    assert_terms,
    each_loss,
    forward_mode,
    linear,
    make_rows,
    rows,
    value_and_grad,
)
from torch import Tensor
from torch.nn import functional as F

from numden.pure import LossTerms, add, losses
from numden.pure.losses import (
    balance_stats,
    binary_cross_entropy,
    cross_entropy,
    kl_divergence,
    linear_cross_entropy,
    squared_error,
    total_variation,
    z_loss,
)


@pytest.mark.parametrize(
    "name", [name for name in LOSSES if not name.endswith(("_sample", "_square"))]
)
@given(rows=rows(), weighted=st.booleans())
def test_den_is_count_or_sum_of_weights(name, rows, weighted):
    options = {"where": rows.where} | ({"weights": rows.weights} if weighted else {})
    den = LOSSES[name](rows, rows.x, **options).den
    counted = rows.weights[rows.where].sum() if weighted else rows.where.sum()
    per_token = rows.x.shape[-1] if name in ("binary_cross_entropy", "squared_error") else 1
    assert torch.equal(den, counted * per_token)  # dyadic weights: exact


@each_loss
@given(rows=rows(), cut=st.integers(0, 4), weighted=st.booleans())
def test_additive_over_rows(loss, rows, cut, weighted):
    def of(part: Rows) -> tuple[LossTerms, Tensor]:
        options = {"where": part.where} | ({"weights": part.weights} if weighted else {})
        return value_and_grad(lambda x: loss(part, x, **options), part.x)

    whole, grad = of(rows)
    (first, first_grad), (second, second_grad) = (
        of(rows.take(slice(cut))),
        of(rows.take(slice(cut, None))),
    )
    assert_terms(add(first, second), whole)
    torch.testing.assert_close(torch.cat([first_grad, second_grad]), grad, **CLOSE)


@each_loss
@given(rows=rows(), data=st.data())
def test_permutation_of_rows(loss, rows, data):
    order = torch.tensor(data.draw(st.permutations(range(len(rows.x)))))
    a, grad = value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    mixed = rows.take(order)
    b, mixed_grad = value_and_grad(lambda x: loss(mixed, x, where=mixed.where), mixed.x)
    assert_terms(a, b)
    torch.testing.assert_close(grad[order], mixed_grad, **CLOSE)


@each_loss
@given(
    rows=rows(),
    more_rows=st.integers(0, 2),
    more_tokens=st.integers(0, 3),
    filler=st.sampled_from([math.nan, math.inf, -math.inf, 0.0]),
)
def test_neutral_padding(loss, rows, more_rows, more_tokens, filler):
    def pad(field: Tensor, value: Any) -> Tensor:
        dims = (0,) * 2 * (field.dim() - 2) + (0, more_tokens, 0, more_rows)
        return F.pad(field, dims, value=value)

    values = (filler, filler, 7**9, False, filler)
    padded = Rows(*(pad(*each) for each in zip(rows, values, strict=True)))

    def of(part: Rows) -> tuple[LossTerms, Tensor]:
        options = {"where": part.where, "weights": part.weights}
        return value_and_grad(lambda x: loss(part, x, **options), part.x)

    terms, grad = of(rows)
    padded_terms, padded_grad = of(padded)
    assert_terms(terms, padded_terms)
    torch.testing.assert_close(padded_grad[: len(rows.x), : rows.x.shape[1]], grad, **CLOSE)
    assert not padded_grad[len(rows.x) :].any()
    assert not padded_grad[:, rows.x.shape[1] :].any()


@each_loss
@pytest.mark.parametrize("filler", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3, 4), (2, 0, 4)])
def test_empty_is_exact_zero_with_zero_gradient(loss, filler, shape):
    rows = make_rows(*shape, seed=0)
    rows = rows._replace(x=torch.full_like(rows.x, filler), where=torch.zeros_like(rows.where))
    terms, grad = value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    assert terms.num == 0
    assert terms.den == 0
    assert torch.equal(grad, torch.zeros_like(rows.x))


@each_loss
@given(rows=rows(), weighted=st.booleans())
def test_equivalent_func_grad_autograd(loss, rows, weighted):
    options = {"where": rows.where} | ({"weights": rows.weights} if weighted else {})
    terms, grad = value_and_grad(lambda x: loss(rows, x, **options), rows.x)

    def num_and_terms(x: Tensor) -> tuple[Tensor, LossTerms]:
        terms = loss(rows, x, **options)
        return terms.num, terms

    got, *aux = torch.func.grad(num_and_terms, has_aux=True)(rows.x)
    assert_terms(aux[0], terms)
    torch.testing.assert_close(got, grad, **CLOSE)


@each_loss
@given(rows=rows())
def test_equivalent_vmap_loop(loss, rows):
    def num(*row: Tensor) -> Tensor:
        one = Rows(*(field.unsqueeze(0) for field in row))
        return loss(one, one.x, where=one.where, weights=one.weights).num

    alone = [num(*row) for row in zip(*rows, strict=True)]
    torch.testing.assert_close(torch.func.vmap(num)(*rows), torch.stack(alone), **CLOSE)
    grads = torch.func.vmap(torch.func.grad(num))(*rows)
    whole = torch.func.grad(lambda x: torch.func.vmap(num)(x, *rows[1:]).sum())(rows.x)
    _, expected = value_and_grad(
        lambda x: loss(rows, x, where=rows.where, weights=rows.weights), rows.x
    )
    torch.testing.assert_close(grads, expected, **CLOSE)
    torch.testing.assert_close(whole, expected, **CLOSE)


@forward_mode
@each_loss
@given(rows=rows())
def test_jvp_is_gradient_times_tangent(loss, rows):
    fun = lambda x: loss(rows, x, where=rows.where).num
    tangent = torch.cos(rows.x + 1)
    _, grad = value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    change = torch.func.jvp(fun, (rows.x,), (tangent,))[1]
    torch.testing.assert_close(change, (grad * tangent).sum(), **CLOSE)


@each_loss
@pytest.mark.parametrize("weighted", [False, True])
def test_waits_for_no_device(loss, weighted):
    rows = make_rows(3, 4, 3, seed=0)
    options = {"where": rows.where} | ({"weights": rows.weights} if weighted else {})
    with Ops() as ops:
        terms, _ = value_and_grad(lambda x: loss(rows, x, **options), rows.x)
    assert ops.syncs == []
    assert not terms.den.requires_grad


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_packing_and_positions_wait_for_no_device(weighting):
    rows = make_rows(3, 4, 3, seed=0)
    options: dict[str, Any] = {"weighting": weighting, "sample_ids": rows.labels}
    with Ops() as ops:
        value_and_grad(lambda x: linear(rows, x, positions=torch.tensor([3, 1]), **options), rows.x)
        cross_entropy(rows.x, rows.labels, **options)
    assert ops.syncs == []


def test_waits_are_seen():
    with Ops() as ops:
        x = torch.arange(3)
        _ = x[x > 1], x.unique(), x.nonzero(), bool((x > 1).any())
    assert len(ops.syncs) >= 4


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(loss, dtype):
    rows = make_rows(40, 10, 4, seed=0)
    exact, grad = value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    half = rows._replace(y=rows.y.to(dtype))
    terms, half_grad = value_and_grad(lambda x: loss(half, x, where=half.where), rows.x.to(dtype))
    assert terms.num.dtype == torch.float32
    assert half_grad.dtype == dtype
    assert terms.den.dtype in (torch.int64, torch.float32)
    # The inputs are exact in half precision. What rounds is one product or sigmoid of a token,
    # 2^-9 in bfloat16 of logits up to 4, over a mean loss of about 1; gradients are at most 5.
    torch.testing.assert_close(terms.num.double(), exact.num, rtol=2e-2, atol=0.0)
    torch.testing.assert_close(terms.den.double(), exact.den.double(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(half_grad.double(), grad, rtol=2e-2, atol=4e-2)


@given(rows=rows())
def test_kl_divergence_is_that_of_torch(rows):
    log_p, log_q = rows.x.log_softmax(-1), rows.y.log_softmax(-1)
    expected = F.kl_div(log_p, log_q, log_target=True, reduction="sum")
    torch.testing.assert_close(kl_divergence(rows.x, rows.y).num, expected, **CLOSE)


def test_kl_divergence_of_excluded_entries():
    # Both exclude the last entry, the target the second too: q = (1, 0, 0), p = (1/2, 1/2, 0).
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    target = torch.tensor([[0.0, -math.inf, -math.inf]], dtype=torch.float64)
    terms, grad = value_and_grad(lambda x: kl_divergence(x, target), logits)
    torch.testing.assert_close(terms.num, torch.tensor(math.log(2)).double())
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 0.5, 0.0]]).double())
    _, grad = value_and_grad(lambda y: kl_divergence(logits, y), target)
    assert torch.equal(grad, torch.zeros_like(target))
    assert kl_divergence(target, logits).num == math.inf


@given(rows=rows())
def test_total_variation_is_what_p_and_q_do_not_share(rows):
    p, q = rows.x.softmax(-1), rows.y.softmax(-1)
    expected = (1 - torch.minimum(p, q).sum(-1)).sum()
    torch.testing.assert_close(total_variation(rows.x, rows.y).num, expected, **CLOSE)


@given(rows=rows())
def test_binary_cross_entropy_by_probabilities(rows):
    p, t = rows.x.sigmoid(), rows.y.sigmoid()
    expected = F.binary_cross_entropy(p, t, reduction="sum")
    torch.testing.assert_close(binary_cross_entropy(rows.x, t).num, expected, **CLOSE)
    by_bool = binary_cross_entropy(rows.x, rows.y > 0).num
    expected = F.binary_cross_entropy(p, (rows.y > 0).double(), reduction="sum")
    torch.testing.assert_close(by_bool, expected, **CLOSE)


@given(rows=rows())
def test_squared_error_is_exact(rows):
    terms, grad = value_and_grad(
        lambda x: squared_error(x, rows.y, where=rows.where[..., None]), rows.x
    )
    kept = rows.where[..., None].expand(rows.x.shape)
    eighths = ((rows.x - rows.y)[kept] * 8).to(torch.int64)
    assert terms.num * 64 == eighths.square().sum()
    assert terms.den == kept.sum()
    assert torch.equal(grad, torch.where(kept, 2 * (rows.x - rows.y), 0.0))


@given(rows=rows())
def test_z_loss_closed_form(rows):
    terms, grad = value_and_grad(lambda x: z_loss(x, where=rows.where), rows.x)
    lse = torch.where(rows.where, rows.x.exp().sum(-1).log(), 0.0)
    torch.testing.assert_close(terms.num, (lse**2).sum(), **CLOSE)
    torch.testing.assert_close(grad, 2 * lse[..., None] * rows.x.softmax(-1), **CLOSE)


def test_z_loss_of_zero_logits():
    terms = z_loss(torch.zeros(6, 8, dtype=torch.float64))
    torch.testing.assert_close(terms.num / terms.den, torch.tensor(math.log(8) ** 2).double())


def _phi(shape: tuple[int, ...], a: float, b: float) -> Tensor:
    size = math.prod(shape)
    return (2 * torch.sin(a * torch.arange(size, dtype=torch.float64) + b)).reshape(shape)


def test_sums_of_a_draft_model():
    # Two rows of two blocks of five drafted tokens; figures are those of the DSpark drafter's own
    # training code on these tensors, in float64, given there to six places.
    labels = torch.tensor(
        [
            [[4, 2, 8, 3, 7], [3, 7, 5, -100, -100]],
            [[1, 4, 7, 3, -100], [-100] * 5],
        ]
    )
    draft, teacher = _phi((2, 2, 5, 13), 0.37, 0.1), _phi((2, 2, 5, 13), 0.53, 0.7)
    confidence = _phi((2, 2, 5), 0.9, 0.2)
    places: dict[str, Any] = {"rtol": 0.0, "atol": 1e-6}
    expected = ((26.540250, 9.646574, 7.361303, 8), (16.726005, 4.866453, 3.519160, 4))
    for row, (ce, l1, conf, den) in enumerate(expected):
        where = labels[row] != -100
        distance = total_variation(draft[row], teacher[row], where=where)
        shared = 1 - (draft[row].softmax(-1) - teacher[row].softmax(-1)).abs().sum(-1) / 2
        terms = [
            cross_entropy(draft[row], labels[row]),
            distance._replace(num=2 * distance.num),
            binary_cross_entropy(confidence[row], shared, where=where),
        ]
        assert [term.den.item() for term in terms] == [den] * 3
        for term, num in zip(terms, (ce, l1, conf), strict=True):
            torch.testing.assert_close(term.num, torch.tensor(num).double(), **places)


_X, _L = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
_W = torch.zeros(5, 4)
_MEAN: Any = "mean"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cross_entropy(_X, _L[0]), ValueError, r"labels must have shape \[2, 3\], got"),
        (lambda: cross_entropy(_X, _L, weighting=_MEAN), ValueError, "weighting must be 'token'"),
        (lambda: cross_entropy(_X, _L, where=_L), TypeError, "where must be bool, got where.dtype"),
        (lambda: cross_entropy(_X, _L, sample_ids=_L[0]), ValueError, "sample_ids must have shape"),
        (
            lambda: cross_entropy(_X, _L, where=torch.ones(3, 3).bool()),
            ValueError,
            r"where must broadcast to \[2, 3\], got where of shape \[3, 3\]",
        ),
        (
            lambda: cross_entropy(_X, _L, weights=torch.ones(2, 3, requires_grad=True)),
            ValueError,
            "cross_entropy: weights are constants",
        ),
        (
            lambda: linear_cross_entropy(_X, _W, _L, chunk_size=0),
            ValueError,
            "chunk_size must be 1 or more, got chunk_size=0",
        ),
        (lambda: linear_cross_entropy(_X, _W, _L[0]), ValueError, "labels must have shape"),
        (
            lambda: linear_cross_entropy(_X, _W.T, _L),
            ValueError,
            r"linear_cross_entropy: weight must have shape \[4, 4\], got weight of shape \[4, 5\]",
        ),
        (
            lambda: linear_cross_entropy(_X, _W, _L, weighting=_MEAN),
            ValueError,
            "linear_cross_entropy",
        ),
        (lambda: kl_divergence(_X, _X[0]), ValueError, "target_logits must have shape"),
        (lambda: total_variation(_X, _X[0]), ValueError, "target_logits must have shape"),
        (lambda: binary_cross_entropy(_X, _X[0]), ValueError, "targets must have shape"),
        (lambda: squared_error(_X, _X[0]), ValueError, "target must have shape"),
        (lambda: z_loss(_X, weights=torch.ones(4)), ValueError, "weights must broadcast"),
        (lambda: balance_stats(_X, _L), ValueError, "selected must have shape"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_public_names_have_docstrings():
    for name in losses.__all__:
        assert name == "Weighting" or getattr(losses, name).__doc__
