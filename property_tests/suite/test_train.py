"""Training is the same on one rank and on two, says how it goes, and survives what goes wrong."""

import sys
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from train_cases import loss_fn, params, sharded, windows_of

from numden import dist, pure
from numden.dist import Record, fit, init_state, run_local, sum_of_squares, train_step
from numden.models import as_module, as_params
from numden.property_tests.counters import count_collectives
from numden.pure import EmptyWindowError, LossTerms, NonFiniteLossError, optim, tree
from numden.pure._status import OnEmpty

SGD = optim.from_torch(torch.optim.SGD, lr=0.5)
MOMENTUM = optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.5)


def scaled(weights, batch):
    """``Σ w x / n``: of powers of two, so that all sums and quotients are exact."""
    return LossTerms((weights["w"] * batch["tokens"]).sum(), batch["tokens"].numel())


def batch(*tokens):
    return {"tokens": torch.tensor(tokens, dtype=torch.float64)}


def weights():
    return {"w": torch.tensor(2.0, dtype=torch.float64)}


def stepper(fun=scaled, optimizer=SGD, *, on_empty: OnEmpty = "raise", **options):
    return train_step(pure.window_grad(fun, on_empty=on_empty), optimizer, **options)


def copies(state):
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)


def assert_same(state, expected):
    assert tree.structure(state) == tree.structure(expected)
    for leaf, want in zip(tree.leaves(state), tree.leaves(expected), strict=True):
        assert torch.equal(torch.as_tensor(leaf), torch.as_tensor(want))


# --- one step ------------------------------------------------------------------------------------


def test_a_step_is_the_gradient_then_the_optimizer():
    state, result = stepper()(init_state(weights(), SGD), [batch(1.0, 3.0), batch(4.0, 8.0)])
    assert result.loss == 2.0 * 16 / 4
    assert state.params["w"] == 2.0 - 0.5 * 16 / 4
    assert (state.step, state.opt_state["count"], state.carry) == (1, 1, None)


def test_a_step_leaves_the_old_state_unless_it_is_donated():
    first = init_state(weights(), MOMENTUM)
    before = copies(first)
    second, _ = stepper(optimizer=MOMENTUM)(first, [batch(8.0)])
    assert_same(first, before)
    donated, _ = stepper(optimizer=MOMENTUM, donate=True)(first, [batch(8.0)])
    assert_same(donated, second)
    assert donated.params["w"].data_ptr() == first.params["w"].data_ptr()
    assert first.params["w"] == second.params["w"] == -2.0


def test_a_module_is_updated_in_place_and_stays_the_state():
    module = as_module(lambda params: params, weights())
    state, _ = stepper()(init_state(module, SGD), [batch(8.0)])
    assert state.params is module
    assert module["w"] == -2.0


def test_a_frozen_parameter_is_not_the_optimizers():
    module = as_module(lambda params: params, params())
    module["embed"].requires_grad_(False)
    before = module["embed"].clone()
    state = init_state(module, MOMENTUM)
    assert "embed" not in state.opt_state["leaves"]
    stepper(loss_fn, MOMENTUM)(state, windows_of()[0])
    assert torch.equal(module["embed"], before)
    assert not torch.equal(module["head"], params()["head"])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("kind", ["tree", "module"])
@pytest.mark.parametrize(
    ("window", "error"),
    [([batch(1.0), batch(torch.nan)], NonFiniteLossError), ([batch()], EmptyWindowError)],
)
def test_nothing_has_changed_when_the_gradient_raises(kind, donate, window, error):
    whole = weights() if kind == "tree" else as_module(lambda params: params, weights())
    step = stepper(optimizer=MOMENTUM, donate=donate)
    state, _ = step(init_state(whole, MOMENTUM), [batch(1.0)])  # with a momentum to lose
    before = copies((as_params(state.params) if kind == "module" else state.params, state[1:]))
    with pytest.raises(error):
        step(state, window)
    assert_same((as_params(state.params) if kind == "module" else state.params, state[1:]), before)


