import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode

from numden.pure import optim, random, tree
from numden.pure.optim import Optimizer, chain, clip_by_global_norm, from_torch, global_norm

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD-decay": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def params_of(seed, dtype=torch.float32):
    one, two, three = random.split(random.key(seed), 3)
    return {
        "layers": [
            {"w": random.normal(one, (3, 2), dtype=dtype)},
            {"b": random.normal(two, (2,), dtype=dtype)},
        ],
        "scale": random.normal(three, dtype=dtype),
    }


def grads_of(seed, num, dtype=torch.float32):
    return [params_of(1000 * seed + step + 1, dtype) for step in range(num)]


def run(optimizer, params, grads, **options):
    state = optimizer.init(params)
    for each in grads:
        params, state = optimizer.update(each, state, params, **options)
    return params, state


def plain_loop(name, params, grads):
    """torch's own loop, with parameters and ``.grad``."""
    make, options = OPTIMIZERS[name]
    leaves, structure = tree.flatten(params)
    parameters = [torch.nn.Parameter(leaf.clone()) for leaf in leaves]
    stepper = make(parameters, **options)
    for each in grads:
        for parameter, gradient in zip(parameters, tree.leaves(each), strict=True):
            parameter.grad = gradient.clone()
        stepper.step()
    final = tree.unflatten(structure, [p.detach() for p in parameters])
    return final, [stepper.state[p] for p in parameters]


def assert_equal(a, b):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        same = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        assert same, f"{name}: {x} is not {y}"


@each_optimizer
@pytest.mark.parametrize("donate", [False, True])
def test_equivalent_update_torch_loop(name, donate):
    make, options = OPTIMIZERS[name]
    num = 4
    params, grads = params_of(1), grads_of(1, num)
    expected, expected_states = plain_loop(name, params, grads)
    new, state = run(from_torch(make, **options), params, grads, donate=donate)
    assert_equal(new, expected)
    assert state["count"] == num
    own = tree.structure(params).flatten_up_to(state["leaves"])
    assert_equal([dict(each) for each in own], [dict(each) for each in expected_states])


