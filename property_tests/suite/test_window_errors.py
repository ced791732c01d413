"""Empty and bad input: what is said, and that nothing is touched."""

import copy
import functools
import itertools
import random

import pytest
import torch
from torch import nn
from window_cases import (
    assert_close,
    assert_same,
    mean_terms,
    one_minus,
    own_dens,
    own_terms,
    random_params,
    random_rows,
)

from numden.dist import run_local
from numden.property_tests.ranks import on_simulated_ranks
from numden.pure import (
    EmptyWindowError,
    LossTerms,
    NonFiniteLossError,
    PlanError,
    Reduction,
    TermStructureError,
    accumulator,
    term_mean,
    tree,
    window_grad,
    window_value,
)

T = torch.tensor
ROWS = random_rows(6)
WINDOW = [ROWS, random_rows(3, seed=5), random_rows(4, seed=6)]
NUM_STEPS = len(WINDOW)
ANY = ("after", "before", "columns", "replay")


def mask_of(rows):
    return rows["mask"].sum()


def step_of(loss_fn, plan, den_fn=mask_of, **options):
    return window_grad(loss_fn, plan=plan, den_fn=den_fn if plan == "before" else None, **options)


def in_step(step, bad):
    """A loss function that calls ``bad`` for one batch of the window and is right for others."""

    def loss_fn(params, rows):
        return (bad if rows is WINDOW[step] else mean_terms)(params, rows)

    return loss_fn


# --- nothing is touched --------------------------------------------------------------------------


class World:
    """All that an error must leave as it was."""

    def __init__(self):
        self.params = {name: leaf.requires_grad_() for name, leaf in random_params().items()}
        self.module = nn.Linear(3, 1, dtype=torch.float64)
        self.closed = T([2.0, 1.0], requires_grad=True)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for leaf in [*self.params.values(), self.closed, *self.module.parameters()]:
            leaf.grad = torch.full_like(leaf, 7.0)
        self.optimizer.step()

    def state(self):
        leaves = [*self.params.values(), self.closed, *self.module.parameters()]
        return {
            "leaves": [leaf.detach().clone() for leaf in leaves],
            "grads": [leaf.grad.clone() for leaf in leaves],
            "same": [id(leaf.grad) for leaf in leaves],
            "hooks": [len(leaf._post_accumulate_grad_hooks or ()) for leaf in leaves],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "window": [tree.map(torch.clone, rows) for rows in WINDOW],
            "mode": torch.is_grad_enabled(),
        }


def assert_nothing_touched(before, after):
    for name, value in before.items():
        if name in ("same", "hooks", "python", "mode"):
            assert after[name] == value, name
        else:
            assert_same(
                tree.map(torch.as_tensor, after[name]), tree.map(torch.as_tensor, before[name])
            )


def check_refused(call, error, message):
    """``call(world)`` raises, and all is as it was."""
    world = World()
    before = world.state()
    with pytest.raises(error, match=message):
        call(world)
    assert_nothing_touched(before, world.state())


# --- structure, kinds and dtypes -----------------------------------------------------------------


def num(params, rows):
    return mean_terms(params, rows).num


