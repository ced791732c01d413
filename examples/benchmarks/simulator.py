"""What a window costs on many ranks, on paper: collectives, bytes, and waiting for stragglers.

F[r, i] and B[r, i] are the times that rank r computes forward and backward in micro-step i. Between
two meetings each rank computes by itself, and at a meeting all wait for the slowest. Who sums a
denominator at the end of each forward pass meets often, who sums once waits once:

    per micro-step:   max_r F[r, 1] + Σ_i max_r (B[r, i] + F[r, i + 1]) + max_r B[r, I]
    per window:       max_r Σ_i (F[r, i] + B[r, i])

Their ratio is the straggler tax: a sum of maxima over the maximum of sums. FSDP2 gathers units in
each pass, where the ranks that share parameters meet anyhow: a group of them takes the maximum of
its ranks for each F and each B, and stands for r above. Where all ranks share, there is but one
group, and summing once saves collectives and host reads, no waiting.

Half of an all-reduce takes ⌈log2 n⌉ latencies and moves (n - 1) / n of the bytes. The reduction of
replicated gradients is not hidden behind computing.

References:
    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from numden.pure import random

Scheme = Literal["per micro-step", "per window"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

SHARERS = {"replicated": 1, "HSDP, shards of 8": 8, "FSDP2": None}
"""How many ranks share the parameters between them, by layout; None for all."""

DEN_BYTES = 8
PACKED_BYTES = 8 * 1035
"""Of numden's sums of a window: a header of 11 and room for 1024 numbers, in float64."""

COUNTS_BYTES = 8 * 4
"""Of the numbers of micro-steps, on which ranks agree before an FSDP2 window."""


class Network(NamedTuple):
    """Between any two ranks.

    Attributes:
        latency: seconds for a message of no bytes.
        bandwidth: bytes per second.
        host_read: seconds until a device is busy again after the host has waited for it.
    """

    latency: float = 10e-6
    bandwidth: float = 25e9
    host_read: float = 20e-6


class Model(NamedTuple):
    """What is trained.

    Attributes:
        num_bytes: of all parameters, and of their gradient.
        num_units: into which FSDP2 cuts them, each gathered and reduced at once.
    """

    num_bytes: float = 2e9
    num_units: int = 32


class Cost(NamedTuple):
    """Of one window, for each rank.

    Attributes:
        seconds: from the first forward pass to the summed gradient.
        collectives: their number.
        num_bytes: what a rank sends.
        meetings: points at which all ranks wait for all.
        host_reads: in which the host waits for its device.
    """

    seconds: float
    collectives: int
    num_bytes: float
    meetings: int
    host_reads: int


class Traffic(NamedTuple):
    """Of one collective or several: seconds, and bytes that each rank sends."""

    seconds: float
    num_bytes: float


def gather(num_bytes: float, num_ranks: int, network: Network) -> Traffic:
    """An all-gather, or a reduce-scatter, of so many bytes in all."""
    sent = num_bytes * (num_ranks - 1) / num_ranks
    depth = math.ceil(math.log2(num_ranks))
    return Traffic(depth * network.latency + sent / network.bandwidth, sent)


def all_reduce(num_bytes: float, num_ranks: int, network: Network) -> Traffic:
    """A reduce-scatter and an all-gather."""
    half = gather(num_bytes, num_ranks, network)
    return Traffic(2 * half.seconds, 2 * half.num_bytes)


def together(compute: Tensor) -> Tensor:
    """Ranks meet at the end of the window alone.

    Args:
        compute: seconds ``[ranks, micro-steps, 2]``, of forward and backward passes.

    Returns:
        Seconds that each rank computes between two meetings, ``[ranks, 1]``.
    """
    return compute.sum((1, 2))[:, None]


def in_forward(compute: Tensor) -> Tensor:
    """Ranks meet at the end of each forward pass: ``[ranks, micro-steps + 1]``."""
    forward, backward = compute.unbind(-1)
    none = torch.zeros_like(forward[:, :1])
    return torch.cat([forward, none], 1) + torch.cat([none, backward], 1)


