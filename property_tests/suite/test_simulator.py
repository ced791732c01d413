"""The simulator of windows on many ranks: closed forms, and counts that are those of real ranks."""

import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.dist import run_local
from numden.pure import random

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
sys.path.append(str(BENCHMARKS))  # as `python examples/benchmarks/run.py` has it

import normalising  # noqa: E402
import replay  # noqa: E402
from simulator import (  # noqa: E402
    SCHEMES,
    SHARERS,
    Model,
    Network,
    all_reduce,
    gather,
    in_forward,
    resample,
    tax,
    together,
    waited,
    window_cost,
)

FREE = Network(latency=0.0, bandwidth=math.inf, host_read=0.0)


def of_backward(times):
    """Seconds of backward passes, [ranks, micro-steps]; forward passes take none."""
    backward = torch.tensor(times, dtype=torch.float64)
    return torch.stack([torch.zeros_like(backward), backward], -1)


def seconds(compute, sharers, network=FREE):
    return [window_cost(compute, s, sharers, Model(), network).seconds for s in SCHEMES]


@st.composite
def computes(draw):
    """Eighths of seconds, whose sums are exact."""
    shape = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 5)), 2
    eighths = st.lists(st.integers(1, 64), min_size=math.prod(shape), max_size=math.prod(shape))
    return torch.tensor(draw(eighths), dtype=torch.float64).reshape(shape) / 8


# --- waiting -------------------------------------------------------------------------------------


def test_ranks_that_are_slow_in_turn():
    """Each is the slower one once: 2 + 2 where they meet twice, 1 + 2 where they meet once."""
    compute = of_backward([[1, 2], [2, 1]])
    assert seconds(compute, 1) == [4, 3]
    assert seconds(compute, None) == [4, 4]
    assert tax(compute) == 4 / 3


def test_shards_wait_for_their_group_alone():
    """Two groups that are slow in turn pay where all meet; ranks of one group always do."""
    assert seconds(of_backward([[2, 1]] * 2 + [[1, 2]] * 2), 2) == [4, 3]
    assert seconds(of_backward([[2, 1], [1, 2]] * 2), 2) == [4, 4]


@pytest.mark.parametrize("sharers", SHARERS.values(), ids=SHARERS)
def test_no_tax_where_all_are_alike_or_one_is_always_slowest(sharers):
    for times in ([[1, 3]] * 16, [[2, 3]] + [[1, 1]] * 15):
        compute = of_backward(times)
        assert tax(compute) == 1
        assert seconds(compute, sharers) == [sum(times[0])] * 2


def test_between_two_meetings_lie_a_backward_and_the_next_forward():
    compute = torch.tensor([[[1.0, 2.0], [4.0, 8.0]]])
    assert in_forward(compute).tolist() == [[1, 2 + 4, 8]]
    assert together(compute).tolist() == [[15]]


@given(computes())
def test_bounds_of_the_tax(compute):
    num_ranks, num_steps, _ = compute.shape
    assert 1 <= tax(compute) <= min(num_ranks, num_steps + 1)


@given(computes())
def test_sharing_waits_no_less(compute):
    """The larger the groups that share, the more wait for each other; all the most."""
    sizes = [size for size in (1, 2, 4, 8) if size <= len(compute)]
    often, once = zip(*(seconds(compute, size) for size in sizes), strict=True)
    assert list(once) == sorted(once)
    assert list(often) == sorted(often)
    assert all(a >= b for a, b in zip(often, once, strict=True))
    assert often[-1] == once[-1] or len(compute) == 1


@given(computes())
def test_another_rank_waits_no_less(compute):
    for cut in (in_forward, together):
        assert waited(cut(compute)) >= waited(cut(compute[:-1])) if len(compute) > 1 else True


