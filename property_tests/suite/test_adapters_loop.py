import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as c10d
from adapter_cases import (
    LONG,
    ONE_RANK,
    PARAMS,
    SHORT,
    TWO_RANKS,
    UNEVEN,
    Probe,
    assert_gradient,
    assert_updated,
    count,
    mean,
    mean_of_means,
    window,
)
from torch import nn

from numden.dist import sum_gradients, window_grad
from numden.property_tests import adapters
from numden.property_tests.adapters import (
    ReplicasDiffer,
    UnfitWorld,
    ddp,
    from_loop,
    fsdp2,
    on_ranks,
)
from numden.property_tests.step_checker.check import report_step
from numden.property_tests.worlds.problems import tokens
from numden.property_tests.worlds.world import StepResult, World


def sums_loop(module, window):
    """Right on one rank."""
    module.zero_grad()
    total = sum(count(batch) for batch in window)
    loss = 0.0
    for batch in window:
        part = module(**batch) / total
        part.backward()
        loss += part.detach() / 2.0  # per unit of w
    return loss


def means_loop(module, window):
    module.zero_grad()
    for batch in window:
        (module(**batch) / count(batch).clamp(min=1) / len(window)).backward()


def over_ranks(total):
    total = total.clone()
    c10d.all_reduce(total)
    return total


def ddp_loop(module, window):
    """Right on ranks that average."""
    module.zero_grad()
    total = over_ranks(sum(count(batch) for batch in window))
    for index, batch in enumerate(window):
        module.require_backward_grad_sync = index == len(window) - 1
        (module(**batch) * c10d.get_world_size() / total).backward()


@pytest.mark.parametrize("world", ONE_RANK.values(), ids=ONE_RANK)
def test_loop_gives_gradient_and_loss(world):
    result = from_loop(sums_loop, Probe(1))(PARAMS, world)
    assert_gradient(result, mean(world))
    torch.testing.assert_close(result.loss, mean(world))
    assert result.params is None


@pytest.mark.parametrize("world", ONE_RANK.values(), ids=ONE_RANK)
def test_wrong_loop_is_not_mended(world):
    assert_gradient(from_loop(means_loop, Probe(1))(PARAMS, world), mean_of_means(world))


def test_loop_is_checked_and_explained():
    loss_fn, params, batches, _ = tokens()
    check = partial(report_step, loss_fn=loss_fn, params=params, batches=batches, max_examples=20)
    assert check(from_loop(lambda m, w: sums_loop(m, w) and None, Probe())).exit_code == 0
    (broken,) = check(from_loop(means_loop, Probe())).broken
    assert broken.law == "gradient"
    assert broken.diagnoses[0].faults == ("mean of micro-step means",)


def test_stale_gradients_are_left_to_the_loop():
    def loop(module, window):
        for batch in window:
            module(**batch).backward()

    step, world = from_loop(loop, Probe(1)), World([window(SHORT)])
    assert [step(PARAMS, world).grads["w"].item() for _ in range(3)] == [8.0, 16.0, 24.0]


def test_stale_gradients_go_on_over_processes():
    def loop(module, window):
        for batch in window:
            module(**batch).backward()

    world = World([window(SHORT), window(SHORT)])
    for make in (ddp, fsdp2):
        step = make(loop, Probe(1))
        first, second = (step(PARAMS, world).grads["w"].item() for _ in range(2))
        assert (first, second) == (8.0, 16.0), make


def test_loop_sees_the_configured_accumulation():
    seen = []

    def loop(module, window):
        seen.append((len(window), window.accumulation, window.mesh, window.rank, window.rest))

    from_loop(loop, Probe(1))(PARAMS, ONE_RANK["partial"])
    from_loop(loop, Probe(1))(PARAMS, [window(SHORT)])
    assert seen == [(2, 4, {"dp": 1}, 0, ()), (1, 1, {"dp": 1}, 0, ())]


def test_a_window_without_backward_has_a_zero_gradient():
    result = from_loop(lambda module, window: None, Probe(1))(PARAMS, World([[]]))
    assert result == StepResult(grads={"w": torch.zeros(1)})


def test_what_a_loop_returns_goes_first():
    given = StepResult(grads={"w": torch.tensor(7.0)}, eval_loss=3.0)
    assert from_loop(lambda *_: given, Probe(1))(PARAMS, ONE_RANK["ragged"]) == given


# --- updates -------------------------------------------------------------------------------------


def training(make_optimizer, *, body=sums_loop, times=1):
    def loop(module, window):
        optimizer = make_optimizer(module.parameters())
        for _ in range(times):
            body(module, window)
            optimizer.step()

    return loop


