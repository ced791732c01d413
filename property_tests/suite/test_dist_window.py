"""The loss and the gradient of a window do not depend on ranks, micro-steps, wrappers or plans."""

from functools import partial

import pytest
import torch
import torch.distributed as c10d
from dist_cases import (
    CASES,
    DEALS,
    KINDS,
    ROUNDING,
    WINDOW,
    apart,
    assert_same_and_exact,
    compare,
    net,
    options,
    plain,
    reference,
    said,
    whole,
    wrapped,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from numden import dist, pure
from numden.dist import run_local
from numden.pure import LossTerms, add, tree


def trained(params):
    """The tensors that gradients belong to."""
    return dict(params.named_parameters()) if isinstance(params, torch.nn.Module) else params


def each_plan(kind):
    """On a rank: each objective and plan on the same params, one window after the other."""
    found, (params, on) = {}, wrapped(kind)
    window = DEALS["ragged"][c10d.get_rank()]
    before = tree.map(torch.clone, plain(trained(params)))
    for name, case in CASES.items():
        for plan in case.plans:
            grad = dist.window_grad(on(case.loss), case.objective, **options(case, plan))
            found[name, plan] = compare(grad(params, window), reference(case))
    assert all(param.grad is None for param in tree.leaves(trained(params)))
    assert all(map(torch.equal, tree.leaves(plain(trained(params))), tree.leaves(before)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_equivalent_ranks_whole_batch(kind):
    assert_same_and_exact(run_local(each_plan, 2, kind, timeout=60))


@pytest.mark.parametrize("options", [{}, {"gather": "micro-step"}, {"lockstep": True}])
@pytest.mark.parametrize("kind", ["tree", "fsdp", "shard"])
def test_ranks_that_would_take_different_plans(kind, options):
    """Each chooses by its own first micro-step, and the den of one rank depends on params."""

    def terms(predict, batch, *, depends):
        out, mask = predict(batch["x"]), batch["mask"]
        weights = out.square().sum(-1) if depends else batch["y"].square().sum(-1)
        return LossTerms(((out - batch["y"]).abs().sum(-1) * mask).sum(), (weights * mask).sum())

    def on_rank():
        (params, on), rank = wrapped(kind), c10d.get_rank()
        grad = dist.window_grad(on(partial(terms, depends=rank == 1)), **options)
        return plain(grad(params, DEALS["even"][rank]).grads)

    module, (first, second) = net(), map(whole, DEALS["even"])
    total = add(terms(module, first, depends=False), terms(module, second, depends=True))
    names, leaves = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(total.num / total.den, leaves)
    expected = dict(zip(names, grads, strict=True))
    for found in run_local(on_rank, 2, timeout=20):
        assert apart(found, expected) < ROUNDING


@pytest.mark.parametrize("num_ranks", [None, 1])
def test_equivalent_eight_micro_steps_whole_batch(num_ranks):
    def every_plan():
        found = {}
        for name, case in CASES.items():
            for plan in case.plans:
                grad = dist.window_grad(case.loss, case.objective, **options(case, plan))
                found[name, plan] = compare(grad(net(), iter(WINDOW)), reference(case))
        return found

    assert_same_and_exact(run_local(every_plan, 1) if num_ranks else [every_plan()])


def keep_own_state(kind):
    """On a rank: ``.grad`` fields hold what they held, and the RNG goes on as if nothing was."""
    params, on = wrapped(kind)
    marked = tree.leaves(trained(params))
    for param in marked:
        param.grad = torch.full_like(param, 7.0)
    grads, state = [param.grad for param in marked], torch.random.get_rng_state()
    for plan in ("after", "columns", "replay"):
        dist.window_grad(on(CASES["mean"].loss), plan=plan)(
            params, DEALS["ragged"][c10d.get_rank()]
        )
    assert all(param.grad is grad for param, grad in zip(marked, grads, strict=True))
    assert all(bool((whole == 7).all()) for whole in plain(dict(enumerate_str(grads))).values())
    assert torch.equal(torch.random.get_rng_state(), state)


def enumerate_str(items):
    return ((str(index), item) for index, item in enumerate(items))


@pytest.mark.parametrize("kind", KINDS)
def test_window_leaves_grad_fields_and_rng(kind):
    run_local(keep_own_state, 2, kind, timeout=30)


# --- which ranks ---------------------------------------------------------------------------------


def test_mesh_and_group_are_not_given_together():
    def on_rank():
        mesh = init_device_mesh("cpu", (1,))
        over = {"mesh": mesh, "group": c10d.group.WORLD}
        grad = dist.window_grad(CASES["mean"].loss, **over)
        value = dist.window_value(CASES["mean"].loss, **over)
        return [said(lambda: grad(net(), WINDOW)), said(lambda: value(net(), WINDOW))]

    assert run_local(on_rank, 1) == [["ValueError: window: give mesh or group, got both."] * 2]


def test_launched_ranks_need_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = r"window: ranks need a process group, got none and WORLD_SIZE=2\. Call torch\.distri"
    with pytest.raises(RuntimeError, match=message):
        dist.window_grad(CASES["mean"].loss)(net(), WINDOW)
    with pytest.raises(RuntimeError, match=message):
        dist.window_value(CASES["mean"].loss)(net(), WINDOW)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert dist.window_grad(CASES["mean"].loss)(net(), WINDOW).valid


def test_a_rank_outside_of_the_group():
    def on_rank():
        group = c10d.new_group([0])
        return said(lambda: dist.window_grad(CASES["mean"].loss, group=group)(net(), WINDOW))

    inside, outside = run_local(on_rank, 2)
    assert inside == "nothing was raised"
    assert outside.startswith("ValueError: window: this rank must belong to axis, got rank 1 outs")


def test_plans_and_policies_are_checked_before_a_window():
    with pytest.raises(pure.PlanError, match="window: plan must be one of"):
        dist.window_grad(CASES["mean"].loss, plan="later")
    for function in (dist.window_grad, dist.window_value):
        with pytest.raises(ValueError, match="window: on_empty must be 'raise', 'zero' or 'skip'"):
            function(CASES["mean"].loss, on_empty="ignore")


def test_a_ddp_module_is_not_asked_for_its_own_collectives():
    """Its forward pass would broadcast buffers, which ranks of uneven windows cannot all do."""

    def on_rank():
        module = nn.Sequential(net(), nn.BatchNorm1d(4, dtype=torch.float64)).eval()
        module, rank = DistributedDataParallel(module), c10d.get_rank()
        window = DEALS["first rank without a batch"][rank]
        loss = CASES["mean"].loss
        found = dist.window_grad(loss)(module, window)
        return float(found.loss - dist.window_value(loss)(module, window).loss)

    assert run_local(on_rank, 2, timeout=20) == [0.0, 0.0]


def test_ddp_still_trains_as_before_after_a_window():
    """Its own averaging backward pass is neither used nor disturbed."""

    def on_rank():
        module = wrapped("ddp")[0]

        def average():
            CASES["mean"].loss(module, WINDOW[3 * c10d.get_rank()])[0].num.backward()
            grads = {name: param.grad for name, param in module.named_parameters()}
            module.zero_grad()
            return grads

        first = average()
        result = dist.window_grad(CASES["mean"].loss)(module, DEALS["ragged"][c10d.get_rank()])
        again = average()
        assert all(torch.equal(again[name], first[name]) for name in first)
        return apart(plain(result.grads), reference(CASES["mean"])[1])

    assert max(run_local(on_rank, 2)) < ROUNDING


def test_leaves_of_any_layout():
    """Transposed and empty leaves, in a list, of two dtypes."""

    def params(dtype):
        values = torch.arange(6, dtype=torch.float64)
        return [values.reshape(2, 3).T.to(dtype), torch.zeros(0, 2), torch.tensor(2.0).to(dtype)]

    def loss(params, batch):
        total = sum((batch * leaf.double()).square().sum() for leaf in params)
        return pure.LossTerms(total, len(batch))

    rows = torch.tensor([1.0, 2.0, 3.0]).double()[:, None, None]

    def on_rank(dtype):
        window = [[rows[:1], rows[1:2]], [rows[2:]]][c10d.get_rank()]
        return dist.window_grad(loss)(params(dtype), window).grads

    for dtype in (torch.float64, torch.float32):
        expected = pure.window_grad(loss)(params(dtype), [rows]).grads
        for grads in run_local(on_rank, 2, dtype):
            for grad, each in zip(grads, expected, strict=True):
                torch.testing.assert_close(grad, each)
                assert grad.stride() == each.stride()