@pytest.mark.parametrize("kind", ["tree", "module"])
def test_an_invalid_window_is_skipped_but_counted(kind):
    whole = weights() if kind == "tree" else as_module(lambda params: params, weights())
    step = stepper(optimizer=MOMENTUM, on_empty="skip", skip_invalid=True)
    state, result = step(init_state(whole, MOMENTUM), [batch(4.0)])
    assert result.valid
    momentum = copies(state.opt_state["leaves"])
    value = state.params["w"].detach().clone()
    state, result = step(state, [batch(), batch()])
    assert not result.valid
    assert torch.equal(state.params["w"], value)
    assert_same(state.opt_state["leaves"], momentum)
    assert state.step == 2
    state, _ = step(state, [batch(4.0)])
    assert state.params["w"] == value - 0.5 * (4.0 + 0.5 * 4.0)


def test_without_skip_invalid_momentum_goes_on():
    step = stepper(optimizer=MOMENTUM, on_empty="zero")
    state, _ = step(init_state(weights(), MOMENTUM), [batch(4.0)])
    state, _ = step(state, [batch()])
    assert state.params["w"] == 2.0 - 0.5 * 4.0 - 0.5 * (0.5 * 4.0)


# --- the loop ------------------------------------------------------------------------------------


def run_fit(windows, step=None, **options):
    step = step or stepper()
    return fit(step, init_state(weights(), SGD), windows, progress=False, **options)


@pytest.mark.parametrize(
    ("num_windows", "log_every", "steps"),
    [
        (None, 2, [2, 4, 5]),
        (None, 5, [5]),
        (None, 9, [5]),
        (None, 1, [1, 2, 3, 4, 5]),
        (3, 2, [2, 3]),
        (4, 2, [2, 4]),
        (9, 2, [2, 4, 5]),
        (0, 2, []),
    ],
)
def test_records_come_every_so_often_and_of_the_last_window(num_windows, log_every, steps):
    heard = []
    state, records = run_fit(
        (window for window in [[batch(1.0)]] * 5),
        num_windows=num_windows,
        log_every=log_every,
        on_record=heard.append,
    )
    assert [record.step for record in records] == steps
    assert heard == records
    assert state.step == min(5, 5 if num_windows is None else num_windows)


def test_a_window_more_is_never_asked_for():
    asked = []

    def stream():
        for i in range(9):
            asked.append(i)
            yield [batch(1.0)]

    seen = []
    step = stepper()

    def watched(state, window):
        seen.append(list(asked))
        return step(state, window)

    run_fit(stream(), watched, num_windows=3)
    assert asked == [0, 1, 2]
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_training_goes_on_from_a_state():
    windows = [[batch(float(i + 1))] for i in range(5)]
    whole, records = run_fit(windows, log_every=2)
    half, first = run_fit(windows[:3], log_every=2)
    again, second = fit(stepper(), half, windows[3:], log_every=2, progress=False)
    assert_same(again, whole)
    assert [r.step for r in first + second] == [2, 3, 4, 5]
    assert [r.loss for r in second] == [r.loss for r in records if r.step > 3]


def test_a_record_has_the_windows_own_figures(monkeypatch):
    clock = iter([100.0, 102.0, 150.0, 154.0, 200.0])
    monkeypatch.setattr("numden.dist.train.time.perf_counter", lambda: next(clock))

    def with_metrics(weights, batch):
        ratio = LossTerms(batch["tokens"].sum(), 4.0)
        vector = LossTerms(batch["tokens"], torch.ones_like(batch["tokens"]))
        metrics = {"scalar": ratio, "vector": vector, "tree": LossTerms({"a": ratio.num}, 1.0)}
        return scaled(weights, batch), metrics

    windows = [[batch(3.0, 1.0), batch(4.0, 8.0)], [batch(0.0, 2.0)], [batch(2.0, 6.0)]]
    _, records = run_fit(windows, stepper(with_metrics), log_every=2, on_record=lambda record: None)
    # The second window starts from w = 2 - 0.5 * 4 = 0, the third from -0.5.
    assert records[0] == Record(2, 0.0, 1.0, 6 / 2.0, {"scalar": 0.5})
    assert records[1] == Record(3, -2.0, 4.0, 2 / 4.0, {"scalar": 2.0})


def test_batches_without_tokens_have_no_tokens_per_second():
    on_tensors = lambda weights, x: LossTerms((weights["w"] * x).sum(), x.numel())
    _, (record,) = run_fit([[torch.ones(2)]], stepper(on_tensors))
    assert record.tokens_per_second == 0


