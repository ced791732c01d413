"""Which plan can express which objective, what "auto" takes, and what it says about it."""

import time

import pytest
import torch
from hypothesis import given
from window_cases import (
    CASES,
    assert_close,
    balance,
    balance_terms,
    cut,
    dice_terms,
    dspine,
    dspine_terms,
    ids,
    mean_terms,
    one_minus,
    own_dens,
    own_terms,
    random_params,
    random_rows,
    weighted_terms,
    whole_batch,
)

from numden.property_tests.strategies import dyadic, dyadic_tensors
from numden.pure import (
    LossTerms,
    PlanError,
    PlanReport,
    accumulator,
    cotangent,
    explain_plan,
    term_mean,
    tree,
    window_grad,
)
from numden.pure._sums import evaluate
from numden.pure.objective import directions, spread
from numden.pure.plans import PLANS, report

T = torch.tensor
BY_NAME = {case.name: case for case in CASES}
REFUSED = [(case, plan) for case in CASES for plan in PLANS if plan not in case.plans]


def explain(case, **options):
    return explain_plan(case.loss_fn, case.objective, random_params(), random_rows(16), **options)


# --- what each plan expresses --------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_auto_takes_the_first_plan_that_expresses_the_objective(case):
    found = explain(case)
    assert isinstance(found, PlanReport)
    assert found.plan == case.plans[0]
    assert found.plan not in found.rejected


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_each_rejected_plan_says_why(case):
    """Whatever cannot express the objective is rejected; beside it only what costs too much."""
    rejected = explain(case, den_fn=None).rejected
    unusable = {plan for plan in PLANS if plan not in case.plans}
    too_many = {"columns"} if case.name in ("class_means", "balance") else set()
    assert set(rejected) == unusable | {"before"} | too_many  # "before" for want of a den_fn
    assert all(why and "\n" not in why for why in rejected.values())


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.den_fn], ids=lambda case: case.name
)
def test_auto_takes_before_when_there_is_a_den_fn(case):
    found = explain(case, den_fn=case.den_fn)
    assert found.plan == "before"
    assert found.reason == (
        "den_fn counts the dens before the window, and they alone fix the cotangent"
    )
    counted = []

    def den_fn(rows):
        counted.append(rows)
        return case.den_fn(rows)

    params, rows = random_params(), random_rows(16)
    result = window_grad(case.loss_fn, case.objective, den_fn=den_fn)(params, cut(rows, [5]))
    assert len(counted) == 2
    assert_close((result.loss, result.grads), whole_batch(case, params, rows))


@pytest.mark.parametrize(("case", "plan"), REFUSED, ids=[ids(pair) for pair in REFUSED])
def test_a_plan_that_cannot_is_an_error_that_names_one_that_can(case, plan):
    den_fn = (lambda rows: own_dens(rows)) if plan == "before" else None
    step = window_grad(case.loss_fn, case.objective, plan=plan, den_fn=den_fn)
    with pytest.raises(PlanError, match=rf"^plan '{plan}': .*\. Use plan='{case.plans[0]}'\.$"):
        step(random_params(), cut(random_rows(16), [5]))


def test_there_is_a_refusal_of_each_kind():
    assert {plan for _, plan in REFUSED} == {"after", "before"}


@pytest.mark.parametrize(
    ("loss_fn", "objective", "plan", "message"),
    [
        (
            dice_terms,
            one_minus,
            "after",
            r"plan 'after': den depends on params, and its gradient would be dropped. "
            r"Use plan='columns'",
        ),
        (
            dice_terms,
            one_minus,
            "before",
            r"plan 'before': den depends on params, so it cannot be counted before the window. "
            r"Use plan='columns'",
        ),
        (
            own_terms,
            term_mean(),
            "after",
            r"plan 'after': the terms form 2 groups with cotangents of their own "
            r"\(num\['a'\]; num\['b'\]\), and one factor at the end serves one group",
        ),
        (
            dspine_terms,
            dspine,
            "after",
            r"2 groups .* \(num\['ce'\] \+ num\['l1'\] \+ num\['penalty'\]; num\['score'\]\)",
        ),
        (
            balance_terms,
            balance,
            "after",
            r"3 groups .* \(num\['scores'\]\[0\]; num\['scores'\]\[1\]; num\['scores'\]\[2\]\)",
        ),
        (
            lambda p, rows: LossTerms(p["w"].expand(2, 3) * rows["x"].sum(), torch.ones(2, 3)),
            term_mean(),
            "after",
            r"several groups .* \(num\[0, 0\]; num\[0, 1\]; num\[0, 2\]; num\[1, 0\]; …\), and one",
        ),
        (
            dspine_terms,
            dspine,
            "before",
            r"plan 'before': the cotangent of the objective depends on the nums, not on the dens "
            r"alone. Use plan='columns'",
        ),
    ],
)
def test_plan_errors_say_what_is_in_the_way(loss_fn, objective, plan, message):
    den_fn = (lambda rows: rows["mask"].sum()) if plan == "before" else None
    step = window_grad(loss_fn, objective, plan=plan, den_fn=den_fn)
    with pytest.raises(PlanError, match=message):
        step(random_params(), cut(random_rows(16), [5]))


