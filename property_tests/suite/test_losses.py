import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numden.pure import LossTerms, add, losses
from numden.pure.losses import (
    balance_loss,
    balance_stats,
    binary_cross_entropy,
    cross_entropy,
    kl_divergence,
    linear_cross_entropy,
    squared_error,
    total_variation,
    z_loss,
)

# Values of a few hundred terms of size 1 to 10, summed in two orders: float64 rounding is 1e-13.
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
WEIGHTINGS = ("token", "sample", "square")


class Rows(NamedTuple):
    """Some rows of tokens: what any of the losses may need, row by row."""

    x: Tensor  # [R, S, V] what is differentiated
    y: Tensor  # [R, S, V] what x is compared with
    labels: Tensor  # [R, S] int64
    where: Tensor  # [R, S] bool
    weights: Tensor  # [R, S]

    def take(self, index: Any) -> "Rows":
        return Rows(*(field[index] for field in self))


def _elementwise(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.unsqueeze(-1)


def _labels(rows: Rows) -> Tensor:
    return rows.labels.masked_fill(~rows.where, -100)


def _linear(rows: Rows, x: Tensor, **options: Any) -> LossTerms:
    head = torch.cos(torch.arange(3.0 * x.shape[-1], dtype=x.dtype)).reshape(3, -1)
    return linear_cross_entropy(x, head, rows.labels % 3, chunk_size=2, **options)


# The first use of forward mode loads torch's scripted decompositions, which warn about themselves.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

# Each takes rows and the x to use in their place, and the options where and weights.
LOSSES: dict[str, Callable[..., LossTerms]] = {
    "cross_entropy": lambda r, x, **o: cross_entropy(x, r.labels, **o),
    "cross_entropy_sample": lambda r, x, **o: cross_entropy(x, r.labels, weighting="sample", **o),
    "cross_entropy_square": lambda r, x, **o: cross_entropy(x, r.labels, weighting="square", **o),
    "linear_cross_entropy": _linear,
    "linear_cross_entropy_square": lambda r, x, **o: _linear(r, x, weighting="square", **o),
    "kl_divergence": lambda r, x, **o: kl_divergence(x, r.y, **o),
    "total_variation": lambda r, x, **o: total_variation(x, r.y, **o),
    "binary_cross_entropy": lambda r, x, **o: binary_cross_entropy(
        x, r.y.sigmoid(), **{k: _elementwise(v) for k, v in o.items()}
    ),
    "squared_error": lambda r, x, **o: squared_error(
        x, r.y, **{k: _elementwise(v) for k, v in o.items()}
    ),
    "z_loss": lambda r, x, **o: z_loss(x, **o),
}
each_loss = pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))


def _make_rows(num_rows: int, num_tokens: int, vocab: int, seed: int) -> Rows:
    g = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_tokens)
    x, y = (torch.randint(-16, 17, (*shape, vocab), generator=g).double() / 8 for _ in range(2))
    return Rows(
        x,
        y,
        torch.randint(vocab, shape, generator=g),
        torch.rand(shape, generator=g) < 0.6,
        torch.randint(1, 9, shape, generator=g).double() / 4,
    )


@st.composite
def rows(draw: st.DrawFn, min_rows: int = 1) -> Rows:
    return _make_rows(
        draw(st.integers(min_rows, 4)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2**16)),
    )


def _value_and_grad(fun: Callable[[Tensor], LossTerms], x: Tensor) -> tuple[LossTerms, Tensor]:
    x = x.clone().requires_grad_()
    terms = fun(x)
    (grad,) = torch.autograd.grad(terms.num, x)
    return LossTerms(terms.num.detach(), terms.den), grad


def assert_terms(a: LossTerms, b: LossTerms) -> None:
    torch.testing.assert_close(a.num, b.num, **CLOSE)
    torch.testing.assert_close(a.den, b.den, **CLOSE)


