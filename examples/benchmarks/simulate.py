"""The simulator with measured times of passes: 1 to 4096 ranks, 1 to 64 micro-steps."""

import math
from pathlib import Path
from statistics import mean, median
from typing import Any

import replay
import torch
from dspark_window import NUM_MICRO_STEPS
from measure import save, table
from per_micro_step import NUM_RANKS, by_round
from per_micro_step import run as run_dspark
from rich.console import Console
from rich.progress import track
from simulator import SCHEMES, SHARERS, Cost, Model, Network, resample, tax, window_cost
from torch import Tensor

from numden.dist import run_local
from numden.pure import random

RANKS = tuple(2**i for i in range(13))
STEPS = tuple(2**i for i in range(7))
DRAWS = 8
REPLAYED_SECONDS = 0.05
"""A micro-step of a replay: long against what it takes to wake up."""


def computes(times: Tensor, num_ranks: int, num_steps: int) -> list[Tensor]:
    """Windows of measured times, drawn by keys."""
    key = random.fold_in(random.fold_in(random.key(0), num_ranks), num_steps)
    return [resample(times, num_ranks, num_steps, each) for each in random.split(key, DRAWS)]


def simulate(times: Tensor, model: Model, network: Network) -> list[dict[str, Any]]:
    """A row for each number of ranks and of micro-steps, with means over the draws."""
    rows = []
    for num_ranks in track(RANKS, description="simulating"):
        for num_steps in STEPS:
            drawn = computes(times, num_ranks, num_steps)
            row = {"ranks": num_ranks, "micro-steps": num_steps, "tax": mean(map(tax, drawn))}
            for layout, sharers in SHARERS.items():
                row[layout] = {
                    scheme: _mean([window_cost(d, scheme, sharers, model, network) for d in drawn])
                    for scheme in SCHEMES
                }
            rows.append(row)
    return rows


def _mean(costs: list[Cost]) -> Cost:
    return costs[0]._replace(seconds=mean(cost.seconds for cost in costs))


def ratio(row: dict[str, Any], layout: str) -> float:
    """Time of summing once over that of summing in each micro-step."""
    return row[layout]["per window"].seconds / row[layout]["per micro-step"].seconds


def predicted(compute: Tensor, layout: str, besides: dict[str, float]) -> float:
    """The same ratio of one window, from how long ranks wait, and what takes time besides."""
    free = Network(latency=0.0, bandwidth=math.inf, host_read=0.0)
    often, once = (
        window_cost(compute, scheme, SHARERS[layout], Model(), free).seconds + besides[scheme]
        for scheme in SCHEMES
    )
    return once / often