def test_before_needs_a_den_fn():
    with pytest.raises(PlanError, match=r"plan 'before': it needs den_fn, which counts the dens"):
        window_grad(mean_terms, plan="before")(random_params(), [random_rows(4)])
    update = accumulator(mean_terms, plan="before")
    with pytest.raises(
        PlanError, match=r"plan 'before': init\(params, known\) takes the total den"
    ):
        update.init(random_params())


def test_den_fn_that_cannot_help_is_the_same_error_from_explain_plan_and_from_auto():
    message = r"plan 'before': the cotangent of the objective depends on the nums.*'columns'"
    with pytest.raises(PlanError, match=message):
        explain(BY_NAME["dspine"], den_fn=lambda rows: rows["mask"].sum())
    with pytest.raises(PlanError, match=message):
        window_grad(dspine_terms, dspine, den_fn=lambda rows: rows["mask"].sum())(
            random_params(), [random_rows(4)]
        )


def test_explain_plan_calls_the_loss_once_and_touches_nothing():
    calls = []

    def loss_fn(params, rows):
        calls.append(params)
        return mean_terms(params, rows)

    params = {name: leaf.requires_grad_() for name, leaf in random_params().items()}
    state = torch.get_rng_state()
    explain_plan(loss_fn, term_mean(), params, random_rows(4))
    assert len(calls) == 1
    assert all(leaf.grad is None for leaf in params.values())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("token_mean", r"all terms share one den that does not depend on params: one multiply"),
        ("own_dens", r"2 term groups, each with a gradient buffer of its own"),
        ("balance", r"the cotangent is known only from all sums: a first pass without gradients"),
    ],
)
def test_reasons(case, reason):
    assert explain(BY_NAME[case]).reason.startswith(reason)


def test_columns_are_as_many_as_auto_is_willing_to_hold():
    params = {name: leaf.requires_grad_() for name, leaf in random_params().items()}
    sums = evaluate(own_terms, params, random_rows(4))
    for max_columns, plan in ((2, "columns"), (1, "replay"), (0, "replay")):
        found = report(sums, term_mean(), max_columns=max_columns)
        assert found.plan == plan
    message = "it would hold more than 1 gradient buffers, one for each term group"
    assert report(sums, term_mean(), max_columns=1).rejected["columns"] == message


@pytest.mark.parametrize("plan", ["auto", "replay"])
def test_thousands_of_sums_are_not_grouped_one_by_one(plan):
    """The cotangent of each is its own, as for the experts of a mixture over the whole window."""
    num_sums = 20_000
    loss_fn = lambda w, x: LossTerms({"s": w * x.sum(), "c": torch.ones(num_sums)}, x.numel())
    objective = lambda t: (t.num["c"].detach() * t.num["s"]).sum() / t.den**2
    window = [torch.ones(3), torch.ones(1)]
    start = time.process_time()
    grads = window_grad(loss_fn, objective, plan=plan)(torch.ones(num_sums), window).grads
    assert time.process_time() - start < 5  # one by one it is minutes
    assert_close(grads, torch.full((num_sums,), 2.0 * 4 / 16))


# --- objectives that made-up totals show badly or not at all -------------------------------------


def ratio_terms(w, x):
    return LossTerms((w * x).sum(), x.numel())


@pytest.mark.parametrize(
    ("objective", "derivative"),
    [
        (lambda t: -torch.log(1 - t.num / t.den), lambda r: 1 / (1 - r)),  # of a probability
        (lambda t: torch.exp(t.num / t.den), torch.exp),  # perplexity
        (lambda t: (t.num / t.den).float().double(), lambda r: torch.ones_like(r)),
        (lambda t: t.num / t.den**2, lambda r: torch.ones_like(r) / 4),
        (lambda t: 3 * t.num, lambda r: torch.full_like(r, 12.0)),
    ],
    ids=["log", "exp", "float32", "other den", "sum"],
)
@given(w=dyadic(min_value=0.125, max_value=1))
def test_after_expresses_each_function_of_one_ratio(objective, derivative, w):
    window = [T([0.25]).double(), T([0.5, 0.125, 0.125]).double()]
    assert explain_plan(ratio_terms, objective, T(w), window[0]).plan == "after"
    grads = window_grad(ratio_terms, objective)(T(w).double(), window).grads
    mean = T(0.25).double()
    torch.testing.assert_close(grads, mean * derivative(w * mean), rtol=1e-6, atol=0)