FORMS = {
    "a mean": (lambda p, r: num(p, r) / 3, r"loss_fn: must return LossTerms .*, got Tensor"),
    "a pair": (lambda p, r: (num(p, r), 3), r"loss_fn: must return LossTerms .*, got tuple"),
    "nothing": (lambda p, r: None, r"loss_fn: must return LossTerms .*, got NoneType"),
    "no terms": (lambda p, r: LossTerms({}, {}), r"loss_fn: must return at least one term"),
    "den for others": (
        lambda p, r: LossTerms({"a": num(p, r)}, {"b": 3}),
        r"den must have the structure of num or be a prefix of it, got num .*a.* and den .*b.*",
    ),
    "text": (
        lambda p, r: LossTerms(num(p, r), "3"),
        r"loss_fn: sums are tensors or numbers, got den of type str",
    ),
    "fp16 num": (
        lambda p, r: LossTerms({"ce": num(p, r).half()}, 3),
        r"loss_fn: num\['ce'\] must be summed in float32 or wider, got torch.float16",
    ),
    "fp16 den": (
        lambda p, r: LossTerms(num(p, r), T(3.0).half()),
        r"loss_fn: den must be summed in float32 or wider, got torch.float16, which overflows or",
    ),
    "bf16 den": (
        lambda p, r: LossTerms(num(p, r), {"ce": T(3.0).bfloat16()}["ce"]),
        r"loss_fn: den must be summed in float32 or wider, got torch.bfloat16",
    ),
    "complex num": (
        lambda p, r: LossTerms(num(p, r) * 1j, 3),
        r"loss_fn: num must be summed in float32 or wider, got torch.complex128",
    ),
    "den per row": (
        lambda p, r: LossTerms(num(p, r), r["mask"]),
        r"a den is a scalar or has the shape of its num, got a den of shape \[\d\] for num of",
    ),
    "metrics as list": (
        lambda p, r: (mean_terms(p, r), [1.0]),
        r"loss_fn: metrics must be a dict of LossTerms by name, got list",
    ),
    "metric as mean": (
        lambda p, r: (mean_terms(p, r), {"acc": T(0.5)}),
        r"metrics are LossTerms by name, got metrics\['acc'\] of type Tensor. Return its sum and",
    ),
    "fp16 metric": (
        lambda p, r: (mean_terms(p, r), {"acc": LossTerms(T(0.5), T(1.0).half())}),
        r"loss_fn: metrics\['acc'\].den must be summed in float32 or wider, got torch.float16",
    ),
    "metric per row": (
        lambda p, r: (mean_terms(p, r), {"acc": LossTerms(T(0.5), r["mask"])}),
        r"got a den of shape \[\d\] for metrics\['acc'\].num of shape \[\]. Sum over tokens",
    ),
}
forms = pytest.mark.parametrize("form", FORMS)
any_plan = pytest.mark.parametrize("plan", [*ANY, "auto"])


@forms
@pytest.mark.parametrize("plan", ["auto", "replay"])
@pytest.mark.parametrize("step", [0, NUM_STEPS - 1])
def test_what_a_loss_function_may_not_return(form, plan, step):
    bad, message = FORMS[form]
    loss_fn = in_step(step, bad)
    check_refused(
        lambda world: step_of(loss_fn, plan)(world.params, WINDOW), TermStructureError, message
    )
    check_refused(
        lambda world: window_value(loss_fn)(world.params, WINDOW), TermStructureError, message
    )


CHANGES = {
    "a term less": (
        lambda p, r: LossTerms({"a": own_terms(p, r).num["a"]}, {"a": 1}),
        r"each micro-step must return the same terms, got \[\"num\['a'\]\", \"den\['a'\]\"\] from "
        r"micro-step 1 after \[\"num\['a'\]\", \"num\['b'\]\", \"den\['a'\]\", \"den\['b'\]\"\]",
    ),
    "a shared den": (
        lambda p, r: LossTerms(own_terms(p, r).num, 1),
        r"the same terms, got .*'den'",
    ),
    "a vector": (
        lambda p, r: LossTerms(tree.map(lambda n: n.expand(2), own_terms(p, r).num), own_dens(r)),
        r"a sum keeps its shape from micro-step to micro-step, got num\['a'\] of shape \[2\] from "
        r"micro-step 1 after \[\]",
    ),
    "a metric more": (
        lambda p, r: (own_terms(p, r), {"acc": LossTerms(1.0, 2)}),
        r"the same terms, got .*\"metrics\['acc'\].num\".* from micro-step 1 after",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("plan", ["before", "columns", "replay", "auto"])
def test_micro_steps_return_the_same_terms(change, plan):
    bad, message = CHANGES[change]
    loss_fn = lambda p, rows: bad(p, rows) if rows is WINDOW[1] else own_terms(p, rows)
    check_refused(
        lambda world: step_of(loss_fn, plan, own_dens)(world.params, WINDOW),
        TermStructureError,
        message,
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"a": T([1.0]), "n": T([3])},
            r"params are floating-point tensors, got params\['n'\] of ty",
        ),
        ({"a": [T([1.0]), 2.0]}, r"got params\['a'\]\[1\] of type float. Give it to the loss func"),
        ((T([True]),), r"got params\[0\] of type torch.bool"),
        ("weights.pt", r"got params of type str"),
    ],
)
@any_plan
def test_params_are_floating_point_tensors(params, message, plan):
    loss_fn = lambda p, rows: LossTerms(T(1.0), 1)
    check_refused(
        lambda world: step_of(loss_fn, plan, lambda rows: 1)(params, WINDOW), TypeError, message
    )


