"""The explicit form of a window: three pure functions, and a carry that can be kept."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from window_cases import (
    CASE_PLANS,
    CASES,
    assert_close,
    assert_same,
    cut,
    ids,
    mean_terms,
    own_dens,
    own_terms,
    random_params,
    random_rows,
    whole_batch,
)

from numden.property_tests.ranks import on_simulated_ranks
from numden.pure import (
    Carry,
    FirstPass,
    LossTerms,
    NonFiniteLossError,
    PlanError,
    Reduction,
    TermStructureError,
    accumulator,
    first_pass,
    term_mean,
    tree,
    window_grad,
)

T = torch.tensor
SIZES = [5, 0, 3]
BY_NAME = {case.name: case for case in CASES}
case_plans = pytest.mark.parametrize(
    ("case", "plan"), CASE_PLANS, ids=[ids(pair) for pair in CASE_PLANS]
)


def known_of(case, plan, params, window):
    if plan == "before":
        dens = [case.den_fn(rows) for rows in window]
        return tree.map(lambda *each: sum(each), *dens)
    return first_pass(case.loss_fn)(params, window) if plan == "replay" else None


def steps_of(case, plan, **options):
    return accumulator(case.loss_fn, case.objective, plan=plan, **options)


def bits(carry):
    """A copy of all values, and what they are to be compared with later."""
    return tree.map(torch.clone, carry)


def saved_and_loaded(carry):
    """Through a file, as leaves: what a checkpoint does with a carry."""
    leaves, structure = tree.flatten(carry)
    file = io.BytesIO()
    torch.save(leaves, file)
    file.seek(0)
    return tree.unflatten(structure, torch.load(file, weights_only=True))


# --- init, update, finish ------------------------------------------------------------------------


@case_plans
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_accumulator_is_window_grad(case, plan, donate, last):
    params, window = random_params(), cut(random_rows(16), SIZES)
    init, update, finish = steps_of(case, plan, donate=donate)
    carry = init(params, known_of(case, plan, params, window))
    for place, batch in enumerate(window, 1):
        carry = update(carry, params, batch, last=last and place == len(window))
    den_fn = case.den_fn if plan == "before" else None
    expected = window_grad(case.loss_fn, case.objective, plan=plan, den_fn=den_fn)(params, window)
    assert_same(finish(carry), expected)


@case_plans
def test_carry_is_a_pytree_of_tensors_from_first_to_last(case, plan):
    params, window = random_params(), cut(random_rows(16), SIZES)
    init, update, _ = steps_of(case, plan)
    carry = init(params, known_of(case, plan, params, window))
    for step, batch in enumerate(window):
        assert isinstance(carry, Carry)
        assert carry.step == step
        assert all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(carry))
        assert not any(leaf.requires_grad for leaf in tree.leaves(carry))
        carry = update(carry, params, batch)


@case_plans
@pytest.mark.parametrize("donate", [False, True])
def test_equal_after_a_checkpoint_in_the_window(case, plan, donate):
    """The carry is saved and loaded after 0, 1, … micro-steps; the result has the same bits."""
    params, window = random_params(), cut(random_rows(16), SIZES)
    known = known_of(case, plan, params, window)

    def run(checkpoint_at):
        init, update, finish = steps_of(case, plan, donate=donate)
        carry = init(params, known)
        for place, batch in enumerate(window):
            if place == checkpoint_at:
                carry = saved_and_loaded(carry)
            carry = update(carry, params, batch)
        return finish(saved_and_loaded(carry) if checkpoint_at == len(window) else carry)

    expected = run(None)
    for at in range(len(window) + 1):
        assert_same(run(at), expected)


@case_plans
def test_without_donate_each_carry_stays_as_it_was(case, plan):
    params, window = random_params(), cut(random_rows(16), SIZES)
    init, update, finish = steps_of(case, plan)
    carries = [init(params, known_of(case, plan, params, window))]
    copies = [bits(carries[0])]
    for batch in window:
        carries.append(update(carries[-1], params, batch))
        copies.append(bits(carries[-1]))
    first = finish(carries[-1])
    kept = bits(first)
    finish(carries[-1])
    for carry, copy in zip(carries, copies, strict=True):
        assert_same(carry, copy)
    assert_same(first, kept)


@case_plans
def test_a_carry_can_be_continued_twice(case, plan):
    """Two futures of one carry: what a resumed run and the run that it was saved by do."""
    params, window = random_params(), cut(random_rows(16), SIZES)
    init, update, finish = steps_of(case, plan)
    start = update(init(params, known_of(case, plan, params, window)), params, window[0])

    def future():
        carry = start
        for batch in window[1:]:
            carry = update(carry, params, batch)
        return finish(carry)

    assert_same(future(), future())


@pytest.mark.parametrize("plan", ["after", "columns"])
def test_donate_reuses_the_memory_of_the_gradients(plan):
    params, window = random_params(), cut(random_rows(16), SIZES)
    init, update, finish = accumulator(
        own_terms if plan == "columns" else mean_terms, plan=plan, donate=True
    )
    carry = init(params)
    memory = [leaf.data_ptr() for leaf in tree.leaves(carry.grads[0])]
    for batch in window:
        carry = update(carry, params, batch)
    assert [leaf.data_ptr() for leaf in tree.leaves(carry.grads[0])] == memory
    assert [leaf.data_ptr() for leaf in tree.leaves(finish(carry).grads)] == memory


@settings(max_examples=max(6, settings.default.max_examples // 5))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_gradient_of_a_prefix_of_the_window(sizes):
    """A carry can be finished at any time: it is the gradient of what it has seen."""
    case, params = BY_NAME["own_dens"], random_params()
    rows = random_rows(16 + sum(sizes))
    window = cut(rows, [16, *sizes])
    init, update, finish = steps_of(case, "columns")
    carry = init(params)
    for place, batch in enumerate(window, 1):
        carry = update(carry, params, batch)
        seen = {name: torch.cat([b[name] for b in window[:place]]) for name in batch}
        result = finish(carry)
        assert_close((result.loss, result.grads), whole_batch(case, params, seen))


def test_carry_of_a_module_is_a_dict_by_name():
    module = nn.Linear(3, 1, dtype=torch.float64)
    loss_fn = lambda m, rows: LossTerms(m(rows["x"]).pow(2).sum(), rows["x"].shape[0])
    init, update, finish = accumulator(loss_fn, plan="after")
    carry = saved_and_loaded(update(init(module), module, random_rows(4)))
    assert set(carry.grads[0]) == {"weight", "bias"}
    expected = window_grad(loss_fn)(module, [random_rows(4), random_rows(2)])
    assert_same(finish(update(carry, module, random_rows(2))), expected)
    assert module.weight.grad is None


def test_ranks_finish_together():
    case, params = BY_NAME["own_dens"], random_params()
    window = cut(random_rows(16), SIZES)

    def on_rank(reduction, batches):
        init, update, finish = steps_of(case, "columns", reduction=reduction)
        carry = init(params)
        for place, batch in enumerate(batches, 1):
            carry = update(carry, params, batch, last=place == len(batches))
        return finish(carry)

    expected = window_grad(case.loss_fn, case.objective)(params, window)
    for result in on_simulated_ranks(on_rank, [window[:1], [], window[1:]]):
        assert_close(result, expected)


# --- what init is given --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [int, float, T])
def test_den_totals_may_be_numbers(kind):
    window = cut(random_rows(16), SIZES)
    totals = tree.map(lambda *dens: kind(int(sum(dens))), *map(own_dens, window))
    case, params = BY_NAME["own_dens"], random_params()
    init, update, finish = steps_of(case, "before")
    carry = init(params, totals)
    for batch in window:
        carry = update(carry, params, batch)
    assert_close(finish(carry).loss, whole_batch(case, params, random_rows(16))[0])


def test_den_totals_that_are_not_those_of_the_window():
    window, params = cut(random_rows(16), SIZES), random_params()
    init, update, finish = accumulator(mean_terms, plan="before")
    carry = update(init(params, T(99.0)), params, window[0])
    message = r"the dens that loss_fn returned do not sum to those that den_fn counted \(relative"
    with pytest.raises(TermStructureError, match=message):
        finish(carry)


@pytest.mark.parametrize(
    ("known", "described"),
    [({"a": 1.0}, r"\[\"den\['a'\]\"\]"), (torch.ones(2), r"\['den\[2\]'\]")],
)
def test_den_totals_of_another_shape(known, described):
    init, update, _ = accumulator(mean_terms, plan="before")
    message = rf"plan 'before': the dens counted before .*, got {described} for \['den'\]. Let den"
    with pytest.raises(TermStructureError, match=message):
        update(init(random_params(), known), random_params(), random_rows(4))


@pytest.mark.parametrize(
    ("plan", "known", "message"),
    [
        ("after", T(1.0), r"plan 'after': init\(params, known\) takes nothing as known"),
        ("columns", T(1.0), r"plan 'columns': init\(params, known\) takes nothing as known"),
        ("before", None, r"plan 'before': init\(params, known\) takes the total dens as known"),
        ("replay", None, r"plan 'replay': init\(params, known\) takes a FirstPass as known"),
        ("replay", T(1.0), r"plan 'replay': init\(params, known\) takes a FirstPass as known"),
        ("before", FirstPass(None, None, None), r"takes the total dens as known"),
    ],
)
def test_init_refuses_what_the_plan_has_no_use_for(plan, known, message):
    with pytest.raises(PlanError, match=message):
        accumulator(mean_terms, plan=plan).init(random_params(), known)


# --- misuse --------------------------------------------------------------------------------------


def test_auto_needs_a_window():
    with pytest.raises(PlanError, match=r"accumulator: plan 'auto' needs a window; name the plan"):
        accumulator(mean_terms, plan="auto")


def test_update_after_the_last_is_an_error():
    init, update, _ = accumulator(mean_terms, plan="after")
    params, rows = random_params(), random_rows(4)
    carry = update(init(params), params, rows, last=True)
    with pytest.raises(ValueError, match=r"update: a window goes on until last=True, got one more"):
        update(carry, params, rows)


def replayed(first, second, loss_fn=mean_terms, **options):
    params = random_params()
    init, update, finish = accumulator(loss_fn, plan="replay", **options)
    carry = init(params, first_pass(loss_fn)(params, first))
    for batch in second:
        carry = update(carry, params, batch)
    return finish(carry)


ROWS = random_rows(4)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            [ROWS],
            [],
            r"plan 'replay': both passes go over the same window, got one of them without",
        ),
        ([], [ROWS], r"plan 'replay': the first pass had no micro-step, got one in the second"),
        ([ROWS, ROWS], [ROWS], r"plan 'replay': loss_fn gave other sums in the second pass \(rel"),
        ([ROWS], [random_rows(4, seed=9)], r"loss_fn gave other sums in the second pass"),
    ],
)
def test_replay_goes_over_the_same_window_twice(first, second, message):
    with pytest.raises(PlanError, match=message):
        replayed(first, second)


def test_replay_with_other_terms_in_the_second_pass():
    calls = []

    def loss_fn(params, rows):
        calls.append(rows)
        return mean_terms(params, rows) if len(calls) == 1 else own_terms(params, rows)

    with pytest.raises(TermStructureError, match=r"from the second pass after \['num', 'den'\]"):
        replayed([ROWS], [ROWS], loss_fn)


def test_replay_that_does_not_repeat_is_skipped_without_a_read():
    result = replayed([ROWS, ROWS], [ROWS], on_empty="skip")
    assert not bool(result.valid)
    assert_same(result.grads, tree.zeros_like(random_params()))
    assert bool(replayed([ROWS, ROWS], [ROWS, ROWS], on_empty="skip").valid)


def test_first_pass_says_where_a_num_was_not_finite():
    bad = {**ROWS, "y": ROWS["y"].clone().fill_(torch.inf)}
    message = r"window: num is not finite in micro-step 1\. Nothing was updated"
    with pytest.raises(NonFiniteLossError, match=message):
        replayed([ROWS, bad, bad], [ROWS, bad, bad])


def test_first_pass_has_no_graph():
    params = {name: leaf.requires_grad_() for name, leaf in random_params().items()}
    found = first_pass(mean_terms)(params, [ROWS, ROWS])
    assert not any(leaf.requires_grad for leaf in tree.leaves(found))
    assert_close(term_mean()(found.totals[0].terms), window_grad(mean_terms)(params, [ROWS]).loss)


# --- when sums are reduced -----------------------------------------------------------------------


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("backward")
        return grad, None


@pytest.mark.parametrize("plan", ["after", "columns", "auto"])
def test_sums_are_reduced_once_and_before_the_last_backward_pass(plan):
    """So that their all-reduce is done when the gradients are."""
    log = []

    def loss_fn(params, rows):
        terms = mean_terms(params, rows)
        return LossTerms(Logged.apply(terms.num, log), terms.den)

    def totals(sums):
        log.append("totals")
        return lambda: log.append("wait") or sums

    def grads(values):
        log.append("grads")
        return values

    step = window_grad(loss_fn, plan=plan, reduction=Reduction(totals, grads))
    result = step(random_params(), cut(random_rows(16), [5, 3]))
    assert log == ["backward", "backward", "totals", "backward", "wait", "grads"]
    assert_same(result, window_grad(mean_terms)(random_params(), cut(random_rows(16), [5, 3])))
