"""Benchmarks: each prints a table of ratios measured in one run, and writes JSON."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help=__doc__, add_completion=False)
console = Console()
Out = Annotated[Path, typer.Option(help="Where the JSON goes.")]
Threads = Annotated[int, typer.Option(help="Threads of torch.")]


@app.command()
def window(rounds: int = 7, threads: Threads = 2, out: Out = Path("runs/benchmarks")) -> None:
    """window_grad against the hand-written loop with known dens: time and peak memory."""
    from against_loop import measure

    measure(rounds, threads, out, console)


@app.command()
def trainer(rounds: int = 3, threads: Threads = 2, out: Out = Path("runs/benchmarks")) -> None:
    """A whole training step against transformers' Trainer: same model, data and optimizer."""
    from against_trainer import measure

    measure(rounds, threads, out, console)


@app.command()
def scaling(rounds: int = 7, threads: Threads = 2, out: Out = Path("runs/benchmarks")) -> None:
    """The cost of a window against its number of micro-steps and of terms."""
    from scaling import measure

    measure(rounds, threads, out, console)


@app.command()
def precision(threads: Threads = 2, out: Out = Path("runs/benchmarks")) -> None:
    """The rounding error of accumulated gradients against the number of micro-steps."""
    from precision import measure

    measure(threads, out, console)


@app.command()
def ranks(rounds: int = 9, out: Out = Path("runs/benchmarks")) -> None:
    """A DSpark window on two ranks: denominators summed once, and summed in each micro-step."""
    from per_micro_step import measure

    measure(rounds, out, console)


@app.command()
def simulate(
    rounds: int = 5,
    seconds: Annotated[float, typer.Option(help="Of a micro-step, on average.")] = 0.25,
    gigabytes: Annotated[float, typer.Option(help="Of all parameters.")] = 2.0,
    units: Annotated[int, typer.Option(help="That FSDP2 gathers, one by one.")] = 32,
    latency: Annotated[float, typer.Option(help="Of a message, in seconds.")] = 10e-6,
    bandwidth: Annotated[float, typer.Option(help="From rank to rank, in bytes/s.")] = 25e9,
    host_read: Annotated[float, typer.Option(help="That a host read costs, in seconds.")] = 20e-6,
    out: Out = Path("runs/benchmarks"),
) -> None:
    """1 to 4096 ranks and 1 to 64 micro-steps on paper, from measured times of micro-steps."""
    from simulate import measure
    from simulator import Model, Network

    model, network = Model(gigabytes * 1e9, units), Network(latency, bandwidth, host_read)
    measure(rounds, seconds, model, network, out, console)


@app.command()
def fsdp(rounds: int = 9, out: Out = Path("runs/benchmarks")) -> None:
    """FSDP2 by window_grad against a hand-written loop on two ranks: time and peak memory."""
    from against_fsdp import measure

    measure(rounds, out, console)


@app.command(name="all")
def everything(threads: Threads = 2, out: Out = Path("runs/benchmarks")) -> None:
    """All of them, with their default rounds."""
    for benchmark in (window, scaling, trainer, precision):
        benchmark(threads=threads, out=out)
    for benchmark in (ranks, fsdp, simulate):
        benchmark(out=out)


if __name__ == "__main__":
    app()
