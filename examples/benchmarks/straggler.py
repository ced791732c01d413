"""What a window costs on many ranks, on paper: collectives, bytes, and waiting for stragglers.

T[r, i] is the time that rank r computes in micro-step i. Ranks that meet in each micro-step, to sum
a denominator, wait for the slowest each time; ranks that meet once wait once:

    per micro-step:   Σ_i max_r T[r, i] + I · t(8 bytes) + t(gradients)
    per window:       max_r Σ_i T[r, i] +     t(buffer)  + t(gradients)

The difference of the two first terms is the straggler tax. FSDP2 gathers layers in each micro-step,
where the ranks that share a layer meet anyhow: normalising once keeps them from meeting all others.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from numden.pure import random

SCHEMES = ("per micro-step", "per window")
SHARERS = {"replicated": 1, "HSDP, shards of 8": 8, "FSDP2": None}
"""How many ranks share the parameters between them; None for all."""

LAYOUTS = tuple(SHARERS)
DEN_BYTES = 8
BUFFER_BYTES = 8 * (1024 + 11)
"""Of numden's packed sums: a header, and room for 1024 numbers in float64."""


class Network(NamedTuple):
    """Latency of one message in seconds, and bytes per second from rank to rank."""

    latency: float = 10e-6
    bandwidth: float = 25e9


class Model(NamedTuple):
    """What the gradient is reduced of: bytes of it, and units that FSDP2 gathers one by one."""

    num_bytes: float = 2e9
    num_units: int = 32


class Cost(NamedTuple):
    """Of one window, for each rank.

    Attributes:
        seconds: from the first micro-step to the reduced gradient.
        collectives: their number, those of the layout included.
        num_bytes: what a rank sends.
        meetings: points at which all ranks wait for all.
        host_reads: in which the host waits for its device besides.
    """

    seconds: float
    collectives: int
    num_bytes: float
    meetings: int
    host_reads: int


def all_reduce(num_bytes: float, num_ranks: int, network: Network) -> tuple[float, float]:
    """Seconds and bytes sent by each rank: a ring for what is long, a tree for what is short."""
    if num_ranks == 1:
        return 0.0, 0.0
    sent = 2 * num_bytes * (num_ranks - 1) / num_ranks
    ring = 2 * (num_ranks - 1) * network.latency + sent / network.bandwidth
    depth = math.ceil(math.log2(num_ranks))
    tree = 2 * depth * (network.latency + num_bytes / network.bandwidth)
    return min(ring, tree), sent


def reduce_scatter(num_bytes: float, num_ranks: int, network: Network) -> tuple[float, float]:
    """Seconds and bytes, half of an all-reduce; an all-gather costs the same."""
    seconds, sent = all_reduce(num_bytes, num_ranks, network)
    return seconds / 2, sent / 2


def window_cost(compute: Tensor, scheme: str, layout: str, model: Model, network: Network) -> Cost:
    """The cost of a window.

    Args:
        compute: ``[ranks, micro-steps]`` seconds.
        scheme: one of ``SCHEMES``.
        layout: one of ``LAYOUTS``.
        model: what is trained.
        network: between the ranks.
    """
    num_ranks, num_steps = compute.shape
    often = scheme == "per micro-step"
    num_dens = num_steps if often else 1
    den_seconds, den_bytes = all_reduce(DEN_BYTES if often else BUFFER_BYTES, num_ranks, network)
    sharers = min(SHARERS[layout] or num_ranks, num_ranks)
    if sharers == 1:
        (seconds, sent), own = all_reduce(model.num_bytes, num_ranks, network), 1
    else:
        seconds, sent, own = _sharded(num_steps, sharers, num_ranks, model, network)
    return Cost(
        seconds=_computing(compute, num_ranks if often else sharers)
        + num_dens * den_seconds
        + seconds,
        collectives=num_dens + own,
        num_bytes=num_dens * den_bytes + sent,
        meetings=num_dens + 1,
        host_reads=num_dens,
    )


def _computing(compute: Tensor, num_meeting: int) -> float:
    """Computing and waiting, where so many ranks meet in each micro-step, and all in the end."""
    groups = compute.split(num_meeting)
    return max(float(group.amax(0).sum()) for group in groups)


def _sharded(
    num_steps: int, sharers: int, num_ranks: int, model: Model, network: Network
) -> tuple[float, float, int]:
    """Seconds that are not hidden, bytes and number of FSDP2's own collectives.

    Each unit is gathered in each forward and each backward, and reduced in the last micro-step,
    over copies too where there are some. Half of what that takes is taken to be hidden.
    """
    unit, num_copies = model.num_bytes / model.num_units, num_ranks // sharers
    seconds, sent = reduce_scatter(unit, sharers, network)
    between, sent_between = all_reduce(unit / sharers, num_copies, network)
    passes = 2 * num_steps + 1
    return (
        model.num_units * (passes * seconds + between) / 2,
        model.num_units * (passes * sent + sent_between),
        model.num_units * (passes + (num_copies > 1)),
    )


def tax(compute: Tensor) -> float:
    """How much longer ranks compute and wait that meet in each micro-step, as a share.

    ``Σ_i max_r T / max_r Σ_i T - 1``: 0 where one rank is always the slowest, or all are alike.
    """
    return float(compute.amax(0).sum() / compute.sum(1).amax()) - 1


def resample(times: Tensor, num_ranks: int, num_steps: int, key: Tensor) -> Tensor:
    """``[num_ranks, num_steps]`` of measured times, drawn with replacement."""
    return random.choice(key, times, (num_ranks, num_steps))


def ratio(
    times: Tensor, num_ranks: int, num_steps: int, layout: str, model: Model, network: Network
) -> float:
    """Seconds of a window normalised once, over one normalised in each micro-step: a mean."""
    found = []
    for draw in range(16):
        key = random.fold_in(random.key(num_ranks), 64 * draw + num_steps)
        compute = resample(times, num_ranks, num_steps, key)
        often, once = (
            window_cost(compute, scheme, layout, model, network).seconds for scheme in SCHEMES
        )
        found.append(once / often)
    return float(torch.tensor(found).mean())