def test_exponential_times_have_a_tax_of_harmonic_numbers():
    """The mean of the maximum of n exponential times is H_n = 1 + 1/2 + … + 1/n."""
    num_ranks, num_steps = 8, 4000
    times = -torch.log1p(-random.uniform(random.key(0), (10_000,), dtype=torch.float64))
    drawn = resample(torch.stack([times * 0, times], -1), num_ranks, num_steps, random.key(1))
    harmonic = sum(1 / n for n in range(1, num_ranks + 1))
    # The maximum deviates by 1.2 and 4000 of them by 0.02; three such and the resampling's own.
    assert waited(in_forward(drawn)) / num_steps == pytest.approx(harmonic, abs=0.08)


# --- moving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 4096])
def test_two_halves_make_an_all_reduce(num_ranks):
    network = Network(latency=1.0, bandwidth=0.5)
    half, whole = gather(8.0, num_ranks, network), all_reduce(8.0, num_ranks, network)
    assert half.num_bytes == 8 * (num_ranks - 1) / num_ranks
    assert half.seconds == math.log2(num_ranks) + half.num_bytes / 0.5
    assert whole == (2 * half.seconds, 2 * half.num_bytes)


@pytest.mark.parametrize("num_steps", [1, 16])
def test_a_replicated_window_in_closed_form(num_steps):
    """Passes of one second, four ranks, no bandwidth that limits: two latencies each way."""
    compute = torch.ones(4, num_steps, 2, dtype=torch.float64)
    network = Network(latency=1 / 64, bandwidth=math.inf, host_read=1 / 4)
    often, once = seconds(compute, 1, network)
    assert often == 2 * num_steps + 4 / 64 * (num_steps + 1) + num_steps / 4
    assert once == 2 * num_steps + 4 / 64 * 2 + 1 / 4


def test_a_sharded_window_in_closed_form():
    """Gathers of 3 units take 6 s in a pass that computes 1 s; the last one reduces them, too."""
    compute = torch.ones(4, 5, 2, dtype=torch.float64)
    network = Network(latency=1.0, bandwidth=math.inf, host_read=0.0)
    _, once = (window_cost(compute, s, None, Model(1.0, 3), network) for s in SCHEMES)
    sums = 2 * 4
    assert once.seconds == 10 * (6 + 2) + 6 + sums


# --- counting ------------------------------------------------------------------------------------


def count(layout, sharers):
    """What a window of two micro-steps calls on real ranks, by scheme."""
    window = [(0.0, 0.0)] * 2
    steps = replay.steps(layout, window, sharers=sharers)
    for step in steps.values():
        step()
    return {scheme: normalising.calls(step) for scheme, step in steps.items()}


def test_all_meet_at_each_collective_but_at_those_of_a_group():
    """Four ranks, five micro-steps, a gradient or three units of it."""
    compute, model = torch.ones(4, 5, 2), Model(1.0, 3)
    found = {
        sharers: [window_cost(compute, scheme, sharers, model, FREE) for scheme in SCHEMES]
        for sharers in (1, 2, 4)
    }
    for sharers in (1, 4):
        assert all(cost.meetings == cost.collectives for cost in found[sharers])
    assert [cost.meetings for cost in found[1]] == [5 + 1, 1 + 1]
    assert [cost.meetings for cost in found[2]] == [5 + 1, 2 + 1]


@pytest.mark.parametrize(("num_ranks", "sharers"), [(2, 1), (4, 1), (2, 2), (4, 2)], ids=str)
def test_counts_are_those_of_real_ranks(num_ranks, sharers):
    by_rank = run_local(count, num_ranks, "replicated" if sharers == 1 else "FSDP2", sharers)
    compute, model = torch.ones(num_ranks, 2, 2), Model(1.0, replay.NUM_UNITS)
    expected = {}
    for scheme in SCHEMES:
        cost = window_cost(compute, scheme, sharers, model, FREE)
        expected[scheme] = {"collectives": cost.collectives, "host reads": cost.host_reads}
    assert by_rank == [expected] * num_ranks
