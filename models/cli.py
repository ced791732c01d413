"""``numden train``: a target and a DSpark drafter on text, on one rank or several.

This is the one file of the models that knows about ranks: it decides what runs where.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as c10d
import typer
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from .. import dist, pure
from ..dist import Record
from ..pure import WindowGrad, optim, tree
from . import dspark, job
from ._extras import require
from .decoder import Config
from .job_rows import Corpus, read_corpus
from .module import as_module, as_params
from .receipt import receipt
from .report import Report, print_report, write_report
from .train_config import TrainConfig, load_config, with_overrides

__all__ = ["app"]

app = typer.Typer(
    name="numden",
    help="Training losses as ratios of sums: sums first, one division, SUM-reduced gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

_WEEK = 7 * 24 * 3600.0


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
    """Train a target decoder and a DSpark drafter, decode with both, and check the gradient.

    Without a file it trains on the sources of Python's standard library for a few minutes. Under
    torchrun it runs on torchrun's ranks. In the end it prints, and writes to the output folder, how
    many drafted tokens the target accepts, and how far the gradient of one window is from the
    whole batch's when the window is cut into micro-steps and ranks.

    The keys of the file are documented in numden.models.train_config.
    """
    with _one_line_errors():
        require("matplotlib", "numden train")  # now, not when all is trained
        settings = load_config(config) if config else TrainConfig()
        short = {"run.ranks": ranks, "run.seed": seed}
        flags = [f"{name}={value}" for name, value in short.items() if value is not None]
        setup = _set_up(with_overrides(settings, [*flags, *(override or [])]))
        out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a rank is one thread
    with _Ranks(setup.config.run.ranks) as on_ranks:
        report = _run(setup, on_ranks)
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


class _Setup(NamedTuple):
    """What all steps of the command work with."""

    config: TrainConfig
    corpus: Corpus
    shape: Config
    drafter: dspark.Config


def _set_up(config: TrainConfig) -> _Setup:
    corpus = read_corpus(config)
    shape = job.target_config(config, corpus.tokenizer.vocab_size)
    drafter = job.drafter_config(config, shape, corpus.tokenizer.special_ids["mask"])
    return _Setup(config, corpus, shape, drafter)


class _Ranks:
    """Runs functions on ranks: forks of this process, or the ranks that torchrun started."""

    def __init__(self, num_ranks: int) -> None:
        self.launched = c10d.is_torchelastic_launched()
        self.num_ranks = int(os.environ["WORLD_SIZE"]) if self.launched else num_ranks

    def __enter__(self) -> "_Ranks":
        if self.launched:
            c10d.init_process_group()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.launched:
            c10d.destroy_process_group()

    @property
    def name(self) -> str:
        """What a run on the ranks is called, beside one without ranks."""
        return f"{self.num_ranks} ranks" if self.num_ranks > 1 else "1 rank with FSDP2"

    @property
    def is_first(self) -> bool:
        """Whether this process is to print."""
        return not self.launched or c10d.get_rank() == 0

    def __call__(self, fun: Callable[..., Any], *args: Any) -> list[Any]:
        """``fun(*args)`` on each rank; the results by rank, or under torchrun this rank's alone."""
        if self.launched:
            return [fun(*args)]
        return dist.run_local(fun, self.num_ranks, *args, timeout=_WEEK)


class Trained(NamedTuple):
    """Whole params after training, on each rank the same, and the records."""

    params: Any
    records: list[Record]


def _run(setup: _Setup, on_ranks: _Ranks) -> Report:
    config, drafter = setup.config, setup.drafter
    _say(on_ranks, _corpus_text(setup.corpus))
    target = on_ranks(_train_target, setup)[0]
    if config.drafter.features:
        _say(on_ranks, f"Writing the target's hidden states to {config.drafter.features}")
        on_ranks(_save_states, setup, target.params)
        setup = setup._replace(corpus=job.read_states(config, setup.corpus))
    by_ranks = on_ranks(_train_drafter, setup, target.params)[0]
    alone = _train_drafter_alone(setup, target.params)
    drafters = {
        "untrained": job.drafter_init(config, drafter),
        "1 rank": alone.params,
        on_ranks.name: by_ranks.params,
    }
    _say(on_ranks, "Decoding held-out text with the target alone and with each drafter")
    decoded = on_ranks(_decode, setup, target.params, drafters)
    _say(on_ranks, "Computing one window's gradient in different ways, in float64")
    return Report(
        config=config,
        target=target.records,
        drafter={on_ranks.name: by_ranks.records, "1 rank": alone.records},
        decoded=_gathered(decoded),
        receipt=_receipt(setup, target.params, by_ranks.params, on_ranks),
        text=setup.corpus.tokenizer.decode,
    )


def _say(on_ranks: _Ranks, text: str) -> None:
    if on_ranks.is_first:
        console.print(text)


def _corpus_text(corpus: Corpus) -> str:
    num_tokens = sum(len(row.tokens) for row in corpus.rows)
    return (
        f"{len(corpus.rows):,} rows with {num_tokens:,} tokens of a vocabulary of "
        f"{corpus.tokenizer.vocab_size:,}, and {len(corpus.held_out)} rows held out"
    )


def _rank() -> tuple[int, int]:
    return c10d.get_rank(), c10d.get_world_size()


def _sharded(params: Any) -> Any:
    """FSDP2 over the params of a model, each block on its own."""
    module = as_module(lambda params: params, tree.map(Tensor.clone, params))
    for layer in module["layers"]:
        fully_shard(layer)
    return fully_shard(module)