def test_float32_objective_does_not_fall_apart_into_groups():
    objective = lambda t: term_mean({"ce": 0.3, "l1": 1.7, "confidence": 0.1})(
        tree.map(torch.Tensor.float, t)
    )
    params, rows = random_params(), random_rows(16)
    assert explain_plan(weighted_terms, objective, params, rows).plan == "after"
    loss = window_grad(weighted_terms, objective)(params, cut(rows, [5, 3])).loss
    assert abs(loss - objective(weighted_terms(params, rows))) < 1e-5


def not_finite_at_made_up_totals(totals):
    return torch.log(totals.num / totals.den - 3)  # made-up ratios are below 1


def test_objective_that_is_not_finite_at_made_up_totals_is_replayed():
    loss_fn = lambda w, x: LossTerms((w * x).sum() * 10, x.numel())
    window = [T([1.0]).double(), T([2.0, 3.0]).double()]
    w = T(1.0).double()
    found = explain_plan(loss_fn, not_finite_at_made_up_totals, w, window[0])
    assert found.plan == "replay"
    hidden = "the objective is not finite at made-up totals, which hides its term groups"
    assert found.rejected["after"] == found.rejected["columns"] == hidden
    result = window_grad(loss_fn, not_finite_at_made_up_totals)(w, window)
    assert_close(result.grads, T(20.0).double() / 17)
    for plan in ("after", "columns"):
        with pytest.raises(PlanError, match=rf"plan '{plan}': {hidden}. Use plan='replay'"):
            window_grad(loss_fn, not_finite_at_made_up_totals, plan=plan)(w, window)


def far_hinge(totals):
    """At made-up totals, whose ratios are below 1, all that is seen is the first term."""
    return totals.num["a"] / totals.den + torch.relu(totals.num["b"] / totals.den - 10)


def hinge_terms(w, x):
    return LossTerms({"a": (w * x).sum(), "b": (w**2 * x).sum()}, x.numel())


@pytest.mark.parametrize("plan", ["after", "columns", "auto"])
def test_direction_that_made_up_totals_did_not_show_is_an_error_at_the_end(plan):
    window = [T([4.0]).double(), T([8.0, 3.0]).double()]
    step = window_grad(hinge_terms, far_hinge, plan=plan)
    assert_close(step(T(1.0).double(), window).grads, T(5.0).double())  # below the hinge
    message = r"at these totals the cotangent .* did not show \(relative remainder 1\). Use plan='r"
    with pytest.raises(PlanError, match=message):
        step(T(2.0).double(), window)
    replayed = window_grad(hinge_terms, far_hinge, plan="replay")(T(2.0).double(), window)
    assert_close(replayed.grads, T(5 + 2 * 2 * 5.0).double())


def test_skip_does_not_apply_what_the_plan_cannot_express():
    window = [T([4.0]).double(), T([8.0, 3.0]).double()]
    step = window_grad(hinge_terms, far_hinge, plan="after", on_empty="skip")
    assert bool(step(T(1.0).double(), window).valid)
    result = step(T(2.0).double(), window)
    assert not bool(result.valid)
    assert result.grads == 0


@pytest.mark.parametrize("plan", ["after", "columns", "replay", "auto"])
def test_objective_that_ignores_all_sums_has_no_gradient(plan):
    result = window_grad(ratio_terms, lambda t: T(3.0), plan=plan)(T(1.0), [T([1.0])])
    assert result.loss == 3
    assert result.grads == 0


@pytest.mark.parametrize("plan", ["columns", "replay"])
def test_hinge_below_its_knee_has_no_gradient(plan):
    """A cotangent that is zero at the totals, and one that is zero at made-up totals too."""
    result = window_grad(ratio_terms, lambda t: torch.relu(t.num / t.den - 100), plan=plan)(
        T(1.0), [T([1.0])]
    )
    assert (result.loss, result.grads) == (0, 0)


# --- dens that require grad ----------------------------------------------------------------------


def sometimes_dice(w, x):
    """The den of a batch without rows does not depend on params."""
    if not x.numel():
        return LossTerms(0.0, 0.0)
    return LossTerms((w * x).sum(), (w**2 * x).sum())


@pytest.mark.parametrize("plan", ["after", "columns", "auto"])
def test_den_that_depends_on_params_in_a_later_micro_step_only(plan):
    window = [T([]), T([1.0, 2.0])]
    name = "columns" if plan == "columns" else "after"
    with pytest.raises(PlanError, match=rf"plan '{name}': den depends on params.*plan='replay'"):
        window_grad(sometimes_dice, plan=plan)(T(2.0), window)
    assert window_grad(sometimes_dice, plan="replay")(T(2.0), window).grads == -0.25
    assert window_grad(sometimes_dice, plan=plan if plan != "after" else "columns")(
        T(2.0), window[::-1]
    ).grads == pytest.approx(-0.25)


