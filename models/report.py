"""What ``numden train`` found out: printed as tables, written as JSON and a plot."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from .decoding import Decoded
from .job import Decodings
from .train_config import TrainConfig

__all__ = ["Report", "figures", "print_report", "write_report"]


class Report(NamedTuple):
    """The results of a run.

    Attributes:
        config: how it was made.
        target: records of the target's training.
        drafter: records of the drafter's, by run; the last is the one on one rank.
        decoded: one for each prompt.
        receipt: see ``receipt.receipt``.
        text: from tokens to text.
    """

    config: TrainConfig
    target: list[Any]
    drafter: dict[str, list[Any]]
    decoded: list[Decodings]
    receipt: dict[str, dict[str, float]]
    text: Callable[[Sequence[int]], str]


def figures(report: Report) -> dict[str, Any]:
    """All figures, as plain numbers and texts."""
    names = list(report.decoded[0].by_drafter)
    return {
        "config": asdict(report.config),
        "target": [record._asdict() for record in report.target],
        "drafter": {run: [r._asdict() for r in rs] for run, rs in report.drafter.items()},
        "final_loss": {run: records[-1].loss for run, records in report.drafter.items()},
        "accepted_length": {name: _accepted_length(report, name) for name in names},
        "accepted_counts": {name: _counts(report, name) for name in names},
        "decoded_tokens": sum(len(tokens) for each in report.decoded for tokens in each.plain),
        "equal_to_target": {name: _num_equal(report, name) for name in names},
        "receipt": report.receipt,
        "sample": report.text(report.decoded[0].plain[0].tolist()),
    }


def _accepted(report: Report, name: str) -> list[int]:
    return [n for each in report.decoded for d in each.by_drafter[name] for n in d.accepted]


def _accepted_length(report: Report, name: str) -> float:
    """Tokens that a target step gives: those accepted of the draft, and the target's own."""
    return Decoded(torch.empty(0), _accepted(report, name)).tau


def _counts(report: Report, name: str) -> list[int]:
    return torch.bincount(torch.tensor(_accepted(report, name), dtype=torch.int64)).tolist()


def _num_equal(report: Report, name: str) -> int:
    return sum(
        int((plain == speculative.tokens).sum())
        for each in report.decoded
        for plain, speculative in zip(each.plain, each.by_drafter[name], strict=True)
    )


def print_report(report: Report, console: Console) -> None:
    """Print the three tables that a reader wants first."""
    found = figures(report)
    console.print()
    console.print(_decoding_table(found))
    console.print(_receipt_table(found["receipt"]))
    console.print(_losses_table(found["final_loss"]))
    means = found["receipt"]["mean of means"]["gradient"]
    exact = max(row["gradient"] for n, row in found["receipt"].items() if n != "mean of means")
    console.print(
        f"However the window is cut, its gradient is the same to [bold]{exact:.1e}[/]; the mean of "
        f"micro-step means is off by [bold]{means:.1e}[/]."
    )


def _decoding_table(found: dict[str, Any]) -> Table:
    table = Table(title="Speculative decoding of held-out text", title_justify="left")
    for header in ("drafter", "accepted length", "tokens equal to the target's own"):
        table.add_column(header, justify="left" if header == "drafter" else "right")
    for name, length in found["accepted_length"].items():
        equal = f"{found['equal_to_target'][name]} of {found['decoded_tokens']}"
        table.add_row(name, f"{length:.2f}", equal)
    return table


def _receipt_table(rows: dict[str, dict[str, float]]) -> Table:
    title = "Exactness receipt: one window, in float64"
    table = Table(title=title, title_justify="left")
    for header in ("ranks x micro-steps", "loss", "gradient off by"):
        table.add_column(header, justify="left" if header.startswith("ranks") else "right")
    for name, row in rows.items():
        style = "red" if name == "mean of means" else None
        gradient = f"{row['gradient']:.1e}" if row["gradient"] else "0"
        table.add_row(name, f"{row['loss']:.12f}", gradient, style=style)
    return table


def _losses_table(losses: dict[str, float]) -> Table:
    table = Table(title="The drafter, trained on the same windows", title_justify="left")
    table.add_column("run, in float32")
    table.add_column("loss of the last window", justify="right")
    for run, loss in losses.items():
        table.add_row(run, f"{loss:.6f}")
    return table


def write_report(report: Report, folder: Path) -> None:
    """Write ``report.json`` and ``report.png`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    found = figures(report)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    _plot(report, found, folder / "report.png")


def _plot(report: Report, found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    losses, terms, accepted = figure.subplots(1, 3)
    _plot_losses(losses, report)
    _plot_terms(terms, next(iter(report.drafter.values())))
    _plot_accepted(accepted, found)
    figure.savefig(path, dpi=110)


def _plot_losses(axes: Any, report: Report) -> None:
    for style, (run, records) in zip(("-", "--"), report.drafter.items(), strict=False):
        axes.plot([r.step for r in records], [r.loss for r in records], style, label=run)
    axes.set(title="Drafter: the window's loss", xlabel="window", ylabel="loss")
    axes.legend()


def _plot_terms(axes: Any, records: list[Any]) -> None:
    known = list(records[0].metrics) if records else []
    names = [name for name in known if name.endswith("_loss")] or known[:1]
    curves = {name: [record.metrics[name] for record in records] for name in names}
    for name, values in curves.items():
        axes.plot([record.step for record in records], values, label=name.removesuffix("_loss"))
    axes.set(title="Drafter: metrics, each over its den", xlabel="window")
    if curves and all(value > 0 for values in curves.values() for value in values):
        axes.set_yscale("log")
    if curves:
        axes.legend()


def _plot_accepted(axes: Any, found: dict[str, Any]) -> None:
    names, lengths = list(found["accepted_length"]), list(found["accepted_length"].values())
    bars = axes.barh(names, lengths, color=["tab:gray", *["tab:blue"] * (len(names) - 1)])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(title="Tokens for each target step", xlabel="1 = no drafted token accepted")
    axes.margins(x=0.15)
