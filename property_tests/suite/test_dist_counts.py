"""What a window costs in collectives and host reads, whatever the number of its micro-steps."""

from collections import Counter

import pytest
import torch
from dist_cases import (
    CASES,
    WINDOW,
    mean_loss,
    on_tree,
    options,
    own_dens_loss,
    whole_params,
    wrapped,
)

from numden import dist
from numden.dist import run_local
from numden.property_tests import count_collectives, count_host_syncs
from numden.pure import LossTerms

TOTALS, GRADS = "c10d.allreduce_", "c10d.allreduce_coalesced_"


def counts_of(run, params, window, counter=count_collectives):
    with counter() as calls:
        run(params, window)
    return dict(calls)


def of_many_terms(predict, batch):
    terms, _ = mean_loss(predict, batch)
    nums = {str(i): terms.num * i for i in range(1, 8)}
    return LossTerms(nums, terms.den), {str(i): LossTerms(float(i), 1) for i in range(30)}


@pytest.mark.parametrize("kind", ["tree", "module", "ddp"])
def test_replicated_one_all_reduce_of_sums_and_one_of_gradients(kind):
    def on_rank():
        params, on = wrapped(kind)
        found = []
        for window in (WINDOW[:1], WINDOW):
            for loss, plan in (
                (mean_loss, "auto"),
                (of_many_terms, "after"),
                (mean_loss, "columns"),
                (of_many_terms, "replay"),
            ):
                grad = dist.window_grad(on(loss), plan=plan)
                found.append(counts_of(grad, params, window))
        return found

    for found in run_local(on_rank, 2, timeout=30):
        assert all(counts == {TOTALS: 1, GRADS: 1} for counts in found)


def test_before_counts_its_dens_in_one_more():
    def on_rank():
        case = CASES["own dens"]
        grad = dist.window_grad(on_tree(case.loss), case.objective, **options(case, "before"))
        return [counts_of(grad, whole_params(), window) for window in (WINDOW[:1], WINDOW)]

    for found in run_local(on_rank, 2):
        assert found == [{TOTALS: 2, GRADS: 1}] * 2


def test_skip_agrees_in_one_more():
    def on_rank():
        grad = dist.window_grad(on_tree(mean_loss), on_empty="skip")
        return [counts_of(grad, whole_params(), window) for window in (WINDOW[:1], WINDOW)]

    for found in run_local(on_rank, 2):
        assert found == [{TOTALS: 2, GRADS: 1}] * 2


def test_window_value_one_all_reduce():
    def on_rank():
        value = dist.window_value(on_tree(of_many_terms))
        return [counts_of(value, whole_params(), window) for window in (WINDOW[:1], WINDOW)]

    for found in run_local(on_rank, 2):
        assert found == [{TOTALS: 1}] * 2


def test_one_coalesced_sum_for_each_dtype():
    """The flag of a failed rank rides with the gradients, so that it costs nothing."""

    def on_rank():
        found = {}
        for dtypes in ([torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16]):
            params = [torch.ones(2, dtype=dtype) for dtype in dtypes * 2]

            def loss(params, batch):
                return LossTerms(sum(param.sum().float() for param in params), 1)

            found[len(dtypes), dtypes[0]] = counts_of(dist.window_grad(loss), params, [0, 1])
        return found

    for found in run_local(on_rank, 2):
        for (num_dtypes, _), counts in found.items():
            assert counts == {TOTALS: 1, GRADS: num_dtypes}


