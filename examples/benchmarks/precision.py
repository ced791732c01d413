"""The rounding error of accumulated gradients against the number of micro-steps.

    error = max |gradient - exact| / mean |addend|,    bound = (n + 1) u

over the elements of the gradient, n micro-steps, u the unit roundoff of the accumulators. The loss
is linear, so that each addend is exact and nothing rounds but its accumulation.
"""

import math
from pathlib import Path
from typing import Any

import torch
from measure import save, table
from rich.console import Console
from rich.progress import track
from torch import Tensor

from numden.pure import LossTerms, window_grad

STEPS = tuple(2**i for i in range(10))
WIDTH = 256
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
ACCUMULATORS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32 of bfloat16": (torch.bfloat16, torch.float32),
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
}
"""Dtypes of params, and so of addends, and of accumulators."""

ADDENDS = {"of either sign": lambda x: x, "positive": torch.abs}

Errors = dict[str, dict[int, float]]
"""By accumulators and number of micro-steps."""


def linear(w: Tensor, x: Tensor) -> LossTerms:
    """Its gradient is the input, exactly."""
    return LossTerms((w * x).to(torch.promote_types(x.dtype, torch.float32)).sum(), 1)


def error(xs: Tensor, dtype: torch.dtype) -> float:
    """The error of the mean of ``xs``, ``[n, WIDTH]``, that are accumulated in ``dtype``."""
    w = torch.ones(WIDTH, dtype=xs.dtype)
    found = window_grad(linear, plan="after", accumulate_dtype=dtype)(w, xs).grads.double()
    sums = torch.tensor([math.fsum(column) for column in xs.T.tolist()], dtype=torch.float64)
    return float(((found * len(xs) - sums).abs() / xs.double().abs().sum(0)).max())


def errors(positive: Any) -> Errors:
    """Errors of all accumulators for each number of micro-steps."""
    found: Errors = {name: {} for name in ACCUMULATORS}
    for n in track(STEPS, description="micro-steps"):
        keys = torch.Generator().manual_seed(n)
        xs = positive(torch.randn(n, WIDTH, generator=keys, dtype=torch.float64))
        for name, (dtype, accumulate_dtype) in ACCUMULATORS.items():
            found[name][n] = error(xs.to(dtype), accumulate_dtype)
    return found


def measure(threads: int, out: Path, console: Console) -> None:
    """Measure, print, plot and save."""
    torch.set_num_threads(threads)
    found = {kind: errors(positive) for kind, positive in ADDENDS.items()}
    for kind, by_name in found.items():
        in_units = {name: _in_units(name, by_n) for name, by_n in by_name.items()}
        table(f"Error of the gradient, addends {kind}", _rows(by_name), console)
        table("The same in units of u; the bound is n + 1", _rows(in_units), console)
    save("precision", found, out)
    _plot(found, out / "precision.png")


def _in_units(name: str, by_n: dict[int, float]) -> dict[int, float]:
    return {n: off / UNIT[ACCUMULATORS[name][1]] for n, off in by_n.items()}


def _rows(errors: Errors) -> list[dict[str, Any]]:
    return [{"micro-steps": str(n), **{k: by_n[n] for k, by_n in errors.items()}} for n in STEPS]


def _plot(found: dict[str, Errors], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (kind, by_name) in zip(
        figure.subplots(1, len(found), sharey=True), found.items(), strict=True
    ):
        axes.plot(STEPS, [n + 1 for n in STEPS], "--", color="black", label="bound, n + 1")
        axes.plot(STEPS, [n**0.5 for n in STEPS], ":", color="black", label="√n")
        for name, by_n in by_name.items():
            shown = [off or math.nan for off in _in_units(name, by_n).values()]  # log of 0
            axes.plot(STEPS, shown, ".-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=f"addends {kind}", xlabel="micro-steps n")
    figure.axes[0].set_ylabel("error of the gradient, in units of u")
    figure.axes[0].legend()
    figure.savefig(path, dpi=110)
