"""A window gives what the whole batch gives, whatever the plan and the cut."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from window_cases import (
    CASE_PLANS,
    CASES,
    NUM_CLASSES,
    assert_close,
    assert_same,
    cut,
    dyadic_params,
    dyadic_rows,
    ids,
    mean_terms,
    random_params,
    random_rows,
    whole_batch,
)

from numden.property_tests.ranks import on_simulated_ranks
from numden.property_tests.rows import take_rows
from numden.property_tests.strategies import partitions, worlds
from numden.pure import (
    EmptyWindowError,
    LossTerms,
    TermStructureError,
    WindowGrad,
    add,
    fold,
    scan,
    term_mean,
    tree,
    window_grad,
    window_value,
)

NUM_ROWS = 16
BY_NAME = {case.name: case for case in CASES}
case_plans = pytest.mark.parametrize(
    ("case", "plan"), CASE_PLANS, ids=[ids(pair) for pair in CASE_PLANS]
)


def grad_of(case, plan, **options):
    den_fn = case.den_fn if plan == "before" else None
    return window_grad(case.loss_fn, case.objective, plan=plan, den_fn=den_fn, **options)


seeds = st.integers(0, 9999)
cuts = partitions(NUM_ROWS, max_size=5)
# Many cases times many plans: an eighth of the usual number of examples for each.
few = settings(max_examples=max(4, settings.default.max_examples // 8))


def micro_batches(rows, cut):
    return [take_rows(rows, each) for each in cut]


# --- the whole batch -----------------------------------------------------------------------------


@case_plans
@few
@given(cut=cuts, seed=seeds)
def test_equivalent_window_whole_batch(case, plan, cut, seed):
    params, rows = random_params(seed), random_rows(NUM_ROWS, seed)
    loss, grads = whole_batch(case, params, rows)
    result = grad_of(case, plan)(params, micro_batches(rows, cut))
    assert_close(result.loss, loss)
    assert_close(result.grads, grads)


exact_plans = [(case, plan) for case, plan in CASE_PLANS if case.exact]


@pytest.mark.parametrize(("case", "plan"), exact_plans, ids=[ids(pair) for pair in exact_plans])
@few
@given(cut=cuts, seed=seeds)
def test_equal_window_whole_batch_where_sums_are_exact(case, plan, cut, seed):
    params, rows = dyadic_params(seed), dyadic_rows(seed)
    loss, grads = whole_batch(case, params, rows)
    result = grad_of(case, plan)(params, micro_batches(rows, cut))
    assert_same((result.loss, result.grads), (loss, grads))


@pytest.mark.parametrize("plan", ["after", "columns"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@few
@given(cut=cuts, seed=seeds)
def test_equal_window_for_each_cut_when_raw_sums_are_exact(case, plan, cut, seed):
    params, rows = dyadic_params(seed), dyadic_rows(seed)
    if plan in case.plans:  # the division comes last, and divides the same sums for each cut
        whole = grad_of(case, plan)(params, [rows])
        assert_same(grad_of(case, plan)(params, micro_batches(rows, cut)), whole)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@few
@given(cut=cuts)
def test_auto_equals_the_plan_it_takes(case, cut):
    params, window = random_params(), micro_batches(random_rows(NUM_ROWS), cut)
    auto = window_grad(case.loss_fn, case.objective)(params, window)
    assert_same(auto, grad_of(case, case.plans[0])(params, window))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@few
@given(cut=cuts)
def test_window_value_is_the_loss_of_window_grad(case, cut):
    params, window = random_params(), micro_batches(random_rows(NUM_ROWS), cut)
    value = window_value(case.loss_fn, case.objective)(params, window)
    result = grad_of(case, case.plans[0])(params, window)
    assert_same((value.loss, value.terms), (result.loss, result.terms))
    assert not value.loss.requires_grad


def test_mean_of_means_is_another_number():
    params, rows = random_params(), random_rows(NUM_ROWS)
    window = cut(rows, [2, 9])
    of_means = torch.stack([whole_batch(BY_NAME["token_mean"], params, b)[0] for b in window])
    loss = window_grad(mean_terms)(params, window).loss
    assert abs(of_means.mean() - loss) > 0.01  # so that the tests above can tell them apart


@case_plans
def test_order_of_rows_does_not_matter(case, plan):
    params, rows = random_params(), random_rows(NUM_ROWS)
    mixed = take_rows(rows, torch.randperm(NUM_ROWS).tolist())
    one, other = (grad_of(case, plan)(params, cut(b, [5, 3])) for b in (rows, mixed))
    assert_close(one, other)


# --- windows of any kind -------------------------------------------------------------------------


@case_plans
def test_one_shot_iterator(case, plan):
    params, window = random_params(), cut(random_rows(NUM_ROWS), [5, 0, 3])
    expected = grad_of(case, plan)(params, window)
    assert_same(grad_of(case, plan)(params, (batch for batch in window)), expected)
    assert_same(grad_of(case, plan)(params, itertools.chain(window)), expected)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_auto_takes_a_one_shot_iterator(case):
    params, window = random_params(), cut(random_rows(NUM_ROWS), [5, 0, 3])
    auto = window_grad(case.loss_fn, case.objective)
    assert_same(auto(params, iter(window)), auto(params, window))


@case_plans
def test_empty_micro_steps_add_exact_zeros(case, plan):
    params, rows = random_params(), random_rows(NUM_ROWS)
    some, none = cut(rows, [7]), take_rows(rows, [])
    expected = grad_of(case, plan)(params, some)
    padded = [none, some[0], none, none, some[1], none]
    assert_same(grad_of(case, plan)(params, padded), expected)


@pytest.mark.parametrize("plan", ["after", "columns"])
def test_streams_hold_no_batch_but_the_next(plan):
    """A generator is asked for one batch more than is being worked on, never for all."""
    made, done = [], []

    def loss_fn(w, x):
        done.append(len(made))
        return LossTerms((w * x).sum(), x.numel())

    def stream():
        for i in range(5):
            made.append(i)
            yield torch.full((i + 1,), 1.0)

    window_grad(loss_fn, plan=plan)(torch.tensor(1.0), stream())
    assert done == [2, 3, 4, 5, 5]


def on_ranks(case, plan, params, rows, world, **options):
    """The result of each rank; ``world`` deals micro-steps to ranks, of which some have none."""
    batches = cut(rows, [5, 0, 7])

    def step(reduction, window):
        return grad_of(case, plan, reduction=reduction, **options)(params, window)

    return on_simulated_ranks(step, [[batches[i] for i in rank] for rank in world])


@case_plans
@few
@given(world=worlds(4))
def test_equivalent_ranks_whole_batch(case, plan, world):
    params, rows = random_params(), random_rows(NUM_ROWS)
    loss, grads = whole_batch(case, params, rows)
    for result in on_ranks(case, plan, params, rows, world):
        assert_close((result.loss, result.grads), (loss, grads))


@pytest.mark.parametrize(("case", "plan"), exact_plans, ids=[ids(pair) for pair in exact_plans])
@few
@given(world=worlds(4), seed=seeds)
def test_equal_ranks_whole_batch_where_sums_are_exact(case, plan, world, seed):
    params, rows = dyadic_params(seed), dyadic_rows(seed)
    expected = whole_batch(case, params, rows)
    for result in on_ranks(case, plan, params, rows, world):
        assert_same((result.loss, result.grads), expected)


def test_ranks_may_take_different_plans():
    """As they may under "auto"; what is reduced, and in which order, is the same for all plans."""
    case, params, rows = BY_NAME["balance"], random_params(), random_rows(NUM_ROWS)
    batches = cut(rows, [5, 0, 7])
    plans = ["replay", "columns", "auto"]

    def step(reduction, rank):
        return grad_of(case, plans[rank], reduction=reduction)(params, batches[rank::3])

    for result in on_simulated_ranks(step, range(3)):
        assert_close((result.loss, result.grads), whole_batch(case, params, rows))


# --- the result ----------------------------------------------------------------------------------


def with_metrics(params, rows):
    terms = mean_terms(params, rows)
    hits = (rows["mask"] * (rows["y"] > 0)).sum()
    per_group = LossTerms(
        torch.bincount(rows["group"], rows["mask"], NUM_CLASSES),
        torch.bincount(rows["group"], minlength=NUM_CLASSES),
    )
    return terms, {"accuracy": LossTerms(hits, rows["mask"].sum()), "per_group": per_group}


@pytest.mark.parametrize("plan", ["after", "before", "columns", "replay", "auto"])
@few
@given(cut=cuts)
def test_metrics_are_ratios_of_total_sums(plan, cut):
    params, rows = random_params(), random_rows(NUM_ROWS)
    den_fn = (lambda rows: rows["mask"].sum()) if plan == "before" else None
    window = micro_batches(rows, cut)
    result = window_grad(with_metrics, plan=plan, den_fn=den_fn)(params, window)
    value = window_value(with_metrics)(params, window)
    chosen = rows["mask"] > 0
    accuracy = (rows["y"][chosen] > 0).double().mean()
    per_group = torch.stack([rows["mask"][rows["group"] == g].mean() for g in range(NUM_CLASSES)])
    for metrics in (result.metrics, value.metrics):
        assert set(metrics) == {"accuracy", "per_group"}
        assert torch.equal(metrics["accuracy"], accuracy)
        assert_close(metrics["per_group"], per_group)
    assert_same(result[:3], window_grad(mean_terms, plan=plan, den_fn=den_fn)(params, window)[:3])


@case_plans
def test_result_is_detached_float64_with_the_structure_of_params(case, plan):
    params = random_params()
    result = grad_of(case, plan)(params, cut(random_rows(NUM_ROWS), [5]))
    assert isinstance(result, WindowGrad)
    assert all(leaf.dtype == torch.float64 for leaf in tree.leaves(result))
    assert not any(leaf.requires_grad for leaf in tree.leaves(result))
    assert tree.structure(result.grads) == tree.structure(params)
    assert bool(result.valid)


def test_total_terms_are_sums_of_all_micro_steps():
    params, rows = random_params(), random_rows(NUM_ROWS)
    window = cut(rows, [3, 6])
    total = add(add(*(mean_terms(params, b) for b in window[:2])), mean_terms(params, window[2]))
    assert_same(window_grad(mean_terms)(params, window).terms, total)


def test_sums_in_float32_are_added_in_float64():
    """2^24 + 1 is no float32; with float32 totals the ones would be lost."""
    counts = [torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(1.0)]
    result = window_grad(lambda w, n: LossTerms(w * n, n))(torch.tensor(1.0), counts)
    assert result.terms.den == 2**24 + 2


def test_python_numbers_are_sums_too():
    result = window_grad(lambda w, x: LossTerms({"a": w * x, "b": 3}, {"a": 2, "b": 4.0}))(
        torch.tensor(2.0), [1.0, 3.0]
    )
    assert result.loss == 2 * 4 / 4 + 6 / 8
    assert result.grads == 1.0


def test_terms_that_do_not_depend_on_params_have_no_gradient():
    result = window_grad(lambda w, x: LossTerms(x.sum(), x.numel()))(torch.ones(2), [torch.ones(3)])
    assert result.loss == 1
    assert_same(result.grads, torch.zeros(2))


@pytest.mark.parametrize("params", [{}, [], {"a": {}}])
def test_no_params_no_gradient(params):
    """Also when something closed over requires grad."""
    scale = torch.tensor(2.0, requires_grad=True)
    result = window_grad(lambda _, x: LossTerms((scale * x).sum(), x.numel()))(
        params, [torch.ones(3)]
    )
    assert result.loss == 2
    assert result.grads == params
    assert scale.grad is None


@pytest.mark.parametrize(
    ("name", "plan"),
    [("token_mean", "after"), ("own_dens", "before"), ("dspine", "columns"), ("dice", "replay")],
)
def test_compiled_loss_function(name, plan):
    """A micro-step is what one compiles; the window around it is Python."""
    case, params, rows = BY_NAME[name], random_params(), random_rows(NUM_ROWS)
    compiled = dataclasses.replace(case, loss_fn=torch.compile(case.loss_fn, backend="aot_eager"))
    # A graph that is gone through once for each column must not give its buffers away.
    with torch._functorch.config.patch(donated_buffer=plan != "columns"):
        result = grad_of(compiled, plan)(params, cut(rows, [5, 4]))
    assert_close((result.loss, result.grads), whole_batch(case, params, rows))


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_grad_mode_of_the_caller_does_not_matter(context):
    params, window = random_params(), cut(random_rows(NUM_ROWS), [5])
    expected = window_grad(mean_terms)(params, window)
    with context():
        assert_same(window_grad(mean_terms)(params, window), expected)
        assert torch.is_grad_enabled() == (context is torch.enable_grad)


def test_nested_params_of_any_shape():
    """A scalar, an empty tensor, a view that is not contiguous, one tensor in two places."""
    shared = torch.tensor([1.0, 2.0])
    params = {"s": torch.tensor(3.0), "none": torch.zeros(0), "t": torch.ones(2, 3).T}
    params["twice"] = (shared, [shared])

    def loss_fn(p, x):
        twice = p["twice"][0].sum() + 2 * p["twice"][1][0].sum()
        return LossTerms(x * (p["s"] + p["none"].sum() + (p["t"] * 4).sum() + twice), 1)

    grads = window_grad(loss_fn)(params, [torch.tensor(2.0), torch.tensor(6.0)]).grads
    expected = {"s": torch.tensor(4.0), "none": torch.zeros(0), "t": torch.full((3, 2), 16.0)}
    expected["twice"] = (torch.full((2,), 4.0), [torch.full((2,), 8.0)])
    assert_same(grads, expected)


# --- modules -------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight, a frozen one, a buffer, and a gain."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("offset", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return self.gain * self.frozen(self.second(torch.tanh(self.first(x)))) + self.offset


def module_terms(module, rows):
    return LossTerms((rows["mask"] * module(rows["x"]).pow(2).sum(1)).sum(), rows["mask"].sum())


@pytest.mark.parametrize("plan", ["after", "columns", "replay", "before"])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_module_gives_a_dict_by_name_and_gets_its_grads_back(plan, dtype):
    module, rows = Tied(), random_rows(NUM_ROWS)
    own = module.gain.grad = torch.tensor(7.0, dtype=torch.float64)
    den_fn = (lambda rows: rows["mask"].sum()) if plan == "before" else None
    step = window_grad(module_terms, plan=plan, den_fn=den_fn, accumulate_dtype=dtype)
    grads = step(module, cut(rows, [5, 2])).grads

    assert module.gain.grad is own
    assert own == 7
    assert module.first.weight.grad is None
    assert not any(p.grad is not None for p in module.frozen.parameters())
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    loss = (module(rows["x"]).pow(2).sum(1))[rows["mask"] > 0].mean()
    expected = dict(
        zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True)
    )
    assert set(grads) == {"first.weight", "gain"}
    if dtype is None:
        assert_close(grads, expected)
    else:
        # One rounding of each micro-step's gradient to float32, and of each sum.
        assert all(grad.dtype == dtype for grad in grads.values())
        torch.testing.assert_close(
            grads, {n: g.to(dtype) for n, g in expected.items()}, rtol=1e-6, atol=1e-7
        )


# --- accumulate_dtype ----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["after", "before", "columns", "replay"])
def test_accumulate_dtype_is_the_dtype_of_the_gradients(plan):
    params = {"w": torch.ones(3).bfloat16(), "b": torch.ones(()).double()}
    loss_fn = lambda p, x: LossTerms((p["w"] * x).float().sum() + p["b"].float(), 1)
    den_fn = (lambda x: 1) if plan == "before" else None
    step = window_grad(loss_fn, plan=plan, den_fn=den_fn, accumulate_dtype=torch.float32)
    window = [torch.ones(3).bfloat16()] * 4  # 1/4 is exact in bfloat16, through which it passes
    grads = step(params, window).grads
    assert_same(grads, {"w": torch.ones(3), "b": torch.ones(())})
    own = window_grad(loss_fn, plan=plan, den_fn=den_fn)(params, window)
    assert_same(own.grads, {"w": torch.ones(3).bfloat16(), "b": torch.ones(()).double()})


class Multiplications(TorchDispatchMode):
    """Records what bfloat16 tensors are multiplied with in place."""

    def __init__(self):
        super().__init__()
        self.factors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul_.Tensor and args[0].dtype == torch.bfloat16:
            self.factors.append(args[1])
        return func(*args, **(kwargs or {}))


def test_factor_is_not_rounded_to_a_half_dtype():
    """1/3 in bf16 is 0.2 % off, and with it would be each gradient.

    A CPU multiplies with a 0-dim factor as it is. An accelerator first rounds it to the dtype of
    the gradient, so that the factor has to have dims.
    """
    w, x = torch.ones(1).bfloat16(), torch.full((1,), 3.0).bfloat16()
    with Multiplications() as seen:
        grads = window_grad(lambda w, x: LossTerms((w * x).float().sum(), 3))(w, [x]).grads
    assert grads == 1
    assert [(factor.dtype, factor.dim()) for factor in seen.factors] == [(torch.float32, 1)]


# --- float16 -------------------------------------------------------------------------------------

ROWS_FLOAT16 = 65_536


def float16_terms(w, x):
    return LossTerms((x @ w).float().sum(), x.shape[0])


@pytest.mark.parametrize("plan", ["after", "columns"])
@pytest.mark.parametrize(
    "sizes", [[ROWS_FLOAT16], [0, ROWS_FLOAT16], [1, ROWS_FLOAT16 - 1], [2000] * 33]
)
def test_raw_sums_of_float16_gradients_do_not_overflow(plan, sizes):
    x = torch.tensor([1.0, 2.0, -0.5]).half().repeat(ROWS_FLOAT16, 1)
    raw = torch.autograd.grad((x @ (w := torch.ones(3).half().requires_grad_())).float().sum(), w)
    assert torch.isinf(raw[0]).any()  # what the test is about

    window = [x[:size] for size in sizes]
    grads = window_grad(float16_terms, plan=plan)(torch.ones(3).half(), window).grads
    # Each micro-step's gradient, and the sum after it, is rounded to float16 by 2^-11.
    torch.testing.assert_close(
        grads, torch.tensor([1.0, 2.0, -0.5]).half(), rtol=2.0**-11 * 2 * len(sizes), atol=0
    )


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_prescale_of_float16_is_exact(sizes):
    """Powers of two undo without a trace: float16 gradients are those of float32, where exact."""
    x = torch.tensor([1.0, 2.0, -0.5, 0.75])
    window = [x.repeat(size, 1) for size in sizes]
    step = window_grad(lambda w, x: LossTerms((x @ w).float().sum(), 2 * x.shape[0]))
    grads = step(torch.ones(4).half(), [each.half() for each in window]).grads
    assert_same(grads.float(), x / 2)


# --- fold and scan -------------------------------------------------------------------------------


@given(cut=cuts, seed=seeds)
def test_fold_of_a_cut_is_fold_of_the_whole(cut, seed):
    params, rows = dyadic_params(seed), dyadic_rows(seed)
    whole = fold(mean_terms)(params, [rows])
    assert_same(fold(mean_terms)(params, micro_batches(rows, cut)), whole)


def test_fold_is_differentiable():
    params = {name: leaf.requires_grad_() for name, leaf in random_params().items()}
    rows = random_rows(NUM_ROWS)
    loss = term_mean()(fold(mean_terms)(params, cut(rows, [5])))
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    assert_close(grads, whole_batch(BY_NAME["token_mean"], params, rows)[1])


def test_fold_of_no_batch_is_an_error():
    with pytest.raises(EmptyWindowError, match=r"fold: the window has no batch"):
        fold(mean_terms)({}, [])


def test_fold_of_other_terms_is_an_error():
    with pytest.raises(TermStructureError, match=r"add: the two trees must have one structure"):
        fold(lambda _, x: x)(None, [LossTerms(1.0, 2), LossTerms({"ce": 1.0}, 2)])


def running_total(total, x):
    return total + x["a"], {"before": total, "x": x["a"]}


def test_scan_is_the_loop_it_stands_for():
    xs = {"a": torch.tensor([1.0, 2.0, 4.0])}
    last, ys = scan(running_total, torch.tensor(0.0), xs)
    assert last == 7
    assert_same(ys, {"before": torch.tensor([0.0, 1.0, 3.0]), "x": xs["a"]})
    ragged = [{"a": torch.ones(2)}, {"a": torch.ones(5)}]
    total, lengths = scan(lambda c, x: (c + x["a"].sum(), len(x["a"])), torch.tensor(0.0), ragged)
    assert total == 7
    assert_same(lengths, torch.tensor([2, 5]))


def test_scan_without_xs_or_ys_or_steps():
    assert scan(lambda c, x: (c + 1, None), 0, length=3) == (3, None)
    assert scan(lambda c, x: (c + 1, c), 5, []) == (5, None)


def test_scan_composes_with_grad():
    grad = torch.func.grad(lambda w: scan(lambda c, x: (c * w + x, c), w * 0, torch.ones(3))[0])
    assert grad(torch.tensor(2.0)) == 1 + 2 * 2.0  # w² + w + 1


@pytest.mark.parametrize(
    ("xs", "length", "message"),
    [
        (None, None, r"scan: give xs or length"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, None, r"first dimension, got \[2, 3\]"),
        (torch.ones(2), 3, r"scan: length must be that of xs, got length=3 for 2"),
    ],
)
def test_scan_refuses(xs, length, message):
    with pytest.raises(ValueError, match=message):
        scan(running_total, torch.tensor(0.0), xs, length)