def validate_replayed(times: Tensor, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Measured and predicted on ranks that sleep as long as measured passes took."""
    scaled = times * REPLAYED_SECONDS / times.sum(1).mean()
    compute = resample(scaled, num_ranks, NUM_MICRO_STEPS, random.key(num_ranks))
    found = run_local(replay.on_rank, num_ranks, compute, rounds, timeout=300)[0]
    empty = {k: {s: median(found.empty[k][s]) for s in SCHEMES} for k in replay.LAYOUTS}
    return [
        {
            "run": f"{num_ranks} ranks that sleep, {layout}",
            "predicted": predicted(compute, layout, empty[layout]),
            **_measured(found.seconds[layout]),
            "tax": tax(compute),
        }
        for layout in replay.LAYOUTS
    ]


def _measured(seconds: dict[str, list[float]]) -> dict[str, float]:
    ratios = by_round(seconds)
    return {"measured": median(ratios), "least": min(ratios), "most": max(ratios)}


def measure(
    rounds: int, seconds: float, model: Model, network: Network, out: Path, console: Console
) -> None:
    """Measure times of passes, simulate, validate, print, plot and save."""
    with console.status(f"DSpark on {NUM_RANKS} ranks"):
        found = run_dspark(rounds)
    by_rank = torch.stack([each.passes for each in found])  # [ranks, rounds, micro-steps, 2]
    times = by_rank.flatten(0, 2)
    compared = [_computing(found[0].seconds, by_rank)]
    for num_ranks in (2, 4):
        with console.status(f"replaying on {num_ranks} ranks"):
            compared += validate_replayed(times, num_ranks, rounds)
    scaled = times * seconds / times.sum(1).mean()
    rows = simulate(scaled, model, network)
    _print(rows, times, compared, console)
    save("simulate", {"passes": times.tolist(), "validation": compared, "rows": _plain(rows)}, out)
    _plot(rows, compared, out / "simulate.png")


def _computing(seconds: dict[str, list[float]], by_rank: Tensor) -> dict[str, Any]:
    """The DSpark window itself, of which all but computing takes next to nothing."""
    nothing: dict[str, float] = dict.fromkeys(SCHEMES, 0.0)
    rounds = by_rank.transpose(0, 1)
    return {
        "run": f"{NUM_RANKS} ranks that compute, replicated",
        "predicted": median(predicted(each, "replicated", nothing) for each in rounds),
        **_measured(seconds),
        "tax": median(map(tax, rounds)),
    }


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        row | {layout: {s: c._asdict() for s, c in row[layout].items()} for layout in SHARERS}
        for row in rows
    ]


def _print(
    rows: list[dict[str, Any]], times: Tensor, compared: list[dict[str, Any]], console: Console
) -> None:
    each = times.sum(1)
    console.print(
        f"{len(times)} measured micro-steps: {float(each.mean()):.3f} s on average, deviation "
        f"{float(each.std() / each.mean()):.1%}, the longest {float(each.max() / each.mean()):.2f} "
        f"times the average"
    )
    shown = [row for row in rows if row["micro-steps"] == NUM_MICRO_STEPS]
    table(
        "Straggler tax of I micro-steps: Σ of maxima over maximum of sums", _by_steps(rows), console
    )
    table(
        f"{NUM_MICRO_STEPS} micro-steps: time, summed once over in each",
        [{"ranks": str(row["ranks"]), **{k: ratio(row, k) for k in SHARERS}} for row in shown],
        console,
    )
    table(f"{NUM_MICRO_STEPS} micro-steps, {RANKS[-1]} ranks", _counts(shown[-1]), console)
    table("Ratio of time, predicted and measured", compared, console)


def _by_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_ranks: dict[int, dict[str, Any]] = {}
    for row in rows:
        mine = by_ranks.setdefault(row["ranks"], {"ranks": str(row["ranks"])})
        mine[f"I = {row['micro-steps']}"] = row["tax"]
    return list(by_ranks.values())


def _counts(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "layout": layout,
            "summed": scheme,
            "collectives": f"{cost.collectives:,}",
            "GB sent": cost.num_bytes / 1e9,
            "meetings": f"{cost.meetings:,}",
            "host reads": str(cost.host_reads),
            "seconds": cost.seconds,
        }
        for layout in SHARERS
        for scheme, cost in row[layout].items()
    ]


def _plot(rows: list[dict[str, Any]], compared: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for num_steps in STEPS:
        by_ranks = [row["tax"] for row in rows if row["micro-steps"] == num_steps]
        left.plot(RANKS, by_ranks, ".-", label=f"{num_steps}")
    left.set(title="Straggler tax", ylabel="Σ of maxima / maximum of sums")
    shown = [row for row in rows if row["micro-steps"] == NUM_MICRO_STEPS]
    for layout in SHARERS:
        middle.plot(RANKS, [ratio(row, layout) for row in shown], ".-", label=layout)
    middle.set(title=f"Time of a window, {NUM_MICRO_STEPS} micro-steps")
    middle.set_ylabel("summed once / in each micro-step")
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.legend(fontsize="small", title="micro-steps" if axes is left else None)
    for place, row in enumerate(compared):
        spread = [[row["measured"] - row["least"]], [row["most"] - row["measured"]]]
        right.errorbar([row["measured"]], [place], xerr=spread, fmt="o", color="C0", capsize=3)
        right.plot([row["predicted"]], [place], "x", color="C3", markersize=9)
    right.set_yticks(range(len(compared)), [row["run"] for row in compared], fontsize="small")
    right.set(title="The same ratio, × predicted, • measured", xlabel="ratio")
    figure.savefig(path, dpi=110)
