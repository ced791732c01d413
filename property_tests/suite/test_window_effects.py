"""What a window does beside its result: nothing; and what it costs in reads and in memory."""

import copy
import dataclasses
import random
import weakref

import pytest
import torch
from torch import nn
from window_cases import (
    CASE_PLANS,
    assert_close,
    assert_same,
    cut,
    dspine,
    dspine_terms,
    ids,
    mean_terms,
    random_params,
    random_rows,
)

from numden.property_tests.counters import count_host_syncs
from numden.pure import (
    LossTerms,
    accumulator,
    first_pass,
    tree,
    window_grad,
    window_value,
)
from numden.pure.objective import directions

ROWS = random_rows(12)
SIZES = [5, 0, 3]
WINDOW = cut(ROWS, SIZES)
case_plans = pytest.mark.parametrize(
    ("case", "plan"), CASE_PLANS, ids=[ids(pair) for pair in CASE_PLANS]
)
some = [pair for pair in CASE_PLANS if pair[0].name in ("token_mean", "own_dens", "dspine", "dice")]
some_plans = pytest.mark.parametrize(("case", "plan"), some, ids=[ids(pair) for pair in some])
dtypes = pytest.mark.parametrize("dtype", [None, torch.float32])


def grad_of(case, plan, **options):
    den_fn = case.den_fn if plan == "before" else None
    return window_grad(case.loss_fn, case.objective, plan=plan, den_fn=den_fn, **options)


def known_of(case, plan, params, window):
    if plan == "before":
        return tree.map(lambda *dens: sum(dens), *[case.den_fn(rows) for rows in window])
    return first_pass(case.loss_fn)(params, window) if plan == "replay" else None


# --- purity --------------------------------------------------------------------------------------


class Watched:
    """Copies of values, and the tensors themselves, to see whether anything was written."""

    def __init__(self, **trees):
        self.trees = trees
        self.copies = self.values()
        self.generators = (torch.get_rng_state(), random.getstate())

    def values(self):
        leaves = {name: tree.leaves(each) for name, each in self.trees.items()}
        return {
            name: [(x.detach().clone(), x._version, x.requires_grad, x.grad) for x in each]
            for name, each in leaves.items()
        }

    def assert_unchanged(self):
        for name, now in self.values().items():
            for (value, version, flag, grad), old in zip(now, self.copies[name], strict=True):
                assert torch.equal(value, old[0]), name
                assert (version, flag) == old[1:3], name
                assert grad is old[3], name
        assert torch.equal(torch.get_rng_state(), self.generators[0])
        assert random.getstate() == self.generators[1]