@each_optimizer
def test_state_structure_is_constant(name):
    make, options = OPTIMIZERS[name]
    optimizer = from_torch(make, **options)
    first = optimizer.init(params_of(0))
    last = run(optimizer, params_of(0), grads_of(0, 2))[1]
    assert tree.structure(first) == tree.structure(last)
    for a, b in zip(tree.leaves(first["leaves"]), tree.leaves(last["leaves"]), strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


@each_optimizer
@pytest.mark.parametrize("valid", [None, torch.tensor(True)])
def test_pure(name, valid):
    make, options = OPTIMIZERS[name]
    optimizer = from_torch(make, **options)
    params, state = run(optimizer, params_of(0), grads_of(0, 2))
    grads = params_of(9)
    params["layers"][0]["w"].requires_grad_().grad = torch.ones(3, 2)
    before, rng = copy.deepcopy((grads, state, params)), torch.get_rng_state()
    new = optimizer.update(grads, state, params, valid=valid)
    assert_equal((grads, state, params), before)
    assert torch.equal(params["layers"][0]["w"].grad, torch.ones(3, 2))
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(leaf.requires_grad for leaf in tree.leaves(new[0]))
    # Nothing is kept between calls: the same again.
    assert_equal(optimizer.update(grads, state, params), new)


@each_optimizer
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("flags", [[True, False, True], [False, True]])
def test_an_invalid_window_changes_nothing(name, donate, flags):
    make, options = OPTIMIZERS[name]
    seed = 2
    optimizer = from_torch(make, **options)
    grads = grads_of(seed, len(flags))
    expected = run(optimizer, params_of(seed), [g for g, f in zip(grads, flags, strict=True) if f])
    params = params_of(seed)
    state = optimizer.init(params)
    for each, flag in zip(grads, flags, strict=True):
        if not flag:
            each = tree.map(lambda leaf: leaf * torch.nan, each)
        params, state = optimizer.update(
            each, state, params, valid=torch.tensor(flag), donate=donate
        )
    assert_equal(params, expected[0])
    assert_equal(state["leaves"], expected[1]["leaves"])
    assert state["count"] == len(flags)


@pytest.mark.parametrize("valid", [None, torch.tensor(True), torch.tensor(False)])
def test_donated_tensors_hold_the_new_values(valid):
    optimizer = from_torch(torch.optim.AdamW)
    params = params_of(3)
    state = optimizer.init(params)
    addresses = [leaf.data_ptr() for leaf in tree.leaves((params, state["leaves"]))]
    new, new_state = optimizer.update(params_of(4), state, params, valid=valid, donate=True)
    assert [leaf.data_ptr() for leaf in tree.leaves((new, new_state["leaves"]))] == addresses
    assert_equal(new, params)
    assert torch.equal(new["scale"], params_of(3)["scale"]) == (valid is not None and not valid)


def test_donated_gradients_are_not_changed():
    grads = params_of(4)
    run(
        from_torch(torch.optim.SGD, maximize=True, weight_decay=0.1),
        params_of(3),
        [grads],
        donate=True,
    )
    assert_equal(grads, params_of(4))


class CountSyncs(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func in (torch.ops.aten._local_scalar_dense.default,)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("valid", [None, torch.tensor(True)])
def test_no_host_sync(valid):
    # torch's Adam reads its step count unless fused or capturable: here nothing may be read.
    optimizer = chain(clip_by_global_norm(1.0), from_torch(torch.optim.AdamW, fused=True))
    params = params_of(0)
    state = optimizer.init(params)
    with CountSyncs() as syncs:
        optimizer.update(params_of(1), state, params, valid=valid)
    assert syncs.num == 0


@each_optimizer
def test_state_survives_a_checkpoint(name, tmp_path):
    make, options = OPTIMIZERS[name]
    optimizer = from_torch(make, **options)
    grads = grads_of(5, 4)
    params, state = run(optimizer, params_of(5), grads[:2])
    torch.save((params, state), tmp_path / "state.pt")
    params, state = torch.load(tmp_path / "state.pt", weights_only=True)
    for each in grads[2:]:
        params, state = optimizer.update(each, state, params)
    assert_equal((params, state), run(optimizer, params_of(5), grads))


def test_gradients_of_another_dtype_are_rounded():
    optimizer = from_torch(torch.optim.AdamW)
    params, grads = params_of(0, torch.bfloat16), params_of(1, torch.float32)
    rounded = tree.map(lambda leaf: leaf.bfloat16(), grads)
    new = run(optimizer, params, [grads])
    assert new[0]["scale"].dtype == torch.bfloat16
    assert_equal(new, run(optimizer, params, [rounded]))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_schedule_is_a_function_of_the_count(eighths):
    # Dyadic rates and gradients of one: the sums are exact.
    optimizer = from_torch(torch.optim.SGD, lr=lambda count: eighths[count] / 8)
    params, _ = run(optimizer, torch.zeros(2), [torch.ones(2)] * len(eighths))
    assert torch.equal(params, torch.full((2,), -sum(eighths) / 8))


def test_equivalent_schedule_torch_scheduler():
    def scheduler(stepper):
        return torch.optim.lr_scheduler.OneCycleLR(stepper, 0.5, 6, cycle_momentum=False)

    rates = optim.schedule_from_torch(scheduler, lr=0.1, num_steps=6)
    parameter = torch.nn.Parameter(torch.zeros(2))
    stepper = torch.optim.AdamW([parameter], lr=0.1)
    stepping = scheduler(stepper)
    for _ in range(6):
        parameter.grad = torch.ones(2)
        stepper.step()
        stepping.step()
    new = run(from_torch(torch.optim.AdamW, lr=rates), torch.zeros(2), [torch.ones(2)] * 6)[0]
    assert torch.equal(new, parameter.detach())
    assert rates(100) == rates(5)


def test_closed_form_of_adamw():
    # optax's adamw too: after one step the moments' ratio is the sign, whatever the size.
    params, grads = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, -3.0]).double()
    new, _ = run(from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.01, eps=0.0), params, [grads])
    expected = params * (1 - 0.1 * 0.01) - 0.1 * grads.sign()
    torch.testing.assert_close(new, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["SGD-decay", "AdamW"])
def test_differentiable_inside_torch_func(name):
    make, options = OPTIMIZERS[name]
    optimizer = from_torch(make, **options, differentiable=True)

    def after_two_steps(start):
        params, state = start, optimizer.init(start)
        for _ in range(2):
            params, state = optimizer.update(params**3, state, params)
        return params.sum()

    start = torch.tensor([0.75, -1.25]).double()
    step = torch.tensor([1e-6, 0.0]).double()
    slope = (after_two_steps(start + step) - after_two_steps(start - step)) / 2e-6
    # Central difference in float64: truncation of 1e-12 times the third derivative, rounding 1e-10.
    torch.testing.assert_close(grad(after_two_steps)(start)[0], slope, rtol=1e-7, atol=1e-7)


def test_refused_inside_torch_func():
    optimizer = from_torch(torch.optim.AdamW)
    state = optimizer.init(torch.zeros(2))
    with pytest.raises(TypeError, match=r"inside torch.func .* differentiable=True"):
        grad(lambda p: optimizer.update(p, state, p)[0].sum())(torch.ones(2))


dyadic_trees = st.lists(
    st.lists(st.integers(-64, 64), min_size=1, max_size=4), min_size=1, max_size=3
).map(lambda rows: [torch.tensor(row).double() / 8 for row in rows])


