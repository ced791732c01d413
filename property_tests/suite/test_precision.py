"""How exact sums are: counts, gradients in low precision, and errors against the micro-steps.

Let u be the unit roundoff of a dtype: 2^-8 for bfloat16, 2^-24 for float32, 2^-53 for float64.
Adding n numbers one after the other is off by at most (n - 1) u times the sum of their magnitudes,
whatever n [1]. By plan "after" a gradient has n such additions less one, a factor 1/D that is
rounded to the dtype, and a product: it is off by at most (n + 1) u times the mean magnitude.

[1] Rump, "Error estimation of floating-point summation and dot product", BIT 52 (2012).
"""

import math

import pytest
import torch
import torch.distributed as c10d
from dist_cases import fully_sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from numden import dist
from numden.dist import TrainState, run_local
from numden.pure import LossTerms, TermStructureError, window_grad

PLANS = ("after", "before", "columns", "replay")
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


few = settings(max_examples=max(4, settings.default.max_examples // 4))


def plan_options(plan):
    return {"plan": plan, "den_fn": (lambda batch: batch["count"]) if plan == "before" else None}


# --- counts --------------------------------------------------------------------------------------

COUNTS = {
    "int64": (torch.int64, st.integers(0, 2**44)),
    "int32": (torch.int32, st.integers(0, 2**31 - 1)),
    "float64": (torch.float64, st.integers(0, 2**44)),
    "float32": (torch.float32, st.integers(0, 2**24).map(lambda n: n << 20)),
    "numbers of Python": (None, st.integers(0, 2**44)),
}
"""Counts of micro-steps. What a dtype cannot hold is lost before numden has seen it."""


def of_dtype(count, dtype):
    return count if dtype is None else torch.tensor(count, dtype=dtype)


def counted(w, batch):
    """A num that is as large as its den, and the count as a metric above and below the line."""
    count = batch["count"]
    metrics = {"count": LossTerms(count, 1), "rate": LossTerms(1, count)}
    return LossTerms(w * count, count), metrics


def assert_exact(result, counts):
    total = sum(counts)
    assert int(result.terms.den) == total
    assert int(result.terms.num) == total
    assert float(result.loss) == 1
    assert float(result.metrics["count"]) == total / len(counts)
    assert float(result.metrics["rate"]) == len(counts) / total


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", COUNTS)
@few
@given(data=st.data())
def test_counts_are_exact(kind, plan, data):
    """Micro-steps of up to 2^44 tokens, so that a window has far more than 2^31 of them."""
    dtype, each = COUNTS[kind]
    counts = [*data.draw(st.lists(each, max_size=5)), 2**31 - 2**7, 2**24]
    window = [{"count": of_dtype(count, dtype)} for count in counts]
    one = torch.ones((), dtype=torch.float64)
    assert_exact(window_grad(counted, **plan_options(plan))(one, window), counts)


LARGE = [[2**31 - 1, 2**24 + 1, 1], [2**31 - 1, 3]]
ALL = [*LARGE[0], *LARGE[1]]
"""Of two ranks, and together: 3 more than a float32, and too much for an int32."""


def test_counts_are_exact_over_ranks():
    def on_rank():
        counts, one = LARGE[c10d.get_rank()], torch.ones((), dtype=torch.float64)
        for dtype in (torch.int64, torch.int32, torch.float64):
            window = [{"count": of_dtype(count, dtype)} for count in counts]
            for plan in PLANS:
                result = dist.window_grad(counted, **plan_options(plan))(one, window)
                assert_exact(result, ALL)
            value = dist.window_value(counted)(one, window)
            assert_exact(value, ALL)
        return int(dist.psum(torch.tensor(2**53 + 1), c10d.group.WORLD))

    # Integers are summed as such: 2^53 + 1 is no float64.
    assert run_local(on_rank, 2, timeout=30) == [2**54 + 2] * 2


def test_counts_are_exact_in_a_carry_that_was_saved(tmp_path):
    one = {"w": torch.ones((), dtype=torch.float64)}

    def accumulator():
        return dist.accumulator(lambda params, batch: counted(params["w"], batch), plan="after")

    def counts():
        return [{"count": torch.tensor(count)} for count in LARGE[c10d.get_rank()]]

    def start():
        init, update, _ = accumulator()
        return dist.save(tmp_path, TrainState(one, {}, carry=update(init(one), one, counts()[0])))

    def go_on():
        _, update, finish = accumulator()
        carry = dist.load(tmp_path, TrainState(one, {}))[0].carry
        for batch in counts()[1:]:
            carry = update(carry, one, batch)
        assert_exact(finish(carry, one), ALL)
        return True

    run_local(start, 2, timeout=30)
    assert all(run_local(go_on, 2, timeout=30))


def test_counts_are_exact_to_2_to_the_53_and_no_further():
    one = torch.ones((), dtype=torch.float64)
    for counts, total in ([2**53 - 1, 1], 2**53), ([2**53, 1], 2**53):
        result = window_grad(counted, plan="after")(one, [{"count": n} for n in counts])
        assert int(result.terms.den) == total


def test_counts_that_wrapped_are_refused():
    """A sum in int32 that a loss function took itself; sums in half precision are, too."""
    tokens = torch.full((3,), 2**30, dtype=torch.int32)
    window = [{"count": 1}, {"count": tokens.sum(dtype=torch.int32)}]
    with pytest.raises(TermStructureError, match=r"window: den is negative in micro-step 1"):
        window_grad(counted, plan="after")(torch.ones(()), window)
    with pytest.raises(TermStructureError, match=r"den must be summed in float32 or wider, got"):
        window_grad(counted, plan="after")(torch.ones(()), [{"count": torch.ones(()).bfloat16()}])


# --- accumulators --------------------------------------------------------------------------------


def linear(w, batch):
    """Its gradient is the input, whatever the params: of its own it rounds nothing."""
    wide = torch.promote_types(batch["x"].dtype, torch.float32)
    # A module is called, a tensor is a factor.
    product = w(batch["x"]) if isinstance(w, nn.Module) else w * batch["x"]
    return LossTerms(product.to(wide).sum(), batch["count"])


def batch_of(x, count=1):
    return {"x": x, "count": torch.tensor(count)}


def eighths(num_steps, width=16, seed=0):
    """bfloat16 that needs 6 of its 8 bits: sums of thousands are exact in float32."""
    keys = torch.Generator().manual_seed(seed)
    return (torch.randint(1, 33, (num_steps, width), generator=keys) / 8).bfloat16()


@pytest.mark.parametrize("plan", PLANS)
def test_float32_accumulators_of_bfloat16_gradients_are_exact(plan):
    """Where the total den is a power of two, all there is to round is the gradients' sum."""
    xs = eighths(256)
    grad = window_grad(linear, accumulate_dtype=torch.float32, **plan_options(plan))
    found = grad(torch.ones(16).bfloat16(), [batch_of(x) for x in xs]).grads
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), xs.double().mean(0))
    narrow = window_grad(linear, **plan_options(plan))
    found = narrow(torch.ones(16).bfloat16(), [batch_of(x) for x in xs]).grads
    assert not torch.equal(found.double(), xs.double().mean(0).bfloat16().double())