class Ops(TorchDispatchMode):
    """Records each operation with the sizes of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, bool, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        by_mask = "index" in str(func) and any(t.dtype == torch.bool for t in tensors[1:])
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.calls.append((str(func.overloadpacket), by_mask, max(sizes, default=0)))
        return out

    @property
    def syncs(self) -> list[str]:
        waits = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "item", "equal")
        return [
            name
            for name, by_mask, _ in self.calls
            if by_mask or any(name == f"aten.{wait}" or "unique" in name for wait in waits)
        ]


# --- laws, for each loss ------------------------------------------------------------------------


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
        return _value_and_grad(lambda x: loss(part, x, **options), part.x)

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
    a, grad = _value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    mixed = rows.take(order)
    b, mixed_grad = _value_and_grad(lambda x: loss(mixed, x, where=mixed.where), mixed.x)
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
        return _value_and_grad(lambda x: loss(part, x, **options), part.x)

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
    rows = _make_rows(*shape, seed=0)
    rows = rows._replace(x=torch.full_like(rows.x, filler), where=torch.zeros_like(rows.where))
    terms, grad = _value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    assert terms.num == 0
    assert terms.den == 0
    assert torch.equal(grad, torch.zeros_like(rows.x))


@each_loss
@given(rows=rows(), weighted=st.booleans())
def test_equivalent_func_grad_autograd(loss, rows, weighted):
    options = {"where": rows.where} | ({"weights": rows.weights} if weighted else {})
    terms, grad = _value_and_grad(lambda x: loss(rows, x, **options), rows.x)

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
    _, expected = _value_and_grad(
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
    _, grad = _value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    change = torch.func.jvp(fun, (rows.x,), (tangent,))[1]
    torch.testing.assert_close(change, (grad * tangent).sum(), **CLOSE)


@each_loss
@pytest.mark.parametrize("weighted", [False, True])
def test_waits_for_no_device(loss, weighted):
    rows = _make_rows(3, 4, 3, seed=0)
    options = {"where": rows.where} | ({"weights": rows.weights} if weighted else {})
    with Ops() as ops:
        terms, _ = _value_and_grad(lambda x: loss(rows, x, **options), rows.x)
    assert ops.syncs == []
    assert not terms.den.requires_grad


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_packing_and_positions_wait_for_no_device(weighting):
    rows = _make_rows(3, 4, 3, seed=0)
    options: dict[str, Any] = {"weighting": weighting, "sample_ids": rows.labels}
    with Ops() as ops:
        _value_and_grad(
            lambda x: _linear(rows, x, positions=torch.tensor([3, 1]), **options), rows.x
        )
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
    rows = _make_rows(40, 10, 4, seed=0)
    exact, grad = _value_and_grad(lambda x: loss(rows, x, where=rows.where), rows.x)
    half = rows._replace(y=rows.y.to(dtype))
    terms, half_grad = _value_and_grad(lambda x: loss(half, x, where=half.where), rows.x.to(dtype))
    assert terms.num.dtype == torch.float32
    assert half_grad.dtype == dtype
    assert terms.den.dtype in (torch.int64, torch.float32)
    # The inputs are exact in half precision. What rounds is one product or sigmoid of a token,
    # 2^-9 in bfloat16 of logits up to 4, over a mean loss of about 1; gradients are at most 5.
    torch.testing.assert_close(terms.num.double(), exact.num, rtol=2e-2, atol=0.0)
    torch.testing.assert_close(terms.den.double(), exact.den.double(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(half_grad.double(), grad, rtol=2e-2, atol=4e-2)


# --- cross-entropy ------------------------------------------------------------------------------


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
    labels, samples = _labels(rows), torch.arange(len(rows.x))[:, None].expand(rows.labels.shape)
    ids = None
    if packed:
        id_ = st.sampled_from([-(2**63), -1, 0, 5, 2**63 - 1])
        size = labels.numel()
        ids = torch.tensor(data.draw(st.lists(id_, min_size=size, max_size=size)))
        samples = ids = ids.reshape(labels.shape)
    terms, grad = _value_and_grad(
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
    padded = _make_rows(len(lengths), max(lengths), 4, seed)
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    labels = _labels(padded).masked_fill(~inside, -100)
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
    for weighting, den in (("token", 5), ("sample", 2), ("square", 3)):
        terms = cross_entropy(logits, labels, weighting=weighting)
        torch.testing.assert_close(terms.num, torch.tensor(den * math.log(4)).double())
        assert terms.den == den


def test_weights_multiply_num_and_den():
    labels = torch.tensor([[0, 1, -100, 3], [3, -100, -100, -100]])
    logits = torch.zeros(2, 4, 4, dtype=torch.float64)
    weights = torch.tensor([[0.5, 2.0, math.nan, 0.0], [4.0, 1.0, 1.0, math.inf]])
    for weighting, den in (("token", 6.5), ("sample", 2.5 / 3 + 4.0)):
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


# --- linear cross-entropy -----------------------------------------------------------------------


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor


@st.composite
def heads(draw: st.DrawFn) -> Head:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tokens, width, vocab = draw(st.tuples(*(st.integers(1, n) for n in (6, 3, 5))))
    hidden, weight = (
        torch.randint(-16, 17, (n, width), generator=g).double() / 8 for n in (2 * tokens, vocab)
    )
    labels = torch.randint(vocab, (2 * tokens,), generator=g)
    labels[torch.rand(2 * tokens, generator=g) < 0.4] = -100
    return Head(hidden.reshape(2, tokens, width), weight, labels.reshape(2, tokens))


def _naive(head: Head, **options: Any) -> Callable[[Tensor, Tensor], LossTerms]:
    return lambda h, w: cross_entropy(h @ w.T, head.labels, **options)


def _chunked(head: Head, **options: Any) -> Callable[[Tensor, Tensor], LossTerms]:
    return lambda h, w: linear_cross_entropy(h, w, head.labels, **options)


def _grads(fun: Callable[[Tensor, Tensor], LossTerms], head: Head) -> tuple[LossTerms, list]:
    inputs = [each.clone().requires_grad_() for each in head[:2]]
    terms = fun(*inputs)
    grads = torch.autograd.grad(3 * terms.num, inputs)
    return LossTerms(terms.num.detach(), terms.den), list(grads)


@given(head=heads(), weighting=st.sampled_from(WEIGHTINGS), listed=st.booleans())
def test_equivalent_chunked_whole_for_every_chunk_size(head, weighting, listed):
    naive, grads = _grads(_naive(head, weighting=weighting), head)
    positions = (head.labels.reshape(-1) != -100).nonzero().squeeze(1) if listed else None
    options = {"weighting": weighting, "positions": positions}
    results = [
        _grads(_chunked(head, chunk_size=size, **options), head)
        for size in range(1, head.labels.numel() + 2)
    ]
    for terms, got in results:
        # Dyadic logits are exact whatever the chunk, hence so is the value; gradients are
        # products with probabilities, which round by the shape of the product.
        assert torch.equal(terms.num, results[0][0].num)
        assert torch.equal(terms.den, naive.den)
        torch.testing.assert_close(terms.num, naive.num, **CLOSE)
        torch.testing.assert_close(got, grads, **CLOSE)


@given(head=heads())
def test_evaluation_has_the_value_of_training(head):
    trained, _ = _grads(_chunked(head, chunk_size=2), head)
    assert torch.equal(_chunked(head, chunk_size=2)(*head[:2]).num, trained.num)


def test_positions_decide_what_counts():
    head = Head(
        torch.randn(5, 2).double(), torch.randn(3, 2).double(), torch.tensor([0, 1, 2, 0, -100])
    )
    positions = torch.tensor([4, 1, 3])
    terms, (grad, _) = _grads(_chunked(head, positions=positions), head)
    where = torch.tensor([False, True, False, True, False])
    expected, (expected_grad, _) = _grads(_naive(head, where=where), head)
    assert_terms(terms, expected)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    none, grads = _grads(_chunked(head, positions=positions[:0]), head)
    assert none == (0, 0)
    assert not any(each.any() for each in grads)


@forward_mode
@given(head=heads())
def test_second_derivatives_are_those_of_logits(head):
    chunked, naive = (
        lambda h, w, f=f: f(h, w).num for f in (_chunked(head, chunk_size=2), _naive(head))
    )
    func, both, inputs = torch.func, (0, 1), head[:2]
    tangents = tuple(torch.cos(each + 1) for each in inputs)
    transforms = [
        lambda f: func.hessian(f, both)(*inputs),  # forward over reverse
        lambda f: func.jacrev(func.jacrev(f, both), both)(*inputs),
        lambda f: func.jacrev(func.jacfwd(f, both), both)(*inputs),
        lambda f: func.jvp(func.grad(f, both), inputs, tangents),
        lambda f: func.jvp(func.grad(f, 0), inputs, tangents),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(chunked), transform(naive), **CLOSE)


@forward_mode
def test_gradients_of_all_orders_by_finite_differences():
    head = Head(
        torch.randn(4, 2).double(), torch.randn(3, 2).double(), torch.tensor([0, 2, 1, -100])
    )
    fun = lambda h, w: _chunked(head, chunk_size=3)(h, w).num
    inputs = tuple(each.requires_grad_() for each in head[:2])
    assert torch.autograd.gradcheck(fun, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(fun, inputs)
    third = lambda f: torch.func.jacrev(torch.func.hessian(f))(*head[:2])
    torch.testing.assert_close(third(fun), third(lambda h, w: _naive(head)(h, w).num), **CLOSE)


def test_two_backwards_from_one_forward():
    head = Head(torch.randn(4, 2).double(), torch.randn(3, 2).double(), torch.tensor([0, 2, 1, 1]))
    hidden = head.hidden.clone().requires_grad_()
    num = _chunked(head)(hidden, head.weight).num
    (first,) = torch.autograd.grad(num, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(2 * num, hidden)
    assert torch.equal(2 * first, second)


def _ops_of_training(tokens: int, chunk_size: int, frozen: bool, grad: bool) -> Ops:
    hidden = torch.randn(tokens, 2, requires_grad=True)
    weight = torch.randn(50, 2, requires_grad=not frozen)
    labels = torch.arange(tokens) % 50
    with Ops() as ops, torch.set_grad_enabled(grad):
        num = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size).num
        if grad:
            num.backward()
    return ops


@pytest.mark.parametrize(
    ("frozen", "grad", "products"), [(False, True, 3), (True, True, 2), (False, False, 1)]
)
def test_logits_are_made_once_and_never_all(frozen, grad, products):
    ops = _ops_of_training(64, chunk_size=4, frozen=frozen, grad=grad)
    assert max(size for *_, size in ops.calls) <= 4 * 50
    names = [name for name, *_ in ops.calls]
    assert names.count("aten.mm") + names.count("aten.addmm_") == products * 16


def test_rare_tokens_keep_small_gradients():
    # The loss is e^-40: as 1 - p it is 0 in float32, and as -log p too, but not beside p.
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[10.0], [0.0]])
    linear_cross_entropy(hidden, weight, torch.tensor([0])).num.backward()
    expected = -10 * (1 - torch.sigmoid(torch.tensor(10.0, dtype=torch.float64)))
    assert hidden.grad is not None
    # Softmax of float32 logits: e^-10 with a relative error of some 2^-24, beside 1 in -log p,
    # which leaves 2^-24 / e^-10 = 1.3e-3.
    torch.testing.assert_close(hidden.grad.double().squeeze(), expected, rtol=2e-3, atol=0.0)


def test_float16_sums_that_overflow_can_be_scaled():
    # The gradient of the head is -5e5 before the scale, out of range, and -488 after.
    hidden = torch.full((10_000, 1), 100.0, dtype=torch.float16)
    weight = torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)
    num = linear_cross_entropy(hidden, weight, torch.zeros(10_000, dtype=torch.int64)).num
    (num * 2.0**-10).backward()
    expected = torch.tensor([[-500_000.0], [500_000.0]]) * 2.0**-10
    torch.testing.assert_close(weight.grad, expected.half(), rtol=1e-3, atol=0.0)


def test_autocast_is_that_of_the_whole():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.arange(6) % 5
    with torch.autocast("cpu", torch.bfloat16):
        num = linear_cross_entropy(hidden, weight, labels, chunk_size=4).num
        naive = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    got, expected = (torch.autograd.grad(each, (hidden, weight)) for each in (num, naive))
    torch.testing.assert_close(num, naive)
    # bfloat16 products of one and of two chunks.
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


# Dynamo instantiates the Function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_compiles_as_one_graph():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.arange(6) % 5
    fun = lambda h, w: linear_cross_entropy(h, w, labels, chunk_size=4).num
    compiled = torch.compile(fun, fullgraph=True, backend="aot_eager")
    got, expected = (
        torch.autograd.grad(f(hidden, weight), (hidden, weight)) for f in (compiled, fun)
    )
    torch.testing.assert_close(got, expected)


# --- other losses, against other ways to write them ---------------------------------------------


@given(rows=rows())
def test_kl_divergence_is_that_of_torch(rows):
    log_p, log_q = rows.x.log_softmax(-1), rows.y.log_softmax(-1)
    expected = F.kl_div(log_p, log_q, log_target=True, reduction="sum")
    torch.testing.assert_close(kl_divergence(rows.x, rows.y).num, expected, **CLOSE)


def test_kl_divergence_of_excluded_entries():
    # Both exclude the last entry, the target the second too: q = (1, 0, 0), p = (1/2, 1/2, 0).
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    target = torch.tensor([[0.0, -math.inf, -math.inf]], dtype=torch.float64)
    terms, grad = _value_and_grad(lambda x: kl_divergence(x, target), logits)
    torch.testing.assert_close(terms.num, torch.tensor(math.log(2)).double())
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 0.5, 0.0]]).double())
    _, grad = _value_and_grad(lambda y: kl_divergence(logits, y), target)
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
    terms, grad = _value_and_grad(
        lambda x: squared_error(x, rows.y, where=rows.where[..., None]), rows.x
    )
    kept = rows.where[..., None].expand(rows.x.shape)
    eighths = ((rows.x - rows.y)[kept] * 8).to(torch.int64)
    assert terms.num * 64 == eighths.square().sum()
    assert terms.den == kept.sum()
    assert torch.equal(grad, torch.where(kept, 2 * (rows.x - rows.y), 0.0))


@given(rows=rows())
def test_z_loss_closed_form(rows):
    terms, grad = _value_and_grad(lambda x: z_loss(x, where=rows.where), rows.x)
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


# --- balancing ----------------------------------------------------------------------------------


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


def test_balance_stats_wait_for_no_device():
    with Ops() as ops:
        balance_stats(torch.rand(4, 3), torch.zeros(4, 2).long(), where=torch.ones(4).bool())
    assert ops.syncs == []


# --- bad arguments ------------------------------------------------------------------------------

_X, _L = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
_W = torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cross_entropy(_X, _L[0]), ValueError, r"labels must have shape \[2, 3\], got"),
        (lambda: cross_entropy(_X, _L, weighting="mean"), ValueError, "weighting must be 'token'"),
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
        (lambda: linear_cross_entropy(_X, _W, _L, weighting=2), ValueError, "linear_cross_entropy"),
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