SGD = partial(torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize("world", ONE_RANK.values(), ids=ONE_RANK)
def test_update_shows_gradient_and_params(world):
    step = from_loop(training(SGD), Probe(1), updates=True)
    assert_updated(step(PARAMS, world), mean(world))


def test_update_of_another_optimizer_shows_the_gradient_alone():
    result = from_loop(training(torch.optim.Adam), Probe(1), updates=True)(PARAMS, UNCLIPPED)
    assert_gradient(result, mean(UNCLIPPED))
    assert result.params is None


UNCLIPPED = ONE_RANK["ragged"]


def test_update_shows_what_clipping_left():
    def loop(module, window):
        sums_loop(module, window)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        SGD(module.parameters()).step()

    result = from_loop(loop, Probe(1), updates=True)(PARAMS, UNCLIPPED)
    torch.testing.assert_close(result.grads["w"].item(), 1.0, rtol=1e-5, atol=0)  # its 1e-6


def test_update_by_hand_shows_the_params_alone():
    def loop(module, window):
        sums_loop(module, window)
        with torch.no_grad():
            module.w -= module.w.grad

    result = from_loop(loop, Probe(1), updates=True)(PARAMS, UNCLIPPED)
    assert result.grads is None
    torch.testing.assert_close(result.params, {"w": 2 - mean(UNCLIPPED).reshape(1)})


def test_update_with_a_closure_shows_the_gradient_that_the_closure_makes():
    def loop(module, window):
        SGD(module.parameters()).step(lambda: sums_loop(module, window))

    assert_updated(from_loop(loop, Probe(1), updates=True)(PARAMS, UNCLIPPED), mean(UNCLIPPED))


def test_several_steps_show_the_params_alone():
    result = from_loop(training(SGD, times=3), Probe(1), updates=True)(PARAMS, UNCLIPPED)
    assert result.grads is None
    torch.testing.assert_close(result.params, {"w": 2 - 3 * mean(UNCLIPPED).reshape(1)})
    step = from_loop(training(torch.optim.Adam, times=3), Probe(1), updates=True)
    with pytest.raises(ValueError, match=r"one optimizer step in a window, .*got 3 steps"):
        step(PARAMS, UNCLIPPED)


def test_an_update_that_was_not_announced_is_refused():
    with pytest.raises(ValueError, match=r"got other values of \['w'\]. Say updates=True"):
        from_loop(training(SGD), Probe(1))(PARAMS, UNCLIPPED)


def test_two_optimizers_of_different_parameters_are_one_step():
    module = nn.Linear(1, 1).double()
    params = {name: param.detach().clone() for name, param in module.named_parameters()}

    def loop(module, window):
        module(window[0]).sum().backward()
        for param in module.parameters():
            SGD([param]).step()

    result = from_loop(loop, module, updates=True)(params, [[torch.tensor([[3.0]]).double()]])
    assert {name: grad.item() for name, grad in result.grads.items()} == {"weight": 3.0, "bias": 1}
    assert result.params is not None


# --- params --------------------------------------------------------------------------------------


def test_params_must_be_those_of_the_module():
    step = from_loop(sums_loop, Probe(1))
    for params, words in [
        ({"v": PARAMS["w"]}, r"none for \['w'\] and unknown \['v'\]"),
        ({"w": torch.ones(2).double()}, r"got torch.float64 \[2\] for 'w'"),
        ({"w": torch.ones(1)}, r"got torch.float32 \[1\] .*module.double\(\)"),
        (PARAMS["w"], "must be tensors by name, or a module, got Tensor"),
    ]:
        with pytest.raises(ValueError, match=words):
            step(params, UNCLIPPED)


def test_params_may_be_a_module_with_buffers():
    module = nn.BatchNorm1d(1)
    given = nn.BatchNorm1d(1)
    given.running_mean.fill_(5.0)
    result = from_loop(lambda module, window: module.running_mean.sum(), module)(given, [[]])
    assert result.loss == 5.0
    assert set(result.grads) == {"weight", "bias"}


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_has_its_own_params_back(fails):
    def loop(module, window):
        training(SGD)(module, window)
        if fails:
            raise KeyError

    module = Probe(1)
    own = {"w": torch.tensor([5.0]).double()}
    module.load_state_dict(own)
    with pytest.raises(KeyError) if fails else nullcontext():
        assert_updated(from_loop(loop, module, updates=True)(PARAMS, UNCLIPPED), mean(UNCLIPPED))
    assert module.w.item() == 5.0


def test_a_step_says_its_ranks_and_its_name():
    assert from_loop(sums_loop, Probe(1)).ranks == 1
    assert from_loop(sums_loop, Probe(1)).__name__ == "from_loop(sums_loop)"
    assert on_ranks(sums_loop, Probe(1), 2).ranks == 2
    assert not hasattr(on_ranks(sums_loop, Probe(1)), "ranks")
    with pytest.raises(UnfitWorld, match="runs on num_ranks=1, got windows for 2 ranks"):
        from_loop(sums_loop, Probe(1))(PARAMS, UNEVEN)
    with pytest.raises(UnfitWorld, match="runs on num_ranks=3, got windows for 2 ranks"):
        on_ranks(sums_loop, Probe(1), 3)(PARAMS, UNEVEN)


def test_adapters_are_served_by_name():
    assert adapters.__all__ == sorted(adapters.__all__, key=lambda n: (not n[0].isupper(), n))
    for name in adapters.__all__:
        assert getattr(adapters, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        adapters.nothing  # noqa: B018


# --- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [*TWO_RANKS.values(), UNEVEN], ids=[*TWO_RANKS, "uneven"])
def test_ddp_and_fsdp2_give_the_gradient(world):
    assert_gradient(ddp(ddp_loop, Probe(1), 2)(PARAMS, world), mean(world))
    if len(set(map(len, world))) == 1:
        assert_gradient(fsdp2(fsdp_loop, Probe(1), 2)(PARAMS, world), mean(world))


def fsdp_loop(module, window):
    module.zero_grad()
    sum_gradients(module)
    total = over_ranks(sum(count(batch) for batch in window))
    for batch in window:
        (module(**batch) / total).backward()


def test_ddp_of_means_is_not_mended():
    world = TWO_RANKS["ragged"]
    result = ddp(means_loop, Probe(1), 2)(PARAMS, world)
    assert_gradient(result, mean_of_means(world))


def test_ddp_update_shows_gradient_and_params():
    world = TWO_RANKS["ragged"]
    step = ddp(training(SGD, body=ddp_loop), Probe(1), updates=True)
    assert_updated(step(PARAMS, world), mean(world))


def test_fsdp2_update_shows_gradient_and_params():
    world = TWO_RANKS["ragged"]
    step = fsdp2(training(SGD, body=fsdp_loop), Probe(1), updates=True)
    assert_updated(step(PARAMS, world), mean(world))


def test_replicas_that_differ_are_an_error_that_shows_them():
    step = on_ranks(means_loop, Probe(1), 2)
    with pytest.raises(ReplicasDiffer, match="rank 1 must end with the gradients") as caught:
        step(PARAMS, World([window(SHORT), window(LONG)]))
    assert [result.grads["w"].item() for result in caught.value.results] == [8.0, 2.0]


@pytest.mark.parametrize("kind", ["tree", "module", "ddp", "fsdp2"])
def test_window_grad_is_a_loop(kind):
    def loss_fn(params, batch):
        from numden.pure import LossTerms

        w = params["w"].sum() if kind == "tree" else None
        num = (batch["losses"] * batch["mask"]).sum() * w if w is not None else params(**batch)
        return LossTerms(num, count(batch))

    make = {"tree": on_ranks, "module": on_ranks, "ddp": ddp, "fsdp2": fsdp2}[kind]
    step = make(window_grad(loss_fn), None if kind == "tree" else Probe(1))
    for world in [TWO_RANKS["ragged"], UNEVEN]:
        result = step(PARAMS, world)
        assert_gradient(result, mean(world))
        torch.testing.assert_close(result.loss, 2 * mean(world))


def test_ranks_that_see_the_same_data_are_not_averaged_over():
    batch = window(SHORT, LONG)
    world = World([batch, batch, *[window(LONG, [[1.0]])] * 2], mesh={"dp": 2, "tp": 2})

    def loop(module, window):
        module.zero_grad()
        total = over_ranks(sum(count(batch) for batch in window)) / 2  # twice along tp
        for batch in window:
            (module(**batch) * 2 / total).backward()

    assert_gradient(ddp(loop, Probe(1))(PARAMS, world), mean(world))


def test_wrap_gets_the_mesh():
    seen = World([window(SHORT)] * 4, mesh={"dp": 2, "cp": 2})

    def wrap(module, mesh):
        module.axes = mesh.mesh_dim_names, tuple(mesh.shape)
        return module

    def loop(module, window):
        assert module.axes == (("dp", "cp"), (2, 2))

    assert_gradient(on_ranks(loop, Probe(1), wrap=wrap)(PARAMS, seen), torch.tensor(0.0).double())


def test_a_rank_that_raises_or_hangs_is_an_error():
    def raises(module, window):
        raise KeyError("no such field")

    def hangs(module, window):
        if c10d.get_rank() == 0:
            time.sleep(60)

    with pytest.raises(KeyError, match="no such field"):
        on_ranks(raises, Probe(1))(PARAMS, UNEVEN)
    with pytest.raises(TimeoutError, match=r"timeout=0\.5 s, got no result from ranks"):
        on_ranks(hangs, Probe(1), timeout=0.5)(PARAMS, UNEVEN)


def test_ranks_are_checked():
    loss_fn, params, batches, _ = tokens()
    report = report_step(ddp(ddp_loop, Probe(), 2), loss_fn, params, batches, max_examples=6)
    assert report.exit_code == 0
    assert report.examples > 1