def test_den_whose_gradient_no_buffer_holds_names_the_micro_step():
    window = [T([]), T([]), T([1.0]), T([2.0])]
    message = r"den depends on params, unlike in the first, in micro-step 2\. No buffer holds"
    with pytest.raises(PlanError, match=message):
        window_grad(sometimes_dice, plan="columns")(T(2.0), window)


def test_den_with_a_gradient_that_the_objective_ignores():
    loss_fn = lambda w, x: LossTerms((w * x).sum(), (w * x).sum())
    objective = lambda t: t.num * 2
    assert explain_plan(loss_fn, objective, T(1.0), T([1.0])).plan == "replay"
    assert window_grad(loss_fn, objective)(T(1.0), [T([1.0]), T([2.0])]).grads == 6
    message = r"plan 'columns': den depends on params, but the objective seems not to use it. Use p"
    with pytest.raises(PlanError, match=message):
        window_grad(loss_fn, objective, plan="columns")(T(1.0), [T([1.0])])


# --- objectives ----------------------------------------------------------------------------------


@given(
    num=dyadic_tensors((3,)), den=dyadic_tensors((), min_value=0.125), weights=dyadic_tensors((2,))
)
def test_term_mean_is_the_weighted_sum_of_ratios(num, den, weights):
    w = {"v": float(weights[0]), "s": float(weights[1])}
    totals = LossTerms({"v": num, "s": num[0]}, {"v": den, "s": den * 2})
    expected = w["v"] * (num / den).sum() + w["s"] * num[0] / (den * 2)
    assert_close(term_mean(w)(totals), expected)
    assert_close(term_mean()(totals), (num / den).sum() + num[0] / (den * 2))


@pytest.mark.parametrize("weights", [{"ce": 1.0}, [1.0, 2.0], 2.0])
def test_term_mean_needs_a_weight_for_each_term(weights):
    totals = LossTerms({"ce": T(6.0), "z": T(2.0)}, T(4.0))
    message = (
        r"term_mean: weights must be a number per term, shaped like num, got weights \[.*\] for "
        r"\[\"num\['ce'\]\", \"num\['z'\]\"\]"
    )
    with pytest.raises(ValueError, match=message):
        term_mean(weights)(totals)
    with pytest.raises(ValueError, match=message):  # and from a window, before any backward pass
        window_grad(weighted_as(totals), term_mean(weights))(T(1.0), [None])


def weighted_as(totals):
    return lambda w, _: LossTerms(tree.map(lambda num: num * w, totals.num), totals.den)


@given(num=dyadic_tensors(()), den=dyadic_tensors((), min_value=0.125))
def test_cotangent_is_the_derivative(num, den):
    loss, grads = cotangent(lambda t: t.num["a"] ** 2 / t.den, LossTerms({"a": num, "b": num}, den))
    assert_close(loss, num**2 / den)
    assert_close(grads, LossTerms({"a": 2 * num / den, "b": num * 0}, -(num**2) / den**2))


@pytest.mark.parametrize(
    ("objective", "got"),
    [
        (lambda t: t.num, r"\[2\]"),
        (lambda t: t.num[:1], r"\[1\]"),
        (lambda t: 3.0, "float"),
        (lambda t: t, "LossTerms"),
    ],
)
def test_objective_must_be_a_scalar_tensor(objective, got):
    message = rf"objective: must return a scalar tensor, got {got}. Sum it"
    with pytest.raises(ValueError, match=message):
        cotangent(objective, LossTerms(T([1.0, 2.0]), T(1.0)))
    with pytest.raises(ValueError, match=message):
        window_grad(lambda w, x: LossTerms(w * x, 1), objective)(T(1.0), [T([1.0, 2.0])])


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_directions_span_each_cotangent(case):
    totals = evaluate(case.loss_fn, random_params(), random_rows(16)).terms
    found = directions(case.objective, totals)
    _, grads = cotangent(case.objective, totals)
    factors, remainder = spread(grads, found)
    assert remainder < 1e-9
    parts = [tree.map(lambda d, f=f: d * f, each) for f, each in zip(factors, found, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = tree.map(torch.add, total, part)
    assert_close(total, grads)


def test_spread_sees_what_no_direction_holds():
    one = LossTerms({"a": T(1.0), "b": T(0.0)}, T(0.0))
    factors, remainder = spread(LossTerms({"a": T(4.0), "b": T(0.0)}, T(9.0)), (one,))
    assert (factors, remainder) == ([4.0], 0)  # no direction touches the den: nobody asks for it
    _, remainder = spread(LossTerms({"a": T(4.0), "b": T(-2.0)}, T(0.0)), (one,))
    assert remainder == 0.5
