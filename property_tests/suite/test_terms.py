"""Loss terms: a commutative monoid, its scaling, its one division."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from window_cases import assert_close, assert_same

from numden.property_tests.strategies import dyadic, dyadic_tensors
from numden.pure import (
    LossTerms,
    TermStructureError,
    add,
    combine,
    divide,
    merge,
    scale,
    tree,
    window_grad,
    zeros_like,
)
from numden.pure.terms import split_metrics

T = torch.tensor

# Sums of one structure: a scalar, a vector, a nested one; ints, and a python number.
terms = st.builds(
    LossTerms,
    st.fixed_dictionaries(
        {
            "ce": dyadic_tensors(()),
            "aux": st.tuples(dyadic_tensors((3,)), dyadic_tensors((2, 2))),
            "plain": dyadic(),
        }
    ),
    st.fixed_dictionaries(
        {
            "ce": st.integers(0, 99).map(torch.tensor),
            "aux": st.tuples(dyadic_tensors((3,), min_value=0), dyadic_tensors((), min_value=0)),
            "plain": st.integers(0, 99),
        }
    ),
)


def same(a, b):
    assert_same(tree.map(torch.as_tensor, a), tree.map(torch.as_tensor, b))


# --- the monoid ----------------------------------------------------------------------------------


@given(terms, terms, terms)
def test_associative_add(a, b, c):
    same(add(add(a, b), c), add(a, add(b, c)))


@given(terms, terms)
def test_commutative_add(a, b):
    same(add(a, b), add(b, a))


@given(terms)
def test_identity_add(a):
    same(add(a, zeros_like(a)), a)
    same(add(zeros_like(a), a), a)


@given(terms)
def test_zeros_like_keeps_dtypes_and_shapes(a):
    for zero, leaf in zip(tree.leaves(zeros_like(a)), tree.leaves(a), strict=True):
        assert type(zero) is type(leaf)
        assert torch.as_tensor(zero).dtype == torch.as_tensor(leaf).dtype
        assert torch.as_tensor(zero).shape == torch.as_tensor(leaf).shape


@given(terms)
def test_add_and_scale_change_no_argument(a):
    before = tree.map(lambda leaf: torch.as_tensor(leaf).clone(), a)
    add(a, a), scale(a, 3), zeros_like(a), divide(a)
    same(a, before)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (LossTerms(1.0, 2), LossTerms({"ce": 1.0}, 2)),
        (LossTerms({"ce": 1.0}, 2), LossTerms({"ce": 1.0, "z": 0.0}, 2)),
        (LossTerms({"ce": 1.0}, 2), LossTerms({"ce": 1.0}, {"ce": 2})),
        (LossTerms([1.0], 2), LossTerms((1.0,), 2)),
        (LossTerms(1.0, 2), LossTerms(1.0, None)),
    ],
)
def test_add_refuses_other_structures(a, b):
    message = r"add: the two trees must have one structure, got .* a term that a batch lacks is"
    for first, second in ((a, b), (b, a)):
        with pytest.raises(TermStructureError, match=message):
            add(first, second)


# --- scale ---------------------------------------------------------------------------------------


@given(terms, terms, dyadic())
def test_scale_distributes_over_add(a, b, factor):
    same(scale(add(a, b), factor), add(scale(a, factor), scale(b, factor)))


@given(terms, dyadic(), dyadic())
def test_scale_twice_is_scale_by_the_product(a, first, second):
    same(scale(scale(a, first), second), scale(a, first * second))


@given(terms)
def test_scale_by_two_is_add_to_itself(a):
    same(scale(a, 2), add(a, a))


@given(terms, dyadic(min_value=0.125))
def test_homogeneous_divide(a, factor):
    """Ratios do not see a common scale: each token counted twice changes nothing."""
    assert_close(divide(scale(a, factor)), divide(a))


# --- divide --------------------------------------------------------------------------------------


@given(dyadic(), dyadic(min_value=0.125))
def test_divide_is_division(num, den):
    assert divide(LossTerms(T(num).double(), T(den).double())) == num / den
    assert divide(LossTerms(T(num).double(), den)) == num / den


@given(st.integers(-(2**53), 2**53), st.integers(1, 2**53))
def test_integers_are_divided_in_float64(num, den):
    for terms in (LossTerms(num, den), LossTerms(T(num), T(den))):
        ratio = divide(terms)
        assert ratio.dtype == torch.float64
        assert ratio == num / den


def test_divide_nothing_by_nothing_is_zero_and_the_rest_is_as_in_ieee():
    ratios = divide(LossTerms(T([0.0, 1.0, -1.0, 6.0]), T([0.0, 0.0, 0.0, 4.0])))
    assert_same(ratios, T([0.0, torch.inf, -torch.inf, 1.5]))
    assert divide(LossTerms(T(torch.nan), T(0.0))).isnan()


@pytest.mark.parametrize("den", [T([0.0, 4.0]), T([0, 4])])
def test_divide_nothing_by_nothing_has_a_zero_gradient(den):
    """And the gradient of its neighbours is the quotient rule, without a NaN."""
    num = T([0.0, 6.0], requires_grad=True)
    den = den.clone().requires_grad_(den.is_floating_point())
    divide(LossTerms(num, den)).sum().backward()
    assert_same(num.grad, T([0.0, 0.25]))
    if den.requires_grad:
        assert_same(den.grad, T([0.0, -6 / 16]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_divide_composes_with_transforms():
    ratio = lambda num, den: divide(LossTerms(num, den))
    nums, dens = T([0.0, 6.0]), T([0.0, 4.0])
    assert_same(torch.func.vmap(ratio)(nums, dens), T([0.0, 1.5]))
    assert_same(torch.func.vmap(torch.func.grad(ratio))(nums, dens), T([0.0, 0.25]))
    _, tangent = torch.func.jvp(ratio, (nums, dens), (T([1.0, 1.0]), T([1.0, 1.0])))
    assert_same(tangent, T([0.0, 0.25 - 6 / 16]))


@pytest.mark.parametrize(
    ("den", "expected"),
    [
        (T(4.0), {"a": T([1.0, 2.0]), "b": (T(0.5), T(1.0))}),
        ({"a": T(2.0), "b": T(4.0)}, {"a": T([2.0, 4.0]), "b": (T(0.5), T(1.0))}),
        ({"a": T([4.0, 2.0]), "b": (T(2.0), 4)}, {"a": T([1.0, 4.0]), "b": (T(1.0), T(1.0))}),
    ],
    ids=["one for all", "one for a branch", "each its own"],
)
def test_den_may_be_a_prefix_of_num(den, expected):
    num = {"a": T([4.0, 8.0]), "b": (T(2.0), T(4.0))}
    assert_same(divide(LossTerms(num, den)), expected)


@pytest.mark.parametrize(
    "den", [{"ce": 1}, {"ce": 1, "z": 2, "more": 3}, [1, 2], {"ce": 1, "z": {"deep": 2}}]
)
def test_divide_refuses_a_den_that_does_not_fit(den):
    message = (
        r"LossTerms: den must have the structure of num or be a prefix of it, got num "
        r"\[\"num\['ce'\]\", \"num\['z'\]\"\] and den \[.*den.*\]. Give each term a den"
    )
    with pytest.raises(TermStructureError, match=message):
        divide(LossTerms({"ce": 1.0, "z": 2.0}, den))


# --- merge and combine ---------------------------------------------------------------------------


@given(terms, terms)
def test_merge_divides_each_by_its_own_den(a, b):
    same(divide(merge(a=a, b=b)), {"a": divide(a), "b": divide(b)})


@given(terms, terms, terms, terms)
def test_merge_commutes_with_add(a, b, c, d):
    same(add(merge(x=a, y=b), merge(x=c, y=d)), merge(x=add(a, c), y=add(b, d)))


def fit(w, x):
    return LossTerms(((w - x) ** 2).sum(), x.numel())


def size(w, x):
    terms = LossTerms({"l1": w.abs(), "l2": w**2}, 1)
    return terms, {"norm": LossTerms(w.abs(), 1)}


def test_combine_is_merge_of_what_the_parts_return():
    w, x = T(2.0), T([1.0, 5.0])
    terms, metrics = combine(fit=fit, size=size)(w, x)
    assert_same(terms.num, merge(fit=fit(w, x), size=size(w, x)[0]).num)
    assert terms.den == {"fit": 2, "size": 1}
    assert metrics == {"size/norm": LossTerms(T(2.0), 1)}
    assert isinstance(combine(fit=fit)(w, x), LossTerms)  # without metrics no pair


def test_combined_loss_is_the_sum_of_losses():
    window = [T([1.0, 5.0]), T([3.0])]
    both = window_grad(combine(fit=fit, size=size))(T(2.0), window)
    parts = [window_grad(fn)(T(2.0), window) for fn in (fit, size)]
    assert_close(both.loss, parts[0].loss + parts[1].loss)
    assert_close(both.grads, parts[0].grads + parts[1].grads)


# --- what a loss function returns ----------------------------------------------------------------


def test_split_metrics():
    terms, metrics = LossTerms(1.0, 2), {"a": LossTerms(1.0, 1)}
    assert split_metrics(terms) == (terms, {})
    assert split_metrics((terms, metrics)) == (terms, metrics)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (T(1.0), r"got Tensor. Return the sum and the count, LossTerms\(loss_sum, token_count\)"),
        ((T(1.0), 2), r"loss_fn: must return LossTerms or \(LossTerms, metrics\), got tuple"),
        ((LossTerms(1.0, 2), {}, {}), r"loss_fn: must return LossTerms or \(LossTerms, metrics\)"),
        (None, r"got NoneType"),
        ((LossTerms(1.0, 2), [1.0]), r"loss_fn: metrics must be a dict of LossTerms by name, got"),
    ],
)
def test_split_metrics_refuses(result, message):
    with pytest.raises(TermStructureError, match=message):
        split_metrics(result)