@pytest.mark.parametrize("count", [3, 7, 1000])
@pytest.mark.parametrize("plan", PLANS)
def test_the_factor_does_not_pass_through_bfloat16(plan, count):
    """It is known before the backward pass by some plans, where bfloat16 would round it."""
    xs = eighths(5)
    grad = window_grad(linear, accumulate_dtype=torch.float32, **plan_options(plan))
    found = grad(torch.ones(16).bfloat16(), [batch_of(x, count) for x in xs]).grads
    exact = xs.double().sum(0) / (5 * count)
    # The sum is exact: what rounds is 1/D and a product.
    assert float(((found - exact) / exact).abs().max()) <= 2 * UNIT[torch.float32]


def test_accumulators_of_whole_numbers_are_refused():
    for dtype in (torch.int64, torch.bool):
        grad = window_grad(linear, plan="after", accumulate_dtype=dtype)
        with pytest.raises(TypeError, match=rf"accumulate_dtype must be one .*, got {dtype} for a"):
            grad(torch.ones(16), [batch_of(eighths(1)[0])])


def test_forward_error_is_what_is_left():
    """A loss that is computed in bfloat16 has an error that no accumulator removes.

    Of 2 (w x - y) x the product, the difference and the last product round: by at most
    u |w x|, u |r| and u |g|. The accumulation adds (n + 1) u of float32, which is nothing to it.
    """
    keys, num_steps = torch.Generator().manual_seed(1), 64
    w, xs, ys = (
        torch.rand(shape, generator=keys).bfloat16() + 0.5
        for shape in ((16,), (num_steps, 16), (num_steps, 16))
    )

    def loss(w, batch):
        return LossTerms((w * batch["x"] - batch["y"]).square().float().sum(), 1)

    def by_hand(x, y):
        leaf = w.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf, {"x": x, "y": y}).num, leaf)[0].double()

    window = [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]
    found = window_grad(loss, plan="after", accumulate_dtype=torch.float32)(w, window).grads
    addends = torch.stack([by_hand(x, y) for x, y in zip(xs, ys, strict=True)])
    own = (found - addends.mean(0)).abs()
    assert bool((own <= (num_steps + 1) * UNIT[torch.float32] * addends.abs().mean(0)).all())

    w, xs, ys = w.double(), xs.double(), ys.double()
    residuals = w * xs - ys
    exact, unit = 2 * residuals * xs, UNIT[torch.bfloat16]
    bound = 2 * xs * unit * ((w * xs).abs() + residuals.abs()) + unit * exact.abs()
    error = (found - exact.mean(0)).abs()
    # Products of roundings are some u of the bound.
    assert bool((error <= (1 + 4 * unit) * bound.mean(0)).all())
    assert error.max() > 1000 * own.max()