class _Spy(torch.autograd.Function):
    """The identity; ``seen(calls so far)`` when the backward pass comes by."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen()
        return grad, None


@pytest.mark.parametrize(
    ("plan", "in_passes", "in_last_backward"), [("after", 0, 1), ("before", 1, 2), ("replay", 1, 1)]
)
def test_sums_are_sent_before_the_last_backward_pass(plan, in_passes, in_last_backward):
    def on_rank():
        forward, backward = [], []
        with count_collectives() as calls:

            def loss(predict, batch):
                forward.append(calls.total())
                terms, _ = mean_loss(predict, batch)
                num = _Spy.apply(terms.num, lambda: backward.append(calls.total()))
                return LossTerms(num, terms.den)

            den_fn = CASES["mean"].den_fn if plan == "before" else None
            dist.window_grad(on_tree(loss), plan=plan, den_fn=den_fn)(whole_params(), WINDOW)
        return forward, backward

    for forward, backward in run_local(on_rank, 2):
        first_pass = [0] * (len(forward) - len(WINDOW))
        assert forward == first_pass + [in_passes] * len(WINDOW)
        assert backward == [in_passes] * (len(WINDOW) - 1) + [in_last_backward]


def hand_written(module, window):
    """What FSDP2 itself costs: forwards and backwards, reducing in the last."""
    dist.sum_gradients(module)
    for index, batch in enumerate(window):
        module.set_requires_gradient_sync(index == len(window) - 1)
        mean_loss(module, batch)[0].num.backward()
    module.zero_grad()


def test_fsdp_one_all_reduce_besides_its_own():
    def on_rank():
        module, _ = wrapped("fsdp")
        found = []
        for window in (WINDOW[:1], WINDOW):
            hand_written(module, window)  # once more, since FSDP2 sets up when first used
            own = Counter(counts_of(hand_written, module, window))
            for equal_steps, plan in ((False, "after"), (True, "after"), (True, "auto")):
                grad = dist.window_grad(mean_loss, plan=plan, equal_steps=equal_steps)
                grad(module, window)
                counts = Counter(counts_of(grad, module, window))
                assert not own - counts
                found.append((equal_steps, plan, dict(counts - own)))
        return found

    for found in run_local(on_rank, 2, timeout=30):
        # One for the sums, one to learn the others' counts, one to agree on a plan.
        for equal_steps, plan, more in found:
            assert more == {TOTALS: 1 + (not equal_steps) + (plan == "auto")}
        assert len(found) == 6


def test_shards_are_gathered_and_summed_once():
    def on_rank():
        params, on = wrapped("shard")
        grad = dist.window_grad(on(mean_loss))
        return [counts_of(grad, params, window) for window in (WINDOW[:1], WINDOW)]

    num_leaves = len(whole_params())
    for one, eight in run_local(on_rank, 2):
        assert one == eight
        assert one.pop(TOTALS) == 1
        gathers = sum(n for name, n in one.items() if "gather" in name)
        scatters = sum(n for name, n in one.items() if "reduce_scatter" in name)
        assert (gathers, scatters) == (num_leaves, num_leaves)
        assert sum(one.values()) <= 2 * num_leaves + 1


@pytest.mark.parametrize("kind", ["tree", "ddp", "fsdp", "shard"])
def test_no_host_read_in_a_micro_step(kind):
    def on_rank():
        (params, on), found = wrapped(kind), {}
        for loss, plan, on_empty in (
            (mean_loss, "after", "raise"),
            (own_dens_loss, "auto", "raise"),
            (own_dens_loss, "columns", "skip"),
            (own_dens_loss, "replay", "skip"),
        ):
            grad = dist.window_grad(on(loss), plan=plan, on_empty=on_empty)
            grad(params, WINDOW[3:5])  # DTensor looks up once how it is to be cut
            found[plan] = [
                counts_of(grad, params, window, count_host_syncs)
                for window in (WINDOW[3:5], WINDOW[3:])
            ]
        return found

    for found in run_local(on_rank, 2, timeout=60):
        assert {key: counts for key, counts in found.items() if counts[0] != counts[1]} == {}


def test_counting_sees_the_reductions():
    """A window of one rank alone has none of them."""
    with count_collectives() as calls:
        dist.window_grad(on_tree(mean_loss))(whole_params(), WINDOW)
    assert not calls

    def on_rank():
        grads = dict.fromkeys("ab", torch.ones(2))
        with count_collectives() as calls:
            dist.window_grad(lambda p, x: LossTerms(p["a"] @ p["b"], 1))(grads, [None])
        return dict(calls)

    assert run_local(on_rank, 2) == [{TOTALS: 1, GRADS: 1}] * 2
