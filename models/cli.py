"""``numden train``: a target and a drafter on text, on one rank or several.

This is the one file of the models that knows about ranks: it decides what runs where.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from ._extras import require
from .commands.ranks import Ranks
from .commands.saved import checkpoints_of
from .commands.setup import set_up
from .commands.train import Stopped, console, run
from .report import print_report, write_report
from .train_config import TrainConfig, load_config, with_overrides

__all__ = ["app"]

app = typer.Typer(
    name="numden",
    help="Training losses as ratios of sums: sums first, one division, SUM-reduced gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_SIGTERM = 143  # as shells have it


@app.callback()
def numden() -> None:
    """Training losses as ratios of sums: sums first, one division, SUM-reduced gradients."""


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="A YAML or TOML file; its keys are strict.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where the figures and the plot go.", file_okay=False)
    ] = Path("runs/demo"),
    model: Annotated[
        str | None, typer.Option(help="The kind of drafter (drafter.model of the file).")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks on this machine (run.ranks of the file).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of every draw (run.seed of the file).")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A key of the file, such as drafter.num_windows=20.", metavar="KEY=VALUE"
        ),
    ] = None,
) -> None:
    """Train a target decoder and a drafter, decode with both, and check the gradient.

    Without a file it trains on the sources of Python's standard library for a few minutes. Under
    torchrun it runs on torchrun's ranks. In the end it prints, and writes to the output folder, how
    many drafted tokens the target accepts, and how far the gradient of one window is from the
    whole batch's when the window is cut into micro-steps and ranks.

    With run.save_every it keeps checkpoints in the output folder, and the same command goes on from
    the last one, on any number of ranks; on SIGTERM it stops with one.

    The keys of the file are documented in numden.models.train_config.
    """
    with _one_line_errors():
        require("matplotlib", "numden train")  # now, not when all is trained
        settings = load_config(config) if config else TrainConfig()
        short = {"drafter.model": model, "run.ranks": ranks, "run.seed": seed}
        flags = [f"{name}={value}" for name, value in short.items() if value is not None]
        setup = set_up(with_overrides(settings, [*flags, *(override or [])]))
        out.mkdir(parents=True, exist_ok=True)
        saved = checkpoints_of(setup.config, out)
    torch.set_num_threads(1)  # a rank is one thread
    with Ranks(setup.config.run.ranks) as on_ranks:
        try:
            report = run(setup, on_ranks, saved)
        except Stopped:
            typer.echo("numden train: stopped by SIGTERM; the same command goes on", err=True)
            raise typer.Exit(_SIGTERM) from None
        if on_ranks.is_first:
            print_report(report, console)
            write_report(report, out)
            console.print(f"\nFigures and plot: [bold]{out}[/]")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What is wrong with the configuration, or the files that it names, ends in one line."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"numden train: {error}", err=True)
        raise typer.Exit(2) from error