def waited(between: Tensor) -> float:
    """Seconds of all ranks, each waiting for the slowest at each meeting."""
    return float(between.amax(0).sum())


def tax(compute: Tensor) -> float:
    """How many times as long ranks take that meet in each forward pass; 1 where they are alike."""
    return waited(in_forward(compute)) / waited(together(compute))


def window_cost(
    compute: Tensor, scheme: Scheme, sharers: int | None, model: Model, network: Network
) -> Cost:
    """The cost of a window.

    Args:
        compute: seconds ``[ranks, micro-steps, 2]``, of forward and backward passes.
        scheme: how often denominators are summed.
        sharers: how many ranks share the parameters between them; all where there are less.
        model: what is trained.
        network: between the ranks.
    """
    num_ranks = len(compute)
    sharers = min(sharers or num_ranks, num_ranks)
    layout = _replicated if sharers == 1 else _sharded
    passes, own = layout(compute, sharers, model, network)
    often = scheme == "per micro-step"
    between = in_forward(passes) if often else together(passes)
    sums = _sums(compute, often, sharers, network)
    return Cost(
        seconds=waited(between) + own.seconds + sums.seconds,
        collectives=own.collectives + sums.collectives,
        num_bytes=own.num_bytes + sums.num_bytes,
        meetings=own.meetings + sums.meetings,
        host_reads=own.host_reads + sums.host_reads,
    )


def _sums(compute: Tensor, often: bool, sharers: int, network: Network) -> Cost:
    """Of summing denominators over ranks, and reading them."""
    num_ranks, num_steps, _ = compute.shape
    messages = [PACKED_BYTES] + ([COUNTS_BYTES] if sharers > 1 else [])
    if often:
        messages = [DEN_BYTES] * num_steps
    each = [all_reduce(size, num_ranks, network) for size in messages]
    number = len(messages)
    seconds = sum(traffic.seconds for traffic in each) + number * network.host_read
    return Cost(seconds, number, sum(traffic.num_bytes for traffic in each), number, number)


def _replicated(
    compute: Tensor, sharers: int, model: Model, network: Network
) -> tuple[Tensor, Cost]:
    """Passes without collectives, and one reduction of the gradient."""
    reduced = all_reduce(model.num_bytes, len(compute), network)
    return compute, Cost(reduced.seconds, 1, reduced.num_bytes, 1, 0)


def _sharded(compute: Tensor, sharers: int, model: Model, network: Network) -> tuple[Tensor, Cost]:
    """Passes ``[groups, micro-steps, 2]`` that gather all units, and the last one reduces them.

    While a unit computes the next one is on its way, so that the slower of both counts, and what
    comes first or last has nothing to hide behind. Copies of a shard are summed after the rest.
    """
    num_ranks, num_steps, _ = compute.shape
    num_copies, units = num_ranks // sharers, model.num_units
    unit = gather(model.num_bytes / units, sharers, network)
    of_copies = all_reduce(model.num_bytes / units / sharers, num_copies, network)
    moved = torch.full_like(compute[0], units * unit.seconds)
    moved[-1, -1] *= 2  # reduce-scatters
    slowest = compute.unflatten(0, (num_copies, sharers)).amax(1)
    number = units * (2 * num_steps + 1)
    own = Cost(
        seconds=units * of_copies.seconds,
        collectives=number + (units if num_copies > 1 else 0),
        num_bytes=number * unit.num_bytes + units * of_copies.num_bytes,
        meetings=number if num_copies == 1 else 1,
        host_reads=0,
    )
    return torch.maximum(slowest, moved) + unit.seconds, own


def resample(times: Tensor, num_ranks: int, num_steps: int, key: Tensor) -> Tensor:
    """Measured ``[n, 2]`` seconds, drawn with replacement: ``[num_ranks, num_steps, 2]``."""
    return random.choice(key, times, (num_ranks, num_steps))