@given(dyadic_trees, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_global_norm_is_that_of_one_vector(leaves, dtype):
    leaves = [leaf.to(dtype) for leaf in leaves]
    whole = torch.cat(leaves).double()
    norm = global_norm({"a": leaves[0], "rest": leaves[1:]})
    assert norm.dtype == torch.float64
    # A row's norm is rounded once in float32 (6e-8).
    torch.testing.assert_close(norm, whole.square().sum().sqrt(), rtol=2e-7, atol=0)


def test_global_norm_of_millions_keeps_its_digits():
    leaf = torch.full((1000, 1000), 0.1)
    exact = leaf[0, 0].double() * 1000
    torch.testing.assert_close(global_norm([leaf]), exact, rtol=1e-6, atol=0)


def test_global_norm_of_nothing():
    assert global_norm({}) == 0


@given(dyadic_trees, st.integers(1, 64))
def test_equivalent_clip_torch(leaves, eighths):
    parameters = [torch.nn.Parameter(leaf.clone()) for leaf in leaves]
    for parameter, leaf in zip(parameters, leaves, strict=True):
        parameter.grad = leaf.clone()
    torch.nn.utils.clip_grad_norm_(parameters, eighths / 8)
    clipped = clip_by_global_norm(eighths / 8)(leaves)
    for parameter, leaf in zip(parameters, clipped, strict=True):
        # torch takes the norm of norms: float64 rounding in another order.
        torch.testing.assert_close(leaf, parameter.grad, rtol=1e-14, atol=0)


def test_clip_below_the_norm_is_the_identity():
    grads = params_of(0, torch.bfloat16)
    clipped = clip_by_global_norm(1e6)(grads)
    assert_equal(clipped, grads)
    assert {leaf.dtype for leaf in tree.leaves(clipped)} == {torch.bfloat16}


@given(dyadic_trees, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_clip_in_place_equals_clip(leaves, dtype):
    leaves = [leaf.to(dtype) for leaf in leaves]
    expected, before = clip_by_global_norm(1.0)(leaves), tree.map(torch.clone, leaves)
    own = tree.map(torch.clone, leaves)
    clipped = clip_by_global_norm(1.0, donate=True)(own)
    assert_equal(clipped, expected)
    assert_equal(leaves, before)
    assert all(a is b for a, b in zip(clipped, own, strict=True))


def test_clip_adds_the_squares_of_all_ranks():
    shards = [torch.tensor([3.0]), torch.tensor([4.0])]
    total = optim.sum_of_squares(shards)
    clipped = [clip_by_global_norm(1.0, sum_squares=lambda _: total)([shard]) for shard in shards]
    assert_equal([leaf for (leaf,) in clipped], clip_by_global_norm(1.0)(shards))


def test_chain_applies_from_left_to_right():
    double, increment = (
        lambda g: tree.map(lambda x: 2 * x, g),
        lambda g: tree.map(lambda x: x + 1, g),
    )
    sgd = from_torch(torch.optim.SGD, lr=1.0)
    new = run(chain(double, increment, sgd), torch.zeros(1), [torch.ones(1)])[0]
    assert torch.equal(new, torch.tensor([-3.0]))
    nested = run(chain(double, chain(increment, sgd)), torch.zeros(1), [torch.ones(1)])[0]
    assert torch.equal(nested, new)
    assert_equal(
        run(chain(sgd), torch.zeros(1), [torch.ones(1)]), run(sgd, torch.zeros(1), [torch.ones(1)])
    )


def test_bad_values():
    sgd = from_torch(torch.optim.SGD)
    with pytest.raises(ValueError, match=r"max_norm must be positive, got max_norm=0"):
        clip_by_global_norm(0)
    for wrong in [(), (sgd, sgd), (clip_by_global_norm(1.0),)]:
        with pytest.raises(TypeError, match=r"chain: takes transforms and then one Optimizer, got"):
            chain(*wrong)
    with pytest.raises(TypeError, match=r"from_torch: .* which LBFGS cannot"):
        from_torch(torch.optim.LBFGS).init(torch.zeros(2))
    with pytest.raises(ValueError, match=r"SGD dampens .* got dampening=0.5"):
        from_torch(torch.optim.SGD, momentum=0.9, dampening=0.5).init(torch.zeros(2))
    params = {"a": torch.zeros(2), "b": torch.zeros(3)}
    state = sgd.init(params)
    with pytest.raises(ValueError, match=r"grads must have the structure of params"):
        sgd.update({"a": torch.zeros(2)}, state, params)
    with pytest.raises(ValueError, match=r"got grads\['b'\] of shape \(2,\) for \(3,\)"):
        sgd.update({"a": torch.zeros(2), "b": torch.zeros(2)}, state, params)


def test_valid_that_the_state_cannot_see():
    adam = from_torch(torch.optim.AdamW)
    params = torch.zeros(2)
    state = adam.init(params)
    with pytest.raises(ValueError, match=r"got valid on meta and state on the CPU. .* fused=True"):
        adam.update(params, state, params, valid=torch.tensor(True, device="meta"))


def test_optimizer_is_two_functions():
    init, update = from_torch(torch.optim.SGD)
    assert Optimizer(init, update).init is init