@any_plan
def test_a_dict_is_no_window(plan):
    message = r"a window is an iterable of batches, got a dict. A window of one batch is \[batch\]"
    check_refused(lambda world: step_of(mean_terms, plan)(world.params, ROWS), TypeError, message)
    check_refused(lambda world: window_value(mean_terms)(world.params, ROWS), TypeError, message)


@pytest.mark.parametrize("make", [window_grad, functools.partial(accumulator, plan="after")])
def test_unknown_options(make):
    with pytest.raises(ValueError, match=r"on_empty must be 'raise', 'zero' or 'skip', got 'mean'"):
        make(mean_terms, on_empty="mean")
    make = functools.partial(getattr(make, "func", make), mean_terms)
    message = (
        r"plan must be one of \('after', 'before', 'columns', 'replay'\) or 'auto', got 'fast'"
    )
    with pytest.raises(PlanError, match=message):
        make(plan="fast")


def test_unknown_policy_of_window_value():
    with pytest.raises(ValueError, match=r"on_empty must be 'raise', 'zero' or 'skip', got None"):
        window_value(mean_terms, on_empty=None)


@pytest.mark.parametrize("plan", [*ANY, "auto"])
def test_objective_must_be_scalar(plan):
    message = r"objective: must return a scalar tensor, got \[2\]. Sum it"
    objective = lambda t: torch.stack([t.num, t.num]) / t.den
    check_refused(
        lambda world: step_of(mean_terms, plan, objective=objective)(world.params, WINDOW),
        ValueError,
        message,
    )


# --- errors of the loss function itself ----------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory, say")


def fails_forward(params, rows):
    raise RuntimeError("out of memory, say")


def fails_backward(params, rows):
    terms = mean_terms(params, rows)
    return LossTerms(Failing.apply(terms.num), terms.den)


@any_plan
@pytest.mark.parametrize("bad", [fails_forward, fails_backward])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_exception_of_the_loss_function_comes_through(plan, bad, dtype):
    check_refused(
        lambda world: step_of(in_step(1, bad), plan, accumulate_dtype=dtype)(world.params, WINDOW),
        RuntimeError,
        "out of memory, say",
    )


def module_terms(module, rows):
    return LossTerms((rows["mask"] * module(rows["x"]).squeeze(1)).sum(), rows["mask"].sum())


@any_plan
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_exception_in_the_backward_pass_of_a_module_gives_its_grads_back(plan, dtype):
    """Also the hooks that fill accumulators of another dtype are gone."""

    def loss_fn(module, rows):
        terms = module_terms(module, rows)
        return LossTerms(Failing.apply(terms.num), terms.den) if rows is WINDOW[1] else terms

    check_refused(
        lambda world: step_of(loss_fn, plan, accumulate_dtype=dtype)(world.module, WINDOW),
        RuntimeError,
        "out of memory, say",
    )


@pytest.mark.parametrize("plan", [*ANY, "auto"])
def test_exception_of_the_window_itself_comes_through(plan):
    def broken():
        yield from WINDOW
        raise OSError("disk is gone")

    check_refused(
        lambda world: step_of(mean_terms, plan)(world.params, broken()), OSError, "disk is gone"
    )


# --- numbers that are no sums --------------------------------------------------------------------


@any_plan
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("on_empty", ["raise", "zero"])
def test_num_that_is_not_finite_names_term_and_micro_step(plan, value, on_empty):
    def loss_fn(params, rows):
        good = num(params, rows)
        return LossTerms(
            {"a": good, "b": good * (1 if rows is WINDOW[0] else value)}, mask_of(rows)
        )

    message = r"^window: num\['b'\] is not finite in micro-step 1\. Nothing was updated\. Look at"
    step = step_of(loss_fn, plan, on_empty=on_empty)
    check_refused(lambda world: step(world.params, WINDOW), NonFiniteLossError, message)
    evaluate = window_value(loss_fn, on_empty=on_empty)
    check_refused(lambda world: evaluate(world.params, WINDOW), NonFiniteLossError, message)


@any_plan
def test_num_that_is_not_finite_is_skipped_without_a_read(plan):
    loss_fn = in_step(1, lambda p, rows: LossTerms(num(p, rows) * torch.nan, mask_of(rows)))
    assert not bool(step_of(loss_fn, plan, on_empty="skip")(random_params(), WINDOW).valid)
    assert window_value(loss_fn, on_empty="skip")(random_params(), WINDOW).loss.isnan()