def _whole(module: Any) -> Any:
    return dist.gather(as_params(module))


def _optimizer(config: TrainConfig, lr: float, num_windows: int) -> optim.Optimizer:
    return optim.chain(
        optim.clip_by_global_norm(config.run.max_norm, sum_squares=dist.sum_of_squares),
        optim.from_torch(torch.optim.AdamW, lr=job.one_cycle(lr, num_windows), weight_decay=0.01),
    )


def _fit(
    config: TrainConfig,
    label: str,
    grad: Callable[[Any, Any], WindowGrad],
    params: Any,
    windows: Any,
    num_windows: int,
    lr: float,
) -> tuple[Any, list[Record]]:
    optimizer = _optimizer(config, lr, num_windows)
    step = dist.train_step(grad, optimizer, donate=True)
    state, records = dist.fit(
        step,
        dist.init_state(params, optimizer),
        windows,
        num_windows=num_windows,
        log_every=config.run.log_every,
        label=label,
    )
    return state.params, records


def _train_target(setup: _Setup) -> Trained:
    rank, num_ranks = _rank()
    config, shape = setup.config, setup.shape
    grad = dist.window_grad(job.target_loss(shape))
    module = _sharded(job.target_init(config, shape))
    windows = job.target_windows(config, setup.corpus, rank, num_ranks)
    target = config.target
    label = f"target, {num_ranks} ranks"
    module, records = _fit(config, label, grad, module, windows, target.num_windows, target.lr)
    return Trained(_whole(module), records)


def _save_states(setup: _Setup, target: Any) -> None:
    job.save_states(*setup, target, *_rank())
    c10d.barrier()  # before they are read


def _train_drafter(setup: _Setup, target: Any) -> Trained:
    """On ranks: an FSDP2 module, its gradients reduced by SUM."""
    rank, num_ranks = _rank()
    config, drafter = setup.config, setup.drafter
    grad = dist.window_grad(job.drafter_loss(drafter, target), dspark.objective(drafter))
    module = _sharded(job.drafter_init(config, drafter))
    windows = job.drafter_windows(*setup, target, rank, num_ranks)
    options = config.drafter
    label = f"DSpark, {num_ranks} ranks"
    module, records = _fit(config, label, grad, module, windows, options.num_windows, options.lr)
    return Trained(_whole(module), records)


def _train_drafter_alone(setup: _Setup, target: Any) -> Trained:
    """On one rank: a pytree of params and no process group. The same windows."""
    config, drafter = setup.config, setup.drafter
    grad = pure.window_grad(job.drafter_loss(drafter, target), dspark.objective(drafter))
    params = tree.map(Tensor.clone, job.drafter_init(config, drafter))
    windows = job.drafter_windows(*setup, target)
    options = config.drafter
    params, records = _fit(
        config, "DSpark, 1 rank", grad, params, windows, options.num_windows, options.lr
    )
    return Trained(params, records)


def _decode(
    setup: _Setup, target: Any, drafters: dict[str, Any]
) -> list[tuple[int, job.Decodings]]:
    """This rank's share of the prompts, each with its number."""
    rank, num_ranks = _rank()
    config, corpus, shape, drafter = setup
    rows = corpus.held_out[: config.run.prompts]
    numbers = range(rank, len(rows), num_ranks)
    prompts = [[rows[i].tokens[: config.data.min_length]] for i in numbers]
    new_tokens = config.run.new_tokens
    decoded = [
        job.decode(prompt, target, shape, drafters, drafter, new_tokens=new_tokens)
        for prompt in prompts
    ]
    return list(zip(numbers, decoded, strict=True))


def _gathered(shares: list[list[tuple[int, job.Decodings]]]) -> list[job.Decodings]:
    """The decodings of all prompts, in their order."""
    if c10d.is_initialized():
        everyone: list[Any] = [None] * c10d.get_world_size()
        c10d.all_gather_object(everyone, shares[0])
        shares = everyone
    by_number = dict(pair for share in shares for pair in share)
    return [by_number[number] for number in sorted(by_number)]


def _receipt(
    setup: _Setup, target: Any, params: Any, on_ranks: _Ranks
) -> dict[str, dict[str, float]]:
    target, params = tree.map(Tensor.double, (target, params))
    window = next(job.drafter_windows(*setup, target))
    loss_fn, objective = job.drafter_loss(setup.drafter, target), dspark.objective(setup.drafter)
    shared = on_ranks(_grad_on_ranks, loss_fn, objective, params, window)[0]
    return receipt(loss_fn, objective, params, window, {f"{on_ranks.name} x ragged": shared})


def _grad_on_ranks(loss_fn: Any, objective: Any, params: Any, window: list[Any]) -> WindowGrad:
    """The gradient of a window dealt unevenly: rank r has about r + 1 shares of it."""
    rank, num_ranks = _rank()
    total = num_ranks * (num_ranks + 1) // 2
    bounds = [len(window) * r * (r + 1) // 2 // total for r in range(num_ranks + 1)]
    share = window[bounds[rank] : bounds[rank + 1]]
    module = _sharded(params)
    result = dist.window_grad(loss_fn, objective)(module, share)
    whole = dist.gather(result.grads)
    # The module's parameters are named by the places that the leaves have in the params.
    places = [re.sub(r"\['?(.+?)'?\]", r".\1", name)[1:] for name in tree.names(params)]
    leaves = [whole[place] for place in places]
    return result._replace(grads=tree.unflatten(tree.structure(params), leaves))