# --- over ranks ----------------------------------------------------------------------------------

DEAL = [eighths(3, seed=1), eighths(5, seed=2)]
"""Gradients of micro-steps of two ranks."""


class Scale(nn.Module):
    """``w * x`` as a module."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.ones(16, dtype=dtype))

    def forward(self, x):
        return self.w * x


def sharded(dtype, **policy):
    return fully_sharded(nn.Sequential(Scale(dtype)), mp_policy=MixedPrecisionPolicy(**policy))


def summed_over_ranks(make, count=1, **options):
    """The gradient over two ranks, whole and in its dtype."""

    def on_rank():
        window = [batch_of(x, count) for x in DEAL[c10d.get_rank()]]
        grads = dist.window_grad(linear, **options)(make(), window).grads
        grad = next(iter(grads.values())) if isinstance(grads, dict) else grads
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    first, second = run_local(on_rank, 2, timeout=30)
    assert torch.equal(first, second)
    return first


NARROW = {
    "tree": lambda: torch.ones(16).bfloat16(),
    "ddp": lambda: DistributedDataParallel(Scale(torch.bfloat16)),
    "shard": lambda: dist.shard(NARROW["tree"](), init_device_mesh("cpu", (2,))),
}


@pytest.mark.parametrize("kind", [*NARROW, "fsdp"])
def test_float32_sums_over_ranks_of_bfloat16_gradients_are_exact(kind):
    options = {"accumulate_dtype": torch.float32}
    make = NARROW.get(kind)
    if kind == "fsdp":
        policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        make, options = lambda: sharded(torch.float32, **policy), {}
    rows = torch.cat(DEAL).double()
    found = summed_over_ranks(make, **options)
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), rows.mean(0))  # of 8 micro-steps
    found = summed_over_ranks(make, count=7, **options)
    exact = rows.mean(0) / 7
    assert float(((found - exact) / exact).abs().max()) <= 2 * UNIT[torch.float32]


@pytest.mark.parametrize("kind", [*NARROW, "fsdp", "fsdp in float32 until it reduces"])
def test_bfloat16_sums_over_ranks_are_sums_to_rounding(kind):
    """No zeros and no mean, which a wrong divide factor makes of them in bfloat16."""
    make = NARROW.get(kind)
    if kind.startswith("fsdp"):
        dtype = torch.bfloat16 if kind == "fsdp" else torch.float32
        make = lambda: sharded(dtype, reduce_dtype=torch.bfloat16)
    exact = torch.cat(DEAL).double().mean(0)
    off = ((summed_over_ranks(make) - exact) / exact).abs()
    # Up to 4 additions on a rank, one over ranks, and a product; all addends are positive.
    assert float(off.max()) <= 6 * UNIT[torch.bfloat16] < 0.5


# --- against the number of micro-steps -----------------------------------------------------------

STEPS = (1, 2, 8, 64, 512)


def addends(num_steps, dtype, *, positive, width=32):
    keys = torch.Generator().manual_seed(num_steps)
    values = torch.randn(num_steps, width, generator=keys, dtype=torch.float64).to(dtype)
    return values.abs() if positive else values


def error(xs, accumulate_dtype=None):
    """The largest error of an element, relative to the mean magnitude of its addends."""
    w = torch.ones(xs.shape[1], dtype=xs.dtype)
    grad = window_grad(linear, plan="after", accumulate_dtype=accumulate_dtype)
    found = grad(w, [batch_of(x) for x in xs]).grads.double()
    exact = torch.tensor([math.fsum(column) for column in xs.T.tolist()], dtype=torch.float64)
    return float(((found * len(xs) - exact).abs() / xs.double().abs().sum(0)).max())


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("num_steps", STEPS)
def test_error_is_within_its_bound(num_steps, dtype, positive):
    found = error(addends(num_steps, dtype, positive=positive))
    # One u more: the reference was multiplied back by the number of micro-steps in float64.
    assert found <= (num_steps + 2) * UNIT[dtype]


@pytest.mark.parametrize("dtype", UNIT)
def test_error_grows_slower_than_its_bound(dtype):
    """Roundings of sums that stay small cancel: the square root of n rather than n."""
    found = [error(addends(n, dtype, positive=False)) for n in STEPS]
    assert max(off / (n**0.5 * UNIT[dtype]) for off, n in zip(found, STEPS, strict=True)) < 2


def test_bfloat16_accumulators_stand_still_and_float32_accumulators_do_not():
    """An addend below half a unit of the sum's last place is lost, with each micro-step."""
    xs = {n: addends(n, torch.bfloat16, positive=True) for n in STEPS}
    narrow = [error(xs[n]) for n in STEPS]
    assert narrow == sorted(narrow)
    assert narrow[-1] > 0.1
    wide = [error(xs[n], torch.float32) for n in STEPS]
    assert all(off <= (n + 1) * UNIT[torch.float32] for n, off in zip(STEPS, wide, strict=True))