def test_all_bad_terms_are_named_each_at_its_first_micro_step():
    def bad(params, rows):
        step = next(i for i, each in enumerate(WINDOW) if each is rows)
        nums = own_terms(params, rows).num
        return LossTerms({"a": nums["a"] / (step < 2), "b": nums["b"] / (step < 1)}, own_dens(rows))

    message = (
        r"num\['a'\] is not finite in micro-step 2; num\['b'\] is not finite in micro-step 1\."
    )
    check_refused(
        lambda world: window_grad(bad, plan="columns")(world.params, WINDOW),
        NonFiniteLossError,
        message,
    )


@any_plan
def test_negative_den_is_no_count(plan):
    """Also when the total is positive."""
    loss_fn = in_step(2, lambda p, rows: LossTerms(mean_terms(p, rows).num, -mask_of(rows)))
    den_fn = lambda rows: -mask_of(rows) if rows is WINDOW[2] else mask_of(rows)
    message = (
        r"^window: den is negative in micro-step 2\. A den is a count or a sum of weights >= 0"
    )
    check_refused(
        lambda world: step_of(loss_fn, plan, den_fn)(world.params, WINDOW),
        TermStructureError,
        message,
    )


@pytest.mark.parametrize("factor", [0.5, 1.001, 2])
def test_dens_of_loss_fn_and_of_den_fn_agree(factor):
    message = r"the dens that loss_fn returned do not sum to those that den_fn counted \(relative d"
    step = window_grad(mean_terms, den_fn=lambda rows: factor * mask_of(rows))
    check_refused(lambda world: step(world.params, WINDOW), TermStructureError, message)
    near = window_grad(mean_terms, den_fn=lambda rows: mask_of(rows).float() / 3 * 3)
    assert_close(near(random_params(), WINDOW), window_grad(mean_terms)(random_params(), WINDOW))


def test_dens_of_another_structure():
    message = r"must be like those of loss_fn, got \['den'\] for \[\"den\['a'\]\", \"den\['b'\]\"\]"
    step = window_grad(own_terms, den_fn=mask_of)
    check_refused(lambda world: step(world.params, WINDOW), TermStructureError, message)


def test_dens_that_disagree_are_skipped_without_a_read():
    step = window_grad(mean_terms, den_fn=lambda rows: 2 * mask_of(rows), on_empty="skip")
    assert not bool(step(random_params(), WINDOW).valid)


def test_den_with_a_gradient_is_refused_where_it_would_be_dropped():
    closed_over = lambda world: lambda p, rows: LossTerms(num(p, rows), world.closed.sum())
    for plan, message in {
        "after": r"plan 'after': den depends on params, and its gradient would be dropped. Use p",
        "before": r"plan 'before': den depends on params, so it cannot be counted before the wind",
    }.items():
        check_refused(
            lambda world, plan=plan: step_of(closed_over(world), plan)(world.params, WINDOW),
            PlanError,
            message,
        )


@any_plan
def test_objective_that_is_not_finite_at_finite_totals(plan):
    objective = lambda t: torch.log(t.num / t.den - 1e6)
    loss_fn = lambda p, rows: LossTerms(num(p, rows) ** 2, rows["mask"].sum())
    if plan in ("after", "before", "columns"):  # not finite at made-up totals either
        step, error = step_of(loss_fn, plan, objective=objective), PlanError
        message = "the objective"
    else:
        step, error = window_grad(loss_fn, objective, plan=plan), NonFiniteLossError
        message = r"the objective and its derivative must be finite at totals that are, and are not"
    check_refused(lambda world: step(world.params, WINDOW), error, message)


def test_objective_whose_derivative_alone_is_not_finite():
    """√ at 0 has a value."""
    loss_fn = lambda p, rows: LossTerms(num(p, rows) * 0, rows["mask"].sum())
    objective = lambda t: torch.sqrt(t.num / t.den)
    message = r"the objective and its derivative must be finite"
    for on_empty in ("raise", "zero"):
        step = window_grad(loss_fn, objective, on_empty=on_empty)
        check_refused(lambda world, s=step: s(world.params, WINDOW), NonFiniteLossError, message)
    assert window_value(loss_fn, objective)(random_params(), WINDOW).loss == 0