@some_plans
@dtypes
def test_params_batches_and_generators_are_unchanged(case, plan, dtype):
    params = random_params()  # one that requires grad, and one that does not
    params["w"].requires_grad_().grad = torch.ones(3, dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    scale.grad = torch.tensor(5.0, dtype=torch.float64)
    window = copy.deepcopy(WINDOW)
    window[0]["x"].requires_grad_()  # a batch may come from a graph
    watched = Watched(params=params, window=window, closed_over=scale)
    grads = [params["w"].grad.clone(), scale.grad.clone()]

    def loss_fn(params, rows):
        terms = case.loss_fn(params, rows)
        return LossTerms(tree.map(lambda num: num * scale, terms.num), terms.den)

    den_fn = case.den_fn if plan == "before" else None
    step = window_grad(loss_fn, case.objective, plan=plan, den_fn=den_fn, accumulate_dtype=dtype)
    step(params, window)
    window_value(loss_fn, case.objective)(params, window)
    watched.assert_unchanged()
    assert_same([params["w"].grad, scale.grad], grads)


@some_plans
def test_graph_that_params_come_from_is_not_followed(case, plan):
    base = random_params()["w"].requires_grad_()
    params = {**random_params(), "w": base * 2}
    result = grad_of(case, plan)(params, WINDOW)
    detached = {name: leaf.detach() for name, leaf in params.items()}
    assert_same(result, grad_of(case, plan)(detached, WINDOW))
    assert base.grad is None
    (params["w"] ** 2).sum().backward()  # and is still there


@pytest.mark.parametrize("plan", ["after", "columns", "replay"])
@dtypes
def test_module_is_unchanged(plan, dtype):
    """Parameters, buffers, training mode, hooks; ``.grad`` fields are the same tensors."""
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double().eval()
    module.register_buffer("steps", torch.tensor(3))
    module[0].weight.requires_grad_(False)
    module[2].weight.grad = torch.full((1, 4), 2.0, dtype=torch.float64)
    watched = Watched(
        params=list(module.parameters()), buffers=list(module.buffers()), window=WINDOW
    )
    loss_fn = lambda m, rows: LossTerms(m(rows["x"]).pow(2).sum(), rows["x"].shape[0])
    grads = window_grad(loss_fn, plan=plan, accumulate_dtype=dtype)(module, WINDOW).grads
    watched.assert_unchanged()
    assert torch.equal(module[2].weight.grad, torch.full((1, 4), 2.0).double())
    assert "0.weight" not in grads
    assert all(not (p._post_accumulate_grad_hooks or ()) for p in module.parameters())


def memory(values):
    return {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(values) if leaf.numel()}


@some_plans
def test_results_share_no_memory_with_anything(case, plan):
    params = random_params()
    step = grad_of(case, plan)
    first, second = step(params, WINDOW), step(params, WINDOW)
    assert len(memory(first)) == len(tree.leaves(first))
    for other in (second, params, WINDOW):
        assert not memory(first) & memory(other)


@some_plans
def test_results_of_a_window_outlive_the_next(case, plan):
    """What was accumulated in place is nobody else's; writing into a result changes no other."""
    params, step = random_params(), grad_of(case, plan)
    first = step(params, WINDOW)
    kept = tree.map(torch.clone, first)
    second = step(params, WINDOW[::-1])
    assert_same(first, kept)
    for leaf in tree.leaves(second):
        leaf.fill_(torch.nan)
    assert_same(first, kept)
    assert_same(step(params, WINDOW), kept)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("plan", ["after", "columns", "replay", "auto"])
def test_sums_that_are_the_batch_itself_are_not_written_to(plan, num_steps):
    """A loss function may hand through tensors of the batch, which has counted them already."""
    window = [
        {"num": torch.tensor(3.0).double(), "den": torch.tensor(2.0).double()}
        for _ in range(num_steps)
    ]
    loss_fn = lambda w, b: (
        LossTerms({"a": w * b["num"], "b": b["num"]}, b["den"]),
        {"count": LossTerms(b["num"], b["den"])},
    )
    watched = Watched(window=window)
    result = window_grad(loss_fn, plan=plan)(torch.tensor(1.0), window)
    value = window_value(loss_fn)(torch.tensor(1.0), window)
    watched.assert_unchanged()
    for each in (result, value):
        assert not memory(each) & memory(window)
        assert each.terms.den == 2 * num_steps


# --- reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "plan", "dtype"),
    [(*pair, torch.float64) for pair in CASE_PLANS] + [(*pair, torch.float16) for pair in some],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_no_value_is_read_until_the_end(case, plan, dtype):
    """On the meta device there is no value to read, and no tensor of the CPU may slip in."""
    params, window = (
        tree.map(lambda x: x.to("meta", dtype if x.is_floating_point() else None), each)
        for each in (random_params(), WINDOW)
    )

    def loss_fn(params, rows):
        terms = case.loss_fn(params, rows)
        return tree.map(lambda x: x.double() if isinstance(x, torch.Tensor) else x, terms)

    wide = dataclasses.replace(case, loss_fn=loss_fn)
    init, update, finish = accumulator(
        loss_fn, case.objective, plan=plan, on_empty="skip", donate=True
    )
    known = known_of(wide, plan, params, window)
    carry = init(params, known)
    for place, rows in enumerate(window, 1):
        carry = update(carry, params, rows, last=place == len(window))
    result = finish(carry)
    assert {leaf.device.type for leaf in tree.leaves((result, carry._replace(known=None)))} == {
        "meta"
    }
    assert result.valid.device.type == "meta"
    read = accumulator(loss_fn, case.objective, plan=plan).finish
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        read(carry)  # so that the test would have seen a read


@case_plans
def test_term_groups_are_found_without_the_totals_themselves(case, plan):
    like = tree.map(
        lambda x: torch.as_tensor(x, device="meta"), case.loss_fn(random_params(), ROWS)
    )
    found = directions(case.objective, like)
    assert {leaf.device.type for leaf in tree.leaves(found)} == {"cpu"}


def reads(call):
    with count_host_syncs() as calls:
        call()
    return calls.total()


@some_plans
def test_one_read_at_the_end_of_a_window(case, plan):
    """``replay`` has one more: whether it repeats is known before gradients are reduced."""
    params = random_params()
    for on_empty, expected in (("raise", 1), ("zero", 1), ("skip", 0)):
        _, update, finish = steps = accumulator(
            case.loss_fn, case.objective, plan=plan, on_empty=on_empty
        )
        carry = steps.init(params, known_of(case, plan, params, WINDOW))
        carry = update(carry, params, WINDOW[0])  # reads made-up totals, which live on the CPU
        with count_host_syncs() as calls:
            for place, rows in enumerate(WINDOW[1:], 2):
                carry = update(carry, params, rows, last=place == len(WINDOW))
        assert calls.total() == 0, calls.places
        with count_host_syncs() as calls:
            finish(carry)
        assert calls.total() == expected * (2 if plan == "replay" else 1), calls.places


@some_plans
def test_reads_of_a_window_do_not_grow_with_its_micro_steps(case, plan):
    params, step = random_params(), grad_of(case, plan)
    assert reads(lambda: step(params, WINDOW)) == reads(lambda: step(params, WINDOW * 3))


@pytest.mark.parametrize(("on_empty", "expected"), [("raise", 1), ("zero", 1), ("skip", 0)])
def test_reads_of_window_value(on_empty, expected):
    evaluate = window_value(mean_terms, on_empty=on_empty)
    assert reads(lambda: evaluate(random_params(), WINDOW)) == expected


# --- memory --------------------------------------------------------------------------------------


class Token:
    """Something that lives as long as the graph that holds it."""


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens):
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("plan", ["after", "before", "columns", "replay", "auto"])
@pytest.mark.parametrize("loss", ["mean", "two groups", "replayed"])
def test_graph_of_a_micro_step_is_gone_before_the_next(plan, loss):
    tokens, alive = [], []

    def loss_fn(params, rows):
        alive.append(sum(token() is not None for token in tokens))
        w = Held.apply(params["w"], tokens)
        terms = dspine_terms({**params, "w": w}, rows)
        if loss == "mean":
            return LossTerms(terms.num["ce"], terms.den)
        if loss == "replayed":
            return LossTerms({**terms.num, "more": terms.num["l1"] * 2}, terms.den)
        return terms

    objective = {
        "mean": lambda t: t.num / t.den,
        "two groups": dspine,
        "replayed": lambda t: dspine(t) + (t.num["more"] / t.den) ** 2,
    }[loss]
    if (plan == "before" and loss != "mean") or (plan == "after" and loss != "mean"):
        return
    den_fn = (lambda rows: rows["mask"].sum()) if plan == "before" else None
    window_grad(loss_fn, objective, plan=plan, den_fn=den_fn)(random_params(), iter(WINDOW))
    assert len(alive) >= len(WINDOW)
    assert set(alive) == {0}
    assert not any(token() for token in tokens)


