"""Denominators summed once per window against once per micro-step: a DSpark window on two ranks."""

import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from dspark_window import NUM_MICRO_STEPS, Setting, pass_seconds, setting
from measure import save, table
from normalising import Step, apart, calls, per_micro_step, per_window
from rich.console import Console
from torch import Tensor

from numden.dist import run_local

NUM_RANKS = 2
ROUNDING = 1e-4
"""Of gradients that are summed in float32 in another order, and cancel."""


class Found(NamedTuple):
    """What one rank found.

    Attributes:
        seconds: of each round, by variant.
        passes: seconds ``[rounds, micro-steps, 2]`` of forward and backward passes without meeting.
        calls: collectives and host reads of a window, by variant.
        apart: how far the gradients of the two ways are from each other, with micro-steps weighted
            by their denominators.
        mean_of_means: the same, with micro-steps that count alike, as trainers have them.
    """

    seconds: dict[str, list[float]]
    passes: Tensor
    calls: dict[str, dict[str, int]]
    apart: float
    mean_of_means: float


def on_rank(each: Setting, rounds: int) -> Found:
    """Both ways in turn, after a round that does not count."""
    window = each.windows[c10d.get_rank()]
    problem = each.loss_fn, each.config.alphas, each.params, window
    steps: dict[str, Step] = {
        "per micro-step": per_micro_step(*problem),
        "per window": per_window(*problem),
    }
    often, once = (step() for step in steps.values())
    weighted = per_micro_step(*problem, importance=lambda den: den)()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    passes = []
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(in_step(step))
        c10d.barrier()
        passes.append(pass_seconds(each, window))
    counted = {name: calls(step) for name, step in steps.items()}
    return Found(seconds, torch.stack(passes), counted, apart(weighted, once), apart(often, once))


def in_step(run: Step) -> float:
    """Seconds from when all ranks start to when all have finished."""
    c10d.barrier()
    start = time.perf_counter()
    run()
    c10d.barrier()
    return time.perf_counter() - start


def run(rounds: int) -> list[Found]:
    """On all ranks."""
    torch.set_num_threads(1)
    return run_local(on_rank, NUM_RANKS, setting(NUM_RANKS), rounds, timeout=600)


def by_round(seconds: dict[str, list[float]]) -> list[float]:
    """Time of summing once over that of summing in each micro-step."""
    pairs = zip(seconds["per window"], seconds["per micro-step"], strict=True)
    return [once / often for once, often in pairs]


def measure(rounds: int, out: Path, console: Console) -> None:
    """Measure, print and save."""
    with console.status(f"{rounds} rounds on {NUM_RANKS} ranks"):
        found = run(rounds)[0]
    table(
        f"DSpark, {NUM_MICRO_STEPS} ragged micro-steps on {NUM_RANKS} ranks",
        [
            {"denominators summed": name, "seconds": median(times), **found.calls[name]}
            for name, times in found.seconds.items()
        ],
        console,
    )
    ratios = by_round(found.seconds)
    console.print(
        f"Per window over per micro-step: {median(ratios):.3f} of the time, from {min(ratios):.3f} "
        f"to {max(ratios):.3f} in {rounds} rounds.\n"
        f"Gradients are {found.apart:.0e} apart, with micro-steps weighted by their denominators. "
        f"Weighted alike, a parameter's is {found.mean_of_means:.1%} off."
    )
    assert found.apart < ROUNDING
    shown: dict[str, Any] = found._asdict() | {"passes": found.passes.tolist(), "ratios": ratios}
    save("ranks", shown, out)
