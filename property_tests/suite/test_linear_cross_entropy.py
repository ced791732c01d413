from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import CLOSE, WEIGHTINGS, Ops, assert_terms, forward_mode
from torch import Tensor
from torch.nn import functional as F

from numden.pure import LossTerms
from numden.pure.losses import (
    cross_entropy,
    linear_cross_entropy,
)


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


def test_autocast_reaches_what_backward_computes():
    # Below vmap the gradient is left to the backward pass, which is outside of autocast.
    hidden = torch.randn(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight, labels = torch.randn(5, 4), torch.tensor([0, 1, 4])
    with torch.autocast("cpu", torch.bfloat16):
        num = torch.func.vmap(lambda h: linear_cross_entropy(h, weight, labels).num)(hidden).sum()
        whole = linear_cross_entropy(hidden, weight, labels.expand(2, 3)).num
    got, expected = (torch.autograd.grad(each, hidden)[0] for each in (num, whole))
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)  # bfloat16


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