def test_replay_of_a_loss_that_does_not_repeat():
    """Drawing from a global generator, which keys in the batch would not."""
    state = itertools.count()
    loss_fn = lambda p, rows: LossTerms(num(p, rows) * (1 + next(state)), mask_of(rows))
    message = (
        r"plan 'replay': loss_fn gave other sums in the second pass \(relative difference .*\). "
        r"Draw random numbers from keys in the batch, or use 'columns'"
    )
    step = window_grad(loss_fn, plan="replay")
    check_refused(lambda world: step(world.params, WINDOW), PlanError, message)


# --- empty windows -------------------------------------------------------------------------------


def nothing(rows):
    return {**rows, "mask": rows["mask"] * 0, "other": rows["other"] * 0}


EMPTY = [nothing(rows) for rows in WINDOW]
CASES = {
    "one den": (mean_terms, term_mean(), mask_of),
    "two dens": (own_terms, term_mean({"a": 2.0, "b": 0.5}), own_dens),
    "custom": (mean_terms, lambda t: t.num / t.den, mask_of),
    "dice": (lambda p, r: LossTerms(num(p, r), num(p, r) + mask_of(r)), one_minus, None),
}
CASE_PLANS = [
    (name, plan)
    for name in CASES
    for plan in (*ANY, "auto")
    if not (name == "two dens" and plan == "after")
    if not (name == "dice" and plan in ("after", "before"))
]
case_plans = pytest.mark.parametrize(
    ("name", "plan"), CASE_PLANS, ids=["-".join(pair) for pair in CASE_PLANS]
)


@case_plans
def test_window_without_a_supervised_token(name, plan):
    loss_fn, objective, den_fn = CASES[name]
    make = functools.partial(step_of, loss_fn, plan, den_fn, objective=objective)
    message = (
        r"^window: a total den must be positive and finite, got den.* = 0.*\. Nothing in the "
        r"window is supervised: .* on_empty='zero' or on_empty='skip'"
    )
    check_refused(lambda world: make()(world.params, EMPTY), EmptyWindowError, message)
    check_refused(
        lambda world: window_value(loss_fn, objective)(world.params, EMPTY),
        EmptyWindowError,
        message,
    )
    params = random_params()
    zeros = tree.zeros_like(params)
    zero = make(on_empty="zero")(params, EMPTY)
    assert zero.loss == window_value(loss_fn, objective, on_empty="zero")(params, EMPTY).loss
    assert zero.loss == 0  # also where f is not finite: the policy says what an empty window counts
    assert_same(zero.grads, zeros)
    assert bool(zero.valid)
    skip = make(on_empty="skip")(params, EMPTY)
    assert skip.loss.isnan()
    assert window_value(loss_fn, objective, on_empty="skip")(params, EMPTY).loss.isnan()
    assert_same(skip.grads, zeros)
    assert not bool(skip.valid)


@case_plans
@pytest.mark.parametrize("on_empty", ["zero", "skip"])
def test_policies_change_nothing_for_a_good_window(name, plan, on_empty):
    loss_fn, objective, den_fn = CASES[name]
    make = functools.partial(step_of, loss_fn, plan, den_fn, objective=objective)
    params, window = random_params(), [EMPTY[0], *WINDOW, EMPTY[1]]
    expected = make()(params, window)
    assert_same(make(on_empty=on_empty)(params, window), expected)
    assert bool(expected.valid)
    assert_same(
        window_value(loss_fn, objective, on_empty=on_empty)(params, window),
        window_value(loss_fn, objective)(params, window),
    )


@pytest.mark.parametrize("plan", ["before", "columns", "replay", "auto"])
def test_one_of_two_terms_has_nothing_to_learn_from(plan):
    params = random_params()
    window = [{**rows, "other": rows["other"] * 0} for rows in WINDOW]
    make = functools.partial(step_of, own_terms, plan, own_dens)
    message = r"a total den must be positive and finite, got den\['b'\] = 0\."
    check_refused(lambda world: make()(world.params, window), EmptyWindowError, message)
    zero = make(on_empty="zero")(params, window)
    alone = window_grad(mean_terms)(params, window)
    assert_close((zero.loss, zero.grads), (alone.loss, alone.grads))
    assert not bool(make(on_empty="skip")(params, window).valid)


