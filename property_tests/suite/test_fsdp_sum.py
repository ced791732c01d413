"""Modules that reduce their own gradients: SUM on each part, and windows over odd sets of ranks."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as c10d
from dist_cases import (
    CASES,
    DEALS,
    WINDOW,
    apart,
    fully_sharded,
    mean_loss,
    net,
    on_tree,
    plain,
    reference,
    said,
    whole_params,
    wrapped,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from numden import dist, pure
from numden.dist import run_local
from numden.pure import LossTerms

ROUNDING = 1e-13
SETTERS = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")


# --- sum_gradients -------------------------------------------------------------------------------


def test_sum_gradients_sets_both_on_each_sub_module(two_ranks, monkeypatch):
    module, calls = fully_sharded(net()), []
    for name in SETTERS:
        monkeypatch.setattr(
            FSDPModule, name, lambda self, value, name=name: calls.append((self, name, value))
        )
    assert dist.sum_gradients(module) is module
    expected = [(each, name) for each in (module, module[0], module[2]) for name in SETTERS]
    assert sorted((id(each), name) for each, name, _ in calls) == sorted(
        (id(each), name) for each, name in expected
    )
    assert {(name, value) for _, name, value in calls} == set(
        zip(SETTERS, (1.0, True), strict=True)
    )


@pytest.mark.parametrize("name", SETTERS)
def test_sum_gradients_without_a_setter(two_ranks, monkeypatch, name):
    module = fully_sharded(net())
    monkeypatch.delattr(FSDPModule, name)
    with pytest.raises(RuntimeError, match=rf"sum_gradients: torch .* has no FSDPModule\.{name}"):
        dist.sum_gradients(module)
    with pytest.raises(RuntimeError, match=rf"sum_gradients: torch .* has no FSDPModule\.{name}"):
        dist.window_grad(mean_loss)(module, WINDOW)


def test_sum_gradients_refuses_plain_modules():
    message = (
        r"sum_gradients: needs an FSDP2 or DDP module, got Sequential\. Wrap it by fully_shard"
    )
    with pytest.raises(TypeError, match=message):
        dist.sum_gradients(net())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_sum_gradients_makes_backward_a_sum(kind):
    def on_rank():
        module, _ = wrapped(kind)
        dist.sum_gradients(dist.sum_gradients(module))  # safe to call again
        mean_loss(module, WINDOW[3 * c10d.get_rank()])[0].num.backward()
        return plain({name: param.grad for name, param in module.named_parameters()})

    model = net()
    for batch in (WINDOW[0], WINDOW[3]):
        mean_loss(model, batch)[0].num.backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    for grads in run_local(on_rank, 2):
        assert apart(grads, expected) < ROUNDING


# --- windows -------------------------------------------------------------------------------------


def backward_of(module, windows):
    """A backward pass outside of windows, as other people's loops make it."""
    mean_loss(module, windows[c10d.get_rank()][0])[0].num.backward()
    grads = plain({name: param.grad for name, param in module.named_parameters()})
    module.zero_grad()
    return grads


def test_fsdp_module_reduces_again_after_a_window():
    """A window tells a module not to reduce; afterwards, however it ended, it does again."""
    windows = [WINDOW[:3], WINDOW[4:]]

    def stopped(model, batch):
        raise KeyboardInterrupt

    def nan_loss(model, batch):
        terms, _ = mean_loss(model, batch)
        return LossTerms(terms.num * float("nan"), terms.den)

    def on_rank():
        (module, _), window = wrapped("fsdp"), windows[c10d.get_rank()]
        dist.sum_gradients(module)
        found = [backward_of(module, windows)]
        for loss in (mean_loss, nan_loss, stopped):
            with contextlib.suppress(pure.NonFiniteLossError, KeyboardInterrupt):
                dist.window_grad(loss)(module, window)
            found.append(backward_of(module, windows))
        return found

    for first, *others in run_local(on_rank, 2):
        for grads in others:
            assert all(torch.equal(grads[name], first[name]) for name in first)


def test_equivalent_equal_steps():
    def on_rank():
        (module, _), found = wrapped("fsdp"), []
        for plan in ("after", "columns", "replay"):
            grad = dist.window_grad(mean_loss, plan=plan, equal_steps=True)
            result = grad(module, iter(DEALS["even"][c10d.get_rank()]))
            found.append(apart(plain(result.grads), reference(CASES["mean"])[1]))
        return found

    assert max(map(max, run_local(on_rank, 2))) < ROUNDING


