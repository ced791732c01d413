"""``numden check`` and ``numden check-step``: the laws of a loss function, and of a trainer.

The exit status is 0 if all laws hold, 1 if one is broken, and 2 if the check could not be done.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any, Literal

import torch
import typer
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ._targets import TargetError, load_function, load_value
from .loss_checker.check import report_loss
from .reports.rendering import as_json, print_report
from .reports.report import Report
from .step_checker.check import report_step

__all__ = ["app"]

app = typer.Typer(
    name="numden",
    help="The laws of losses that are ratios of sums.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PLACE = "MODULE_OR_FILE:NAME"

# Options that both commands have.
Examples = Annotated[int | None, typer.Option(help="How many examples to draw.", min=1)]
Seed = Annotated[int, typer.Option(help="Of every draw.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON and nothing else.")]
Rtol = Annotated[float | None, typer.Option(help="Allowed relative difference.", min=0.0)]
Budget = Annotated[float | None, typer.Option(help="Seconds to draw examples for.", min=0.0)]
Batches = Annotated[
    list[str] | None,
    typer.Option(
        "--batch",
        "--batches",
        metavar=_PLACE,
        help="A batch, a list of batches, a function that returns one of these, a Hypothesis "
        "strategy, or a .pt or .safetensors file. May be given several times.",
    ),
]
Params = Annotated[
    str | None,
    typer.Option(
        metavar=_PLACE,
        help="A pytree of tensors, an nn.Module, a function that returns one of these, or a .pt "
        "or .safetensors file.",
    ),
]


@app.callback()
def numden() -> None:
    """The laws of losses that are ratios of sums."""
    # Before any other thread runs: steps may fork, and threads do not survive that.
    torch.set_num_threads(1)


@app.command()
def check(
    loss: Annotated[
        str, typer.Argument(metavar=_PLACE, help="A function (params, batch) -> sums.")
    ],
    params: Params = None,
    batch: Batches = None,
    pad_row: Annotated[
        str | None,
        typer.Option(metavar=_PLACE, help="(batch, n) -> the batch with n neutral rows more."),
    ] = None,
    pad_columns: Annotated[
        str | None,
        typer.Option(
            metavar=_PLACE, help="(batch, n) -> the batch with n columns of padding more."
        ),
    ] = None,
    empty: Annotated[
        str | None, typer.Option(metavar=_PLACE, help="A batch with nothing to learn from.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Sums must agree in every bit (dyadic values).")
    ] = False,
    rtol: Rtol = None,
    examples: Examples = None,
    seed: Seed = 0,
    budget: Budget = None,
    in_json: Json = False,
) -> None:
    """Try the laws of a loss function: is it a pair of sums, whatever the batch is cut into?

    Example: numden check my_loss.py:loss_fn --params my_loss.py:params --batch my_loss.py:batch
    """
    with _errors("numden check"), _quiet(in_json):
        if not batch:
            raise TargetError("needs a batch. Write --batch my_loss.py:batch.")
        loss_fn = load_function(loss, "the loss function")
        of_loss = (params and load_value(params, "--params"), _batches(batch))
        options = _given(
            pad_row=pad_row and load_function(pad_row, "--pad-row"),
            pad_columns=pad_columns and load_function(pad_columns, "--pad-columns"),
            empty=empty and load_value(empty, "--empty"),
            exact=exact,
            rtol=rtol,
            max_examples=examples,
            seed=seed,
            budget_s=budget,
        )
        with _clock("trying the laws") as say:
            report = report_loss(loss_fn, *of_loss, **options, progress=say)
    _show(report._replace(subject=loss), in_json)


@app.command("check-step")
def check_step(
    step: Annotated[
        str, typer.Argument(metavar=_PLACE, help="A function (params, world) -> gradients.")
    ],
    loss: Annotated[
        str | None,
        typer.Option(metavar=_PLACE, help="The step's loss function, (params, batch) -> sums."),
    ] = None,
    params: Params = None,
    batch: Batches = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar=_PLACE,
            help="From total sums to the loss.",
            show_default="the sum of num / den over terms",
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="N or A-B", help="How many ranks to try.")
    ] = None,
    micro_steps: Annotated[
        int | None, typer.Option(help="The most micro-steps of a window.", min=1)
    ] = None,
    returns: Annotated[
        Literal["grads", "params"], typer.Option(help="What a step that returns a tree returns.")
    ] = "grads",
    uneven: Annotated[
        bool, typer.Option("--uneven", help="Ranks may differ in their number of micro-steps.")
    ] = False,
    lr: Annotated[
        float | None,
        typer.Option(help="The rate of plain SGD that made new params.", show_default="1.0"),
    ] = None,
    max_norm: Annotated[
        float | None, typer.Option(help="The norm that the step clips to.", min=0.0)
    ] = None,
    rtol: Rtol = None,
    examples: Examples = None,
    seed: Seed = 0,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a step counts as hanging.", min=0.0)
    ] = None,
    budget: Budget = None,
    in_json: Json = False,
) -> None:
    """Compare a training step with the ratio of sums, and name what it computes instead.

    Without --loss, --params and --batch the step is tried on problems of the checker's own.

    Example: numden check-step my_trainer.py:step --ranks 1-3
    """
    with _errors("numden check-step"), _quiet(in_json):
        given = [value for value in (loss, params, batch) if value]
        if len(given) in (1, 2):
            raise TargetError("needs all of --loss, --params and --batch, or none of them.")
        fun = load_function(step, "the step")
        of_loss: tuple[Any, Any, Any] = (
            loss and load_function(loss, "--loss"),
            params and load_value(params, "--params"),
            batch and _batches(batch),
        )
        options = _given(
            objective=objective and load_function(objective, "--objective"),
            ranks=ranks and _range(ranks),
            max_micro_steps=micro_steps,
            uneven=uneven,
            returns=returns,
            lr=lr,
            max_norm=max_norm,
            rtol=rtol,
            max_examples=examples,
            seed=seed,
            timeout_s=timeout,
            budget_s=budget,
        )
        with _clock("trying the step") as say:
            report = report_step(fun, *of_loss, **options, progress=say)
    _show(report._replace(subject=step), in_json)


# --- what the options say ------------------------------------------------------------------------


def _batches(targets: Sequence[str]) -> Any:
    """A list of batches, or a strategy for them if one of the targets is a strategy."""
    values = [load_value(target, "--batch") for target in targets]
    lists = [value if isinstance(value, list) else [value] for value in values]
    flat = [batch for batches in lists for batch in batches]
    if not any(isinstance(batch, SearchStrategy) for batch in flat):
        return flat
    return st.one_of([b if isinstance(b, SearchStrategy) else st.just(b) for b in flat])


def _range(text: str) -> tuple[int, int]:
    """``N`` or ``A-B``."""
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high:
        raise TargetError(f"--ranks: must be N or A-B with 1 <= A <= B, got {text!r}. Write 1-3.")
    return low, high


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


# --- what the user sees --------------------------------------------------------------------------


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """What cannot be checked ends with status 2, and with one line if the user can mend it."""
    try:
        yield
    except (TargetError, ValueError, TypeError) as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo(f"{command}: interrupted", err=True)
        raise typer.Exit(130) from error
    except Exception as error:
        traceback.print_exc()
        raise typer.Exit(2) from error


@contextmanager
def _quiet(in_json: bool) -> Iterator[None]:
    """With ``--json``, what the code under test prints does not go to stdout."""
    if not in_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def _clock(title: str) -> Iterator[Callable[[str], None]]:
    """A clock on stderr, if that is a terminal; yields what changes its title."""
    console = Console(stderr=True)
    # The step may start processes that write to stderr themselves: leave that alone.
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=None)
        yield lambda said: progress.update(task, description=said)


def _show(report: Report, in_json: bool) -> None:
    if in_json:
        typer.echo(json.dumps(as_json(report), indent=2, allow_nan=False))
    else:
        print_report(report, Console())
    raise typer.Exit(report.exit_code)