@any_plan
def test_den_that_is_not_finite(plan):
    loss_fn = in_step(1, lambda p, rows: LossTerms(num(p, rows), T(torch.inf)))
    den_fn = lambda rows: T(torch.inf) if rows is WINDOW[1] else mask_of(rows)
    message = r"a total den must be positive and finite, got den = inf"
    check_refused(
        lambda world: step_of(loss_fn, plan, den_fn)(world.params, WINDOW),
        EmptyWindowError,
        message,
    )


@any_plan
@pytest.mark.parametrize("empty", [list, lambda: iter(()), tuple])
def test_window_without_a_batch(plan, empty):
    make = functools.partial(step_of, mean_terms, plan)
    message = (
        r"^window: the window has no micro-step. Give it at least one batch, or say on_empty='zero'"
    )
    check_refused(lambda world: make()(world.params, empty()), EmptyWindowError, message)
    check_refused(
        lambda world: window_value(mean_terms)(world.params, empty()), EmptyWindowError, message
    )
    params = random_params()
    for on_empty, loss in (("zero", 0.0), ("skip", torch.nan)):
        result = make(on_empty=on_empty)(params, empty())
        value = window_value(mean_terms, on_empty=on_empty)(params, empty())
        for each in (result, value):
            torch.testing.assert_close(
                each.loss, torch.full((), loss, dtype=torch.float64), equal_nan=True
            )
            assert_same(each.terms, LossTerms(T(0.0).double(), T(0.0).double()))
            assert each.metrics == {}
        assert_same(result.grads, tree.zeros_like(params))
        assert bool(result.valid) == (on_empty == "zero")


@any_plan
def test_ranks_raise_the_same_for_an_empty_world(plan):
    params = random_params()
    heard = []

    def on_rank(reduction, window):
        try:
            step_of(mean_terms, plan, reduction=reduction)(params, window)
        except EmptyWindowError as error:
            heard.append(str(error))

    on_simulated_ranks(on_rank, [EMPTY[:2], [], EMPTY[2:]])
    assert len(heard) == 3
    assert set(heard) == {heard[0]}
    assert "got den = 0" in heard[0]
    heard.clear()
    on_simulated_ranks(on_rank, [[], []])
    assert len(heard) == 2
    assert "no micro-step" in heard[0]


@any_plan
def test_ranks_raise_the_same_for_a_num_that_is_not_finite(plan):
    """The rank and the micro-step of that rank are named, on each rank."""
    params = random_params()
    loss_fn = in_step(2, lambda p, rows: LossTerms(num(p, rows) * torch.nan, mask_of(rows)))
    heard = []

    def on_rank(reduction, window):
        try:
            step_of(loss_fn, plan, reduction=reduction)(params, window)
        except NonFiniteLossError as error:
            heard.append(str(error))

    on_simulated_ranks(on_rank, [WINDOW[:1], [], WINDOW[1:]])
    assert len(heard) == 3
    assert set(heard) == {heard[0]}
    assert "num is not finite in micro-step 1 on rank 2." in heard[0]


def test_ranks_skip_only_what_has_nothing_to_learn_from():
    """A rank without a micro-step, or with nothing supervised, is no reason to skip."""
    params = random_params()
    step = lambda reduction, window: window_grad(mean_terms, reduction=reduction, on_empty="skip")(
        params, window
    )
    expected = window_grad(mean_terms)(params, WINDOW)
    for result in on_simulated_ranks(step, [WINDOW[:1], [], EMPTY, WINDOW[1:]]):
        assert_close(result, expected)
        assert bool(result.valid)
    for result in on_simulated_ranks(step, [EMPTY[:1], [], EMPTY[1:]]):
        assert not bool(result.valid)


@any_plan
def test_what_a_reduction_adds_to_the_faults_is_no_reason_to_skip(plan):
    """One may append how many ranks had no micro-step, for `reports` to be asked."""

    def totals(sums):
        if plan == "before" and not isinstance(sums, tuple):
            return sums
        total, faults = sums
        return total, torch.cat([faults, torch.ones(1, dtype=torch.float64)])

    reduction = Reduction(totals, lambda grads: grads)
    result = step_of(mean_terms, plan, reduction=reduction, on_empty="skip")(
        random_params(), WINDOW
    )
    assert bool(result.valid)
    expected = window_grad(mean_terms)(random_params(), WINDOW)
    assert_close(result, expected)
    raising = step_of(mean_terms, plan, reduction=reduction)
    assert_close(raising(random_params(), WINDOW), expected)


