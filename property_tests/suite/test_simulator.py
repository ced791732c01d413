"""The simulator of windows on many ranks: closed forms, and counts that are those of real ranks."""

import math

import pytest
import torch
from benchmarks.straggler import (
    LAYOUTS,
    SCHEMES,
    Model,
    Network,
    all_reduce,
    resample,
    tax,
    window_cost,
)
from dist_cases import WINDOW, mean_loss, on_tree, whole_params

from numden import dist
from numden.dist import run_local
from numden.property_tests.counters import count_collectives
from numden.pure import random

FREE = Network(latency=0.0, bandwidth=math.inf)
TIMES = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def cost(compute, scheme, layout="replicated", network=FREE):
    return window_cost(torch.tensor(compute, dtype=torch.float64), scheme, layout, Model(), network)


def test_two_ranks_that_are_slow_in_turn():
    """Each is the slower one once: 2 + 2 where they meet twice, 1 + 2 where they meet once."""
    compute = [[1.0, 2.0], [2.0, 1.0]]
    assert cost(compute, "per micro-step").seconds == 4.0
    assert cost(compute, "per window").seconds == 3.0
    assert cost(compute, "per window", "FSDP2").seconds == 4.0
    assert tax(torch.tensor(compute, dtype=torch.float64)) == 4 / 3 - 1


def test_shards_meet_within_their_group():
    """Of sixteen ranks the first eight are slow at first, the others at last, each but for one."""
    compute = [[2.0, 1.0]] * 8 + [[1.0, 2.0]] * 8
    assert cost(compute, "per window", "HSDP, shards of 8").seconds == 3.0
    assert cost(compute, "per micro-step", "HSDP, shards of 8").seconds == 4.0
    compute = [[2.0, 1.0], [1.0, 2.0]] * 8
    assert cost(compute, "per window", "HSDP, shards of 8").seconds == 4.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tax_where_all_are_alike_or_one_is_always_slowest(layout):
    for compute in ([[1.0, 3.0]] * 16, [[2.0, 3.0]] + [[1.0, 1.0]] * 15):
        often, once = (cost(compute, scheme, layout).seconds for scheme in SCHEMES)
        assert often == once == sum(compute[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 8, 64])
def test_once_is_never_slower(layout, num_ranks):
    for num_steps in (1, 4, 16):
        compute = resample(TIMES, num_ranks, num_steps, random.key(num_steps))
        often, once = (
            window_cost(compute, scheme, layout, Model(), Network()) for scheme in SCHEMES
        )
        # One packed buffer is longer than one denominator, which shows where there is but one.
        slack = all_reduce(8 * 1035, num_ranks, Network())[0] if num_steps == 1 else 0.0
        assert once.seconds <= often.seconds + slack
        assert (often.host_reads, once.host_reads) == (num_steps, 1)
        assert often.collectives - once.collectives == num_steps - 1


def test_an_all_reduce_alone():
    assert all_reduce(8, 1, Network()) == (0.0, 0.0)
    seconds, sent = all_reduce(1e9, 4, Network(latency=0.0, bandwidth=1e9))
    assert (seconds, sent) == (1.5, 1.5e9)
    assert all_reduce(0, 1024, Network(latency=1.0))[0] == 20.0


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_steps", [1, 5])
def test_counts_are_those_of_real_ranks(num_ranks, num_steps):
    def on_rank():
        with count_collectives() as calls:
            dist.window_grad(on_tree(mean_loss))(whole_params(), WINDOW[:num_steps])
        return calls.total()

    expected = cost([[1.0] * num_steps] * num_ranks, "per window").collectives
    assert run_local(on_rank, num_ranks) == [expected] * num_ranks
