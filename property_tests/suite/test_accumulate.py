"""A window that was cut off goes on after any micro-step; its accumulator is ``window_grad``."""

import pytest
import torch
import torch.distributed as c10d
from checkpoint_cases import apart, resume_in_each_micro_step, same, save_in_each_micro_step
from dist_cases import DEALS, WINDOW, mean_loss, on_tree, said, whole_params, wrapped

from numden import dist
from numden.dist import TrainState, load, run_local, save
from numden.pure import LossTerms, PlanError, accumulator, first_pass, tree

MIDDLES = [("tree", "mean"), ("tree", "own dens"), ("module", "mean"), ("shard", "mean")]


@pytest.mark.parametrize("saved_on", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("kind", "case"), MIDDLES)
def test_equivalent_resumed_within_a_window(kind, case, saved_on, tmp_path):
    """After any micro-step, in new processes, on as many ranks and on another number."""
    saved = run_local(save_in_each_micro_step, saved_on, kind, case, tmp_path)
    paths, ended = saved[0]
    shares = {1: [WINDOW], 2: DEALS["ragged"]}[saved_on]
    assert len(paths) == 1 + max(map(len, shares))
    for resumed_on in (1, 2):
        for found in run_local(resume_in_each_micro_step, resumed_on, kind, case, paths, shares):
            for got in found:
                assert apart(got, ended) < 1e-14  # sums are added in another order
                assert saved_on != resumed_on or same(got, ended)


# --- shares that cannot be added -----------------------------------------------------------------


def half(params, x):
    return LossTerms((params["w"] * x).sum().float(), 64.0 * x.numel())


def saved_with_own_scales(folder):
    """float16 buffers are scaled by the dens of their own rank."""
    params = {"w": torch.ones(2, dtype=torch.float16)}
    init, update, _ = dist.accumulator(half, plan="after")
    carry = update(init(params), params, torch.ones(2 ** (1 + 3 * c10d.get_rank()), 2).half())
    save(folder, TrainState(params, {}, carry=carry))


def test_shares_of_different_scale_need_the_same_ranks(tmp_path):
    run_local(saved_with_own_scales, 2, tmp_path)
    like = TrainState({"w": torch.zeros(2, dtype=torch.float16)}, {})
    with pytest.raises(ValueError, match=r"resumed on as many ranks .* weighted .* float16 params"):
        load(tmp_path, like)
    directions = run_local(lambda: load(tmp_path, like)[0].carry.directions, 2)
    assert directions[0] != directions[1]


def saved_in_a_replay(folder):
    params = {"w": torch.ones(2)}
    loss = lambda params, x: LossTerms((params["w"] * x).sum(), x.numel())
    window = [torch.ones(2), torch.ones(2) * 2]
    init, update, finish = accumulator(loss, plan="replay")
    carry = update(init(params, first_pass(loss)(params, window)), params, window[0])
    save(folder, TrainState(params, {}, carry=carry))
    again = load(folder, TrainState(params, {}))[0].carry
    results = [finish(update(each, params, window[1])).grads["w"] for each in (carry, again)]
    return torch.equal(*results)


def test_a_replay_needs_the_same_ranks(tmp_path):
    assert run_local(saved_in_a_replay, 2, tmp_path) == [True, True]
    with pytest.raises(ValueError, match=r"as many ranks .*: plan 'replay' goes twice over"):
        load(tmp_path, TrainState({"w": torch.ones(2)}, {}))


def test_a_carry_whose_totals_are_under_way_is_not_saved(tmp_path):
    carry = accumulator(half, plan="after").init({"w": torch.ones(1)})
    with pytest.raises(TypeError, match=r"save: a carry must .* got function in it\. Save between"):
        save(tmp_path, TrainState({}, {}, carry=carry._replace(totals=lambda: None)))


def test_a_carry_comes_back_with_its_structure_and_strides(tmp_path):
    params = {"w": torch.ones(4, 3).T, "n": [torch.ones(()), (torch.ones(2, 0),)]}

    def loss(params, x):
        num = {"a b": (params["w"] * x).sum(), "c": [params["n"][0].sum(), (x.sum(),)]}
        return LossTerms(num, 1.0), {"it's": LossTerms(x.sum(), 2)}

    init, update, _ = accumulator(loss, plan="columns")
    carry = update(init(params), params, torch.tensor(3.0))
    save(tmp_path, TrainState(params, {}, carry=carry))
    found = load(tmp_path, TrainState(params, {}))[0].carry
    assert tree.structure(found) == tree.structure(carry)
    for got, want in zip(tree.leaves(found), tree.leaves(carry), strict=True):
        assert torch.equal(got, want)
        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    assert found.grads[0]["w"].stride() == (1, 3)


# --- the accumulator -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tree", "shard"])
def test_a_rank_without_a_micro_step_takes_part(kind):
    """And with shards that are gathered in each micro-step, where both ranks have as many."""

    def on_rank():
        found = []
        params, on = wrapped(kind)
        grad = dist.window_grad(on(mean_loss), plan="after")
        init, update, finish = dist.accumulator(on(mean_loss), plan="after")
        for deal in ("last rank without a batch", "even"):
            window = DEALS[deal][c10d.get_rank()]
            used = params if deal == "even" else dist.gather(params)
            carry = init(used)
            for batch in window:
                carry = update(carry, used, batch)
            got, want = finish(carry, params), grad(params, window)
            assert torch.equal(got.loss, want.loss)
            found.append(
                same(tree.leaves(dist.gather(got.grads)), tree.leaves(dist.gather(want.grads)))
            )
        return found

    assert run_local(on_rank, 2) == [[True, True]] * 2


def test_what_is_wrong_on_one_rank_all_ranks_raise():
    def on_rank():
        params = whole_params()
        init, update, finish = dist.accumulator(on_tree(mean_loss), plan="after")
        batch = dict(WINDOW[0])
        if c10d.get_rank():
            batch["y"] = batch["y"] + torch.nan
        carry = update(init(params), params, batch)
        good = update(init(params), params, WINDOW[0])
        return said(lambda: finish(carry, params)), float(finish(good, params).loss)

    (first, loss), second = run_local(on_rank, 2)
    assert (first, loss) == second
    assert first.startswith("NonFiniteLossError: ")
    assert "rank 1" in first


def test_plans_that_know_something_before_the_window_are_refused():
    with pytest.raises(PlanError, match=r"plan is 'after' or 'columns', got plan='replay'\. Use w"):
        dist.accumulator(on_tree(mean_loss), plan="replay")


def test_modules_that_reduce_themselves_are_refused():
    def on_rank():
        module, on = wrapped("fsdp")
        return said(lambda: dist.accumulator(on(mean_loss), plan="after").init(module))

    assert run_local(on_rank, 1)[0].startswith("TypeError: window: an FSDP2 or DDP module")