# --- torch.func ----------------------------------------------------------------------------------


def test_module_inside_a_transform_is_refused():
    module = nn.Linear(3, 1, dtype=torch.float64)
    step = lambda scale: window_grad(lambda m, rows: module_terms(m, rows))(module, WINDOW).loss
    message = r"inside torch.func params must be a pytree of tensors, got a Linear. Use torch.func"
    with pytest.raises(TypeError, match=message):
        torch.func.grad(step)(T(1.0))


def test_no_batch_inside_a_transform():
    message = r"inside torch.func a window needs a batch to know its terms"
    for make in (window_grad, window_value):
        with pytest.raises(EmptyWindowError, match=message):
            torch.func.grad(lambda w, make=make: make(mean_terms)(w, []).loss)(random_params())


def refusals_of_modules_that_reduce():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (1,))
    loss_fn = lambda m, x: LossTerms(m(x).sum(), 1)
    inner = nn.Sequential(fully_shard(nn.Linear(3, 1), mesh=mesh))
    said = []
    for module in (fully_shard(nn.Linear(3, 1), mesh=mesh), inner):
        for call in (window_grad(loss_fn), lambda m, _: accumulator(loss_fn, plan="after").init(m)):
            with pytest.raises(TypeError) as caught:
                call(module, [torch.ones(1, 3)])
            said.append(str(caught.value))
    with pytest.raises(TypeError) as caught:
        window_grad(loss_fn)(DistributedDataParallel(nn.Linear(3, 1)), [torch.ones(1, 3)])
    return [*said, str(caught.value)]


def test_modules_that_average_over_ranks_belong_to_dist():
    said = run_local(refusals_of_modules_that_reduce, 1)[0]
    names = ["FSDPLinear", "FSDPLinear", "Sequential", "Sequential", "DistributedDataParallel"]
    for text, name in zip(said, names, strict=True):
        assert text == (
            "window: an FSDP2 or DDP module averages gradients over ranks in its backward passes, "
            f"got {name}. Use numden.dist.window_grad, which sums them once."
        )


def refusals_of_sharded():
    """What is said about DTensors, of which torch.func sees the local parts alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    params = {"layer": [distribute_tensor(torch.ones(2), mesh, [Shard(0)])]}
    module = fully_shard(nn.Linear(3, 1), mesh=mesh)
    module(torch.ones(1, 3))
    loss_fn = lambda p, x: LossTerms((p["layer"][0] * x).sum(), 2)
    by_module = lambda m, x: LossTerms(m(x).sum(), 1)
    grad, vmap, x = torch.func.grad, torch.func.vmap, torch.ones(2)
    tries = {
        "closed over": lambda: grad(lambda s: window_grad(loss_fn)(params, [x * s]).loss)(T(1.0)),
        "argument": lambda: grad(lambda p: window_grad(loss_fn)(p, [x]).loss)(params),
        "value": lambda: grad(lambda p: window_value(loss_fn)(p, [x]).loss)(params),
        "nested": lambda: grad(
            lambda s: grad(lambda p: window_value(loss_fn)(p, [x]).loss)(params)
        )(T(1.0)),
        "vmap": lambda: vmap(lambda s: window_value(loss_fn)(params, [x * s]).loss)(torch.ones(3)),
        "fsdp value": lambda: vmap(lambda s: window_value(by_module)(module, [s]).loss)(
            torch.ones(2, 1, 3)
        ),
        "fsdp grad": lambda: vmap(lambda s: window_grad(by_module)(module, [s]).loss)(
            torch.ones(2, 1, 3)
        ),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            said[name] = f"no error: {attempt()}"
        except TypeError as error:
            said[name] = str(error)
    return said


def test_sharded_params_inside_a_transform_are_refused_by_path():
    said = run_local(refusals_of_sharded, 1)[0]
    message = (
        "params['layer'][0] is a DTensor, whose gradient under torch.func is local to its rank. "
        "Gather it first (numden.dist.gather), or leave the transform."
    )
    for name in ("closed over", "argument", "value", "nested", "vmap"):
        assert message in said[name], name
    message = "inside torch.func params may not be an FSDP2 module, got a FSDPLinear, whose gradie"
    for name in ("fsdp value", "fsdp grad"):
        assert message in said[name], name
