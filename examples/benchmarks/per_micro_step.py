"""Normalised once per window against once per micro-step: a DSpark window on two ranks."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as c10d
from dspark_window import NUM_MICRO_STEPS, VARIANTS, Setting, setting
from measure import save, table
from rich.console import Console

from numden.dist import run_local
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.pure import tree

NUM_RANKS = 2


def on_rank(rounds: int) -> dict[str, Any]:
    """Seconds of each round, in turn, and what a window of each variant calls."""
    rank, num_ranks = c10d.get_rank(), c10d.get_world_size()
    each = setting(rank, num_ranks)
    steps = {name: make(each) for name, make in VARIANTS.items()}
    grads = {name: step() for name, step in steps.items()}  # the round that does not count
    apart = [
        float((a - b).norm() / b.norm().clamp(min=1e-30))
        for a, b in zip(*(tree.leaves(grads[name]) for name in steps), strict=True)
    ]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            c10d.barrier()
            start = time.perf_counter()
            step()
            c10d.barrier()
            times[name].append(time.perf_counter() - start)
    calls = {name: _calls(each, make) for name, make in VARIANTS.items()}
    return {"seconds": times, "calls": calls, "apart": max(apart)}


def _calls(each: Setting, make: Callable[[Setting], Any]) -> dict[str, float]:
    """Collectives of a window, and how often the host reads a value for each micro-step more."""
    with count_collectives() as collectives:
        make(each)()
    reads = []
    half = each._replace(window=each.window[: len(each.window) // 2])
    for window in (half, each):
        with count_host_syncs() as counted:
            make(window)()
        reads.append(counted.total())
    more = len(each.window) - len(half.window)
    return {
        "collectives": collectives.total(),
        "host reads a micro-step": (reads[1] - reads[0]) / more,
    }


def measure(rounds: int, out: Path, console: Console) -> None:
    """Measure, print and save."""
    with console.status(f"{rounds} rounds on {NUM_RANKS} ranks"):
        found = run_local(on_rank, NUM_RANKS, rounds, timeout=900)[0]
    times, base = found["seconds"], "per micro-step"
    rows = []
    for name, values in times.items():
        by_round = [a / b for a, b in zip(values, times[base], strict=True)]
        rows.append(
            {
                "normalised": name,
                "time": median(by_round),
                "least": min(by_round),
                "most": max(by_round),
                "seconds": median(values),
                **found["calls"][name],
            }
        )
    title = f"DSpark, {NUM_MICRO_STEPS} ragged micro-steps on {NUM_RANKS} ranks: ratios of time"
    table(title, rows, console)
    off = f"{found['apart']:.1%}"
    console.print(f"The mean of micro-step means is off by up to {off} in a parameter's gradient.")
    save("ranks", {"rows": rows, **found}, out)