@pytest.mark.parametrize("kind", ["tree", "ddp", "fsdp", "shard"])
@pytest.mark.parametrize("by_mesh", [True, False])
def test_equivalent_some_of_the_ranks_whole_batch(kind, by_mesh):
    """Ranks 0 and 2 of three have the batch; rank 1 has a world of its own."""
    windows = {0: WINDOW[:3], 1: WINDOW[4:5], 2: WINDOW[3:]}

    def raises_on_two(predict, batch):
        return 1 / 0 if c10d.get_rank() == 2 else mean_loss(predict, batch)

    def on_rank():
        rank = c10d.get_rank()
        groups = [c10d.new_group([0, 2]), c10d.new_group([1])]
        mesh = DeviceMesh.from_group(groups[rank % 2], "cpu")
        over = {"mesh": mesh} if by_mesh else {"group": groups[rank % 2]}
        params, on = wrapped(kind, mesh)
        result = dist.window_grad(on(mean_loss), **over)(params, windows[rank])
        value = dist.window_value(on(mean_loss), **over)(params, windows[rank])
        assert float(value.loss - result.loss) == 0
        error = ""
        if kind != "fsdp":
            bad = dist.window_grad(on(raises_on_two), **over)
            error = said(lambda: bad(params, windows[rank]))
        return apart(plain(result.grads), reference(CASES["mean"])[1]), error

    first, alone, last = run_local(on_rank, 3, timeout=30)
    assert max(first[0], last[0]) < ROUNDING < alone[0]
    assert first[1] == last[1]
    if kind != "fsdp":  # named by the rank among all
        assert "ZeroDivisionError: division by zero (rank 2)" in first[1]
        assert alone[1] == "nothing was raised"


# --- refused -------------------------------------------------------------------------------------


def test_fsdp_needs_a_sharded_root():
    def on_rank():
        module = net()
        fully_shard(module[0])
        message = said(lambda: dist.window_grad(mean_loss)(module, WINDOW))
        assert message == said(lambda: dist.window_value(mean_loss)(module, WINDOW))
        return message

    for message in run_local(on_rank, 2):
        assert message.startswith("TypeError: window: a module with FSDP2 modules in it must be")
        assert message.endswith("Call fully_shard on the whole module after its blocks.")


@pytest.mark.parametrize("kind", ["fsdp", "shard"])
def test_gradients_summed_over_other_ranks_than_the_loss(kind):
    """A sub-mesh of the ranks, or all ranks while the window is on some: a wrong gradient."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        (some, on), (every, _) = wrapped(kind, mesh["shards"]), wrapped(kind)
        on_all = dist.window_grad(on(mean_loss))
        on_some = dist.window_grad(on(mean_loss), mesh=mesh["shards"])
        return [said(lambda: on_all(some, WINDOW)), said(lambda: on_some(every, WINDOW))]

    what = {"fsdp": "an FSDP2 module", "shard": "params from shard"}[kind]
    first, *_ = run_local(on_rank, 4)
    assert first[0].startswith(
        f"ValueError: window_grad: {what} must be on the ranks of the window, got ranks [0, 1] "
        "for a window over [0, 1, 2, 3]: the gradient of "
    )
    assert "got ranks [0, 1, 2, 3] for a window over [0, 1]: " in first[1]


def test_fsdp_options_that_would_be_wrong(two_ranks):
    module = fully_sharded(net())
    with pytest.raises(ValueError, match=r"window_grad: FSDP2 accumulates.*dtype=torch\.float32"):
        dist.window_grad(mean_loss, accumulate_dtype=torch.float32)(module, WINDOW)
    half = fully_sharded(net().half())
    for plan in ("after", "columns", "auto"):
        with pytest.raises(pure.PlanError, match=r"float16 gradients, which overflow. Use plan='b"):
            dist.window_grad(mean_loss, plan=plan)(half, WINDOW)


def test_transforms_are_refused(two_ranks):
    """torch.func over an FSDP2 module gives local gradients without a word."""
    module, params = fully_sharded(net()), whole_params()
    shards = dist.shard(params, init_device_mesh("cpu", (2,)))

    def loss_of(window_fn, params, x):
        return window_fn(params, [WINDOW[0] | {"x": x}]).loss

    x = WINDOW[0]["x"]
    over_ranks = r"window: over ranks it cannot run inside a torch\.func transform"
    for window_fn in (dist.window_grad(mean_loss), dist.window_value(mean_loss)):
        with pytest.raises(TypeError, match=over_ranks):
            torch.func.grad(partial(loss_of, window_fn, module))(x)
    for window_fn in (pure.window_grad(mean_loss), pure.window_value(mean_loss)):
        with pytest.raises(TypeError, match=r"FSDP2|DTensor"):
            torch.func.grad(partial(loss_of, window_fn, module))(x)
    on = on_tree(mean_loss)
    for window_fn in (pure.window_grad(on), pure.window_value(on)):
        with pytest.raises(TypeError, match="is a DTensor, whose gradient under torch"):
            torch.func.grad(lambda p, fn=window_fn: loss_of(fn, p, x))(shards)
