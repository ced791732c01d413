"""The simulator of ``straggler``: fed with measured times, checked against measured ranks."""

import math
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from dspark_window import micro_step_seconds, setting
from measure import save, table
from rich.console import Console
from straggler import LAYOUTS, SCHEMES, Model, Network, ratio, resample, tax, window_cost
from torch import Tensor

from numden.dist import run_local
from numden.pure import random

RANKS = tuple(2**i for i in range(13))
STEPS = (1, 2, 4, 8, 16, 32, 64)


def measured_seconds(rounds: int) -> Tensor:
    """Of the micro-steps of one DSpark window, on one rank and undisturbed by others."""
    return run_local(lambda: micro_step_seconds(setting(0, 1), rounds), 1, timeout=600)[0]


def sleepers(compute: Tensor, scheme: str, rounds: int) -> list[float]:
    """Seconds of windows whose micro-steps sleep for given times, with real collectives.

    Four ranks on two cores would slow each other down if they computed; asleep they do not.
    """
    rank, seconds = c10d.get_rank(), []
    for _ in range(rounds):
        den, sums, grads = torch.ones(1), torch.ones(1035), torch.ones(100_000)
        c10d.barrier()
        start = time.perf_counter()
        for of_step in compute[rank].tolist():
            time.sleep(of_step)
            if scheme == "per micro-step":
                c10d.all_reduce(den)
                float(den)
        if scheme == "per window":
            c10d.all_reduce(sums)
        c10d.all_reduce(grads)
        c10d.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds


def validation(times: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Predicted and measured ratios of 2 and 4 ranks; the network is local, its time left out."""
    rows = []
    still = Network(0.0, math.inf)
    for num_ranks, num_steps in product((2, 4), (4, 16)):
        compute = resample(times, num_ranks, num_steps, random.key(num_ranks * num_steps))
        compute = compute * (0.02 / compute.mean())
        found, predicted = {}, {}
        for scheme in SCHEMES:
            by_rank = run_local(sleepers, num_ranks, compute, scheme, rounds, timeout=120)
            found[scheme] = min(by_rank[0])
            cost = window_cost(compute, scheme, "replicated", Model(), still)
            predicted[scheme] = cost.seconds
        rows.append(
            {
                "ranks": str(num_ranks),
                "micro-steps": str(num_steps),
                "predicted": predicted["per window"] / predicted["per micro-step"],
                "measured": found["per window"] / found["per micro-step"],
            }
        )
    return rows


def costs(times: Tensor, model: Model, network: Network) -> list[dict[str, Any]]:
    """What a window of 16 micro-steps takes, for some numbers of ranks."""
    rows = []
    for layout, num_ranks, scheme in product(LAYOUTS, (8, 512, 4096), SCHEMES):
        compute = resample(times, num_ranks, 16, random.key(num_ranks))
        cost = window_cost(compute, scheme, layout, model, network)
        rows.append(
            {
                "layout": layout,
                "ranks": str(num_ranks),
                "norm.": scheme.removeprefix("per "),
                "s": cost.seconds,
                "calls": str(cost.collectives),
                "GB": cost.num_bytes / 1e9,
                "meetings": str(cost.meetings),
                "reads": str(cost.host_reads),
            }
        )
    return rows


def measure(rounds: int, latency: float, bandwidth: float, out: Path, console: Console) -> None:
    """Measure micro-steps, simulate, validate, print, plot and save."""
    network, model = Network(latency, bandwidth), Model()
    with console.status("measuring micro-steps"):
        times = measured_seconds(rounds)
    spread = float(times.std() / times.mean())
    console.print(
        f"{len(times)} micro-steps of {float(times.mean()):.3f} s, deviating by {spread:.0%}; "
        f"{model.num_bytes / 1e9:.0f} GB of gradients, {latency * 1e6:.0f} us, "
        f"{bandwidth / 1e9:.0f} GB/s"
    )
    # By each rank's own: calls of collectives, gigabytes sent, meetings of all, host reads.
    with console.status("measuring ranks"):
        checked = validation(times, rounds)
    table("Time per window over time per micro-step: predicted and measured", checked, console)
    table("A window of 16 micro-steps", costs(times, model, network), console)
    grid = {
        layout: {n: [ratio(times, n, i, layout, model, network) for i in STEPS] for n in RANKS}
        for layout in LAYOUTS
    }
    for layout, by_ranks in grid.items():
        rows = [
            {"ranks": str(n), **{f"I={i}": v for i, v in zip(STEPS, values, strict=True)}}
            for n, values in by_ranks.items()
        ]
        table(f"{layout}: time per window over per micro-step, I micro-steps", rows, console)
    taxes = {n: [tax(resample(times, n, i, random.key(n + i))) for i in STEPS] for n in RANKS}
    save("simulate", {"validation": checked, "ratio": grid, "tax": taxes}, out)
    _plot(grid, out / "simulate.png")


def _plot(grid: dict[str, dict[int, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, len(grid), sharey=True)
    for axes, (layout, by_ranks) in zip(panels, grid.items(), strict=True):
        for i, num_steps in enumerate(STEPS):
            values = [values[i] for values in by_ranks.values()]
            axes.plot(list(by_ranks), values, ".-", label=f"{num_steps}")
        axes.set_xscale("log", base=2)
        axes.set(title=layout, xlabel="ranks")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("time, normalised per window / per micro-step")
    panels[0].legend(title="micro-steps")
    figure.savefig(path, dpi=110)