NUM_LAYERS, WIDTH = 12, 20_000
BYTES = NUM_LAYERS * WIDTH * 4  # of the params


def peak(call):
    """The most bytes that tensors made by ``call`` held at once."""
    call()
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def layers_terms(params, x):
    return LossTerms(torch.stack([(w * w * x).sum() for w in params]).sum(), x.numel())


def by_hand(params, window):
    """The loop that everyone writes, with the dens known."""
    leaves = [w.detach().requires_grad_() for w in params]
    total = sum(x.numel() for x in window)
    for x in window:
        (layers_terms(leaves, x).num / total).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("plan", ["after", "before", "replay", "auto"])
def test_one_set_of_gradients_as_in_a_loop_by_hand(plan):
    params = [torch.ones(WIDTH) for _ in range(NUM_LAYERS)]
    window = [torch.ones(WIDTH) for _ in range(3)]
    den_fn = (lambda x: x.numel()) if plan == "before" else None
    step = window_grad(layers_terms, plan=plan, den_fn=den_fn)
    assert_close(step(params, window).grads, by_hand(params, window))
    floor = peak(lambda: by_hand(params, window))
    assert floor > BYTES
    # The same gradients and the same graph; a few scalars beside them.
    assert peak(lambda: step(params, window)) < floor + 2 * WIDTH * 4


def test_columns_hold_a_set_of_gradients_for_each_group():
    params = [torch.ones(WIDTH) for _ in range(NUM_LAYERS)]
    window = [torch.ones(WIDTH) for _ in range(3)]
    floor = peak(lambda: by_hand(params, window))

    def loss_fn(params, x):
        num = layers_terms(params, x).num
        return LossTerms({"a": num, "b": num * 2}, {"a": x.numel(), "b": 2 * x.numel()})

    two = peak(lambda: window_grad(loss_fn, plan="columns")(params, window))
    assert floor + BYTES / 2 < two < floor + BYTES + 3 * WIDTH * 4


@pytest.mark.parametrize("plan", ["after", "replay"])
def test_float32_accumulators_without_a_set_of_bfloat16_gradients(plan):
    """Each gradient is added and dropped as soon as the backward pass has it."""
    params = [torch.ones(WIDTH).bfloat16() for _ in range(NUM_LAYERS)]
    window = [torch.ones(WIDTH).bfloat16() for _ in range(3)]
    loss_fn = lambda params, x: LossTerms(
        torch.stack([(w.detach() * w).float().sum() for w in params]).sum(), x.numel()
    )
    step = window_grad(loss_fn, plan=plan, accumulate_dtype=torch.float32)
    own = window_grad(loss_fn, plan=plan)
    extra = peak(lambda: step(params, window)) - peak(lambda: own(params, window))
    assert extra < BYTES / 2 + 3 * WIDTH * 4  # float32 for bfloat16, and one layer in flight