def test_gradients_do_not_live_through_the_next_window():
    step, grads = stepper(), []

    def watched(state, window):
        assert [each() for each in grads] == [None] * len(grads)
        state, result = step(state, window)
        grads.append(weakref.ref(result.grads["w"]))
        return state, result

    run_fit([[batch(1.0)]] * 3, watched, log_every=2)
    assert len(grads) == 3


def test_progress_says_what_the_last_record_says_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fit(
        stepper(),
        init_state(weights(), SGD),
        [[batch(0.125)]] * 150,
        log_every=100,
        num_windows=150,
        label="DSpark, 2 ranks",
    )
    (said,) = capsys.readouterr().out.strip().split("\n")
    assert said.startswith("DSpark, 2 ranks ━━━━")
    # Each window takes 0.5 / 8 off a weight of 2; the loss is an eighth of the weight before.
    assert " 150/150 eta 0:00:0" in said
    assert f" loss {(2 - 149 / 16) / 8:.3f} norm 0.12 " in said
    assert said.endswith(" tok/s/rank")


def test_no_progress_says_nothing_and_needs_no_rich(capsys, monkeypatch):
    run_fit([[batch(8.0)]])
    monkeypatch.setattr("numden.dist.train.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "rich", None)
    fit(stepper(), init_state(weights(), SGD), [[batch(8.0)]])
    assert capsys.readouterr() == ("", "")


# --- ranks ---------------------------------------------------------------------------------------

ADAM = partial(optim.from_torch, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def clipped(sum_squares):
    # About the norm of the second gradient: some windows are clipped and some are not.
    return optim.chain(optim.clip_by_global_norm(CLIP, sum_squares=sum_squares), ADAM())


CLIP = 2.5


def trained(grad, evaluate, whole, windows, optimizer):
    """Two rounds of windows, each but the first after an evaluation, as between checkpoints."""
    state, records, values = init_state(whole, optimizer), [], []
    step = train_step(grad, optimizer)
    for window in windows * 2:
        state, said = fit(step, state, [window], log_every=1, progress=False)
        values.append(float(evaluate(state.params, windows[0]).loss))
        records += said
    return state, records, values


def trained_on_rank(kind):
    whole = {"fsdp": sharded, "tree": lambda params: params}[kind](params())
    state, records, values = trained(
        dist.window_grad(loss_fn),
        dist.window_value(loss_fn),
        whole,
        windows_of(c10d.get_rank(), c10d.get_world_size()),
        clipped(sum_of_squares),
    )
    final = as_params(state.params) if kind == "fsdp" else state.params
    return dist.gather(final), records, values


@pytest.fixture(scope="module")
def alone():
    state, records, values = trained(
        pure.window_grad(loss_fn),
        pure.window_value(loss_fn),
        params(),
        windows_of(),
        clipped(optim.sum_of_squares),
    )
    return state.params, records, values


def test_the_windows_reach_what_ranks_may_get_wrong(alone):
    norms = [record.grad_norm for record in alone[1]]
    assert min(norms) < CLIP < max(norms)
    assert [len(window) for window in windows_of(1, 2)] == [1, 1, 1, 0]
    assert len(set(alone[2])) == len(alone[2])


@pytest.mark.parametrize("kind", ["fsdp", "tree"])
def test_equivalent_two_ranks_one(alone, kind):
    whole, records, values = alone
    for got, got_records, got_values in run_local(trained_on_rank, 2, kind):
        # Gradients differ by 1e-16 or so. Adam divides by their size plus 1e-8: what it moves a
        # parameter by, at most 1e-2, is off by 1e-2 * 1e-16 / 1e-8 where a gradient is tiny.
        for name, leaf, want in zip(
            tree.names(whole), tree.leaves(got), tree.leaves(whole), strict=True
        ):
            assert torch.allclose(leaf, want, rtol=0, atol=1e-9), name
        assert torch.allclose(torch.tensor(got_values), torch.tensor(values), rtol=0, atol=1e-9)
        for record, want in zip(got_records, records, strict=True):
            assert record.step == want.step
            assert abs(record.loss - want.loss) < 1e-9
            assert abs(record.grad_norm - want.grad_norm) < 1e-9
            assert record.metrics.keys() == want.metrics.keys() == {"nats_per_row"}
            assert all(abs(record.metrics[k] - want.metrics[k]) < 1e-9 for k in want.metrics)


def values_between_windows():
    module = sharded(params())
    window = windows_of(c10d.get_rank(), 2)[0]
    grad, value = dist.window_grad(loss_fn), dist.window_value(loss_fn)
    fresh = grad(module, window)
    seen = [value(module, window).loss, value(module, window).loss]
    after = grad(module, window)
    assert torch.equal(seen[0], seen[1])
    return float(fresh.loss - seen[0]), {
        name: bool(torch.equal(after.grads[name].to_local(), fresh.grads[name].to_local()))
        for name in fresh.grads
    }


def test_an_evaluation_leaves_the_next_window_as_it_was():
    for difference, same in run_local(values_between_windows, 2):
        assert abs(difference) < 1e-12
        assert len(same) == len(tree.leaves(params()))
        assert all(same.values()), same


def faults_on_rank():
    """A window that one rank cannot compute: no rank has changed, and the next window is good."""
    whole = params()
    optimizer = clipped(sum_of_squares)

    def read(params, batch):
        if batch is None:
            raise OSError("no data")
        return loss_fn(params, batch)

    step = train_step(dist.window_grad(read), optimizer, donate=True)
    window = windows_of(c10d.get_rank(), 2)[0]
    state, _ = step(init_state(whole, optimizer), window)
    before = copies(state)
    with pytest.raises(dist.RankError, match=r"OSError: no data \(rank 1\)"):
        step(state, [*window, None] if c10d.get_rank() else window)
    assert_same(state, before)
    after, _ = step(state, window)
    return float(after.params["norm"].sum()), float(before.params["norm"].sum())


def test_no_rank_has_changed_when_one_raises():
    (first, before), second = run_local(faults_on_rank, 2)
    assert (first, before) == second
    assert first != before


def bars_on_rank():
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        step = train_step(dist.window_grad(scaled), SGD)
        fit(step, init_state(weights(), SGD), [[batch(8.0)]], label="bar")
    return "bar" in out.getvalue()


def test_only_the_first_rank_shows_a_bar():
    assert run_local(bars_on_rank, 2) == [True, False]


# --- the norm ------------------------------------------------------------------------------------


def dyadic(*shape):
    """Multiples of 1/8 whose squares add up exactly."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64) % 7 - 2).reshape(shape) / 8


LEAVES = {
    "uneven shards": (dyadic(5, 3), [Replicate(), Shard(0)]),
    "shards of columns": (dyadic(4, 3), [Replicate(), Shard(1)]),
    "a rank without a row": (dyadic(1), [Replicate(), Shard(0)]),
    "shards along both dims": (dyadic(6, 5), [Shard(0), Shard(1)]),
    "shards of shards": (dyadic(7), [Shard(0), Shard(0)]),
    "replicas": (dyadic(3), [Replicate(), Replicate()]),
    "a scalar": (dyadic(), [Replicate(), Replicate()]),
    "plain": (dyadic(2, 2), None),
}


def norms_on_rank():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    leaves = {
        name: leaf if places is None else distribute_tensor(leaf, mesh, places)
        for name, (leaf, places) in LEAVES.items()
    }
    whole = dyadic(8, 2)
    mine = whole[c10d.get_rank() :: 4]  # however a strided shard cuts, each element is on one rank
    strided = DTensor.from_local(
        mine, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False
    )
    found = {name: float(sum_of_squares([leaf])) for name, leaf in leaves.items()}
    found["strided"] = float(sum_of_squares([strided]))
    with count_collectives() as calls:
        together = float(sum_of_squares(list(leaves.values())))
    partial_sum = DTensor.from_local(whole, mesh, [Replicate(), Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"sum_of_squares: gradients must be reduced, got .*P"):
        sum_of_squares([partial_sum])
    return found, together, calls.total()


def test_each_element_counts_once_in_the_norm():
    expected = {name: float(leaf.square().sum()) for name, (leaf, _) in LEAVES.items()}
    total = sum(expected.values())
    expected["strided"] = float(dyadic(8, 2).square().sum())
    for found, together, num_collectives in run_local(norms_on_rank, 4):
        assert found == pytest.approx(expected, rel=1e-14)  # the norm of a row is rounded
        assert together == pytest.approx(total, rel=1e-14)
        assert num_collectives == 3  # over the shards, and over both dims one after the other


def test_the_norm_of_nothing_is_zero():
    assert sum_of_squares([]) == 0
