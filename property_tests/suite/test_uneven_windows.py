"""Ranks with different numbers of micro-steps, with none, and with windows that end early.

Nobody tells a rank in advance how many micro-batches the others have; a window is any iterable, and
ends when it ends. What that takes depends on what is in a micro-step:

Parameters that are whole on a rank (a tree, a module, DDP; shards that are gathered once per
window): no micro-step has a collective. A rank that has less goes on to the sums at the end, and
waits there.

FSDP2, shards that are gathered in each micro-step, losses with collectives of their own: the same
collectives on all ranks. One small all-reduce before the window tells how many micro-steps the
longest has. A rank that has less repeats its last batch, or one that it was sent, with sums and
gradients of zero.

In neither case does a micro-step have a collective more for it.
"""

import itertools
from collections import Counter

import pytest
import torch.distributed as c10d
from dist_cases import (
    CASES,
    DEALS,
    ROUNDING,
    WINDOW,
    apart,
    assert_same_and_exact,
    compare,
    mean_loss,
    options,
    plain,
    reference,
    whole,
    wrapped,
)

from numden import dist
from numden.dist import run_local
from numden.property_tests import count_collectives
from numden.pure import EmptyWindowError, window_grad

FREE = ("tree", "ddp", "shard")
LOCKSTEP = ("fsdp", "shard in each micro-step", "tree in lockstep")
OPTIONS = {
    "shard in each micro-step": {"gather": "micro-step"},
    "tree in lockstep": {"lockstep": True},
}


def kind_of_params(kind):
    return kind.split(" ")[0]


# --- the gradient --------------------------------------------------------------------------------


def dealt(*sizes):
    """The micro-batches of ``WINDOW`` as windows of so many."""
    batches = iter(WINDOW)
    return [list(itertools.islice(batches, size)) for size in sizes]


ON_THREE = {
    "ragged": dealt(5, 1, 2),
    "a rank without supervised rows": dealt(1, 2, 5),
    "a rank without a batch": dealt(3, 0, 5),
    "one rank with all": dealt(0, 0, 8),
}

PLANS_ON = {
    "first rank without a batch": ("before", "replay"),
    "last rank without a batch": ("after", "columns"),
}
"""A rank without a batch has other collectives to match for each plan; elsewhere "auto" will do."""

OBJECTIVES_ON = ("ragged", *PLANS_ON, "a rank without a batch")


@pytest.mark.parametrize("kind", [*FREE, *LOCKSTEP])
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_equivalent_uneven_windows_whole_batch(kind, num_ranks):
    """Each deal and objective, one window after the other on the same params."""
    whole_batch = {name: reference(case) for name, case in CASES.items()}

    def on_rank():
        found, rank = {}, c10d.get_rank()
        params, on = wrapped(kind_of_params(kind))
        for deal, windows in {2: DEALS, 3: ON_THREE}[num_ranks].items():
            for name in CASES if deal in OBJECTIVES_ON else ["mean"]:
                case, expected = CASES[name], whole_batch[name]
                loss = on(case.loss)
                for plan in [each for each in PLANS_ON.get(deal, ("auto",)) if each in case.plans]:
                    more = options(case, plan) | OPTIONS.get(kind, {})
                    grad = dist.window_grad(loss, case.objective, **more)
                    found[name, deal, plan] = compare(grad(params, iter(windows[rank])), expected)
                value = dist.window_value(loss, case.objective, lockstep="lockstep" in kind)
                value = value(params, iter(windows[rank]))
                found[name, deal, "value"] = compare(value, (expected[0], None, expected[2]))
        return found

    assert_same_and_exact(run_local(on_rank, num_ranks, timeout=60))


@pytest.mark.parametrize("kind", ["tree", "shard", "fsdp", "shard in each micro-step"])
def test_streams_of_different_lengths_end_together(kind):
    """The last windows of an epoch: one rank's stream ends within a window, then it has nothing.

    When no rank has anything left, all are told so in the same window.
    """
    streams = [WINDOW[:3], WINDOW[3:]]
    together = [WINDOW[:2] + WINDOW[3:5], WINDOW[2:3] + WINDOW[5:7], WINDOW[7:]]

    def on_rank():
        params, on = wrapped(kind_of_params(kind))
        grad = dist.window_grad(on(mean_loss), **OPTIONS.get(kind, {}))
        stream, grads = iter(streams[c10d.get_rank()]), []
        while True:
            try:
                grads.append(plain(grad(params, itertools.islice(stream, 2)).grads))
            except EmptyWindowError as error:
                return grads, str(error)

    module, on = wrapped("module")
    expected = [window_grad(on(mean_loss))(module, [whole(window)]).grads for window in together]
    for grads, error in run_local(on_rank, 2, timeout=30):
        assert max(map(apart, grads, expected)) < ROUNDING
        assert len(grads) == len(expected)
        assert error.startswith("window: the window has no micro-step.")


# --- what it costs -------------------------------------------------------------------------------


def collectives(kind, sizes, **more):
    """On a rank: the collectives of each window of so many micro-steps on the ranks."""
    params, on = wrapped(kind_of_params(kind))
    grad = dist.window_grad(on(mean_loss), **OPTIONS.get(kind, {}), **more)
    grad(params, WINDOW[4:5])  # what is set up when it is first used
    found = {}
    for size in sizes:
        # Ranks may have the same batches: only their number matters here.
        window = (WINDOW[4:] * 2)[: size[c10d.get_rank()]]
        with count_collectives() as calls:
            grad(params, iter(window))
        found[size] = Counter(calls)
    return found


@pytest.mark.parametrize("kind", FREE)
def test_uneven_windows_are_free(kind):
    def on_rank():
        whole_ranks = collectives(kind, [(1, 1), (4, 4), (8, 8), (1, 8), (8, 1)])
        without = collectives(kind, [(0, 1), (0, 8), (8, 0)])
        return list(whole_ranks.values()), list(without.values())

    for whole_ranks, without in run_local(on_rank, 2, timeout=30):
        assert all(counts == whole_ranks[0] for counts in whole_ranks)
        # A rank without a batch asks the others what their terms are.
        assert all(counts == without[0] for counts in without)
        assert (without[0] - whole_ranks[0]).keys() <= {"c10d.allgather_"}
        assert (without[0] - whole_ranks[0]).total() <= 2


@pytest.mark.parametrize("kind", LOCKSTEP)
def test_uneven_windows_cost_the_passes_of_the_longest(kind):
    def on_rank():
        found = collectives(kind, [(1, 1), (2, 2), (3, 3), (8, 8), (1, 8), (8, 2), (0, 8), (0, 3)])
        equal = collectives(kind, [(8, 8)], equal_steps=True)
        return found, equal[8, 8]

    for found, equal in run_local(on_rank, 2, timeout=30):
        assert found[1, 8] == found[8, 2] == found[8, 8]
        # The counts of micro-steps, once.
        assert found[8, 8] - equal == {"c10d.allreduce_": 1}
        in_each = found[3, 3] - found[2, 2]
        assert found[2, 2] - found[1, 1] <= in_each  # the last of FSDP2's reduces, too
        assert found[8, 8] - found[3, 3] == Counter({k: 5 * n for k, n in in_each.items()})
        # A rank without a batch is sent one, whatever their number.
        assert found[0, 8] - found[8, 8] == found[0, 3] - found[3, 3]
        assert (found[0, 3] - found[3, 3]).keys() <= {"c10d.broadcast_"}
