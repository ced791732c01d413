"""All drafters side by side: the same target, text, windows and budget; what each gains.

    python examples/drafters/compare.py --out runs/drafters

It trains a target on the sources of Python's standard library, then each drafter of
``numden train`` for as many windows, decodes held-out text with each, trained and untrained, and
prints, plots and saves how many tokens a step of the target yields.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from numden import dist
from numden.models import job
from numden.models.decoding import Decoded
from numden.models.drafters import DRAFTERS
from numden.models.job_rows import Corpus, read_corpus
from numden.models.train_config import TrainConfig, with_overrides
from numden.pure import optim, tree, window_grad

Grad = Callable[[Any, Any], Any]
console = Console()


def main(
    out: Annotated[Path, typer.Option(help="Where table and plot go.")] = Path("runs/drafters"),
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A key of numden train's configuration.")
    ] = None,
) -> None:
    """Train, decode, print, plot and save."""
    torch.set_num_threads(1)
    config = with_overrides(TrainConfig(), override or [])
    corpus = read_corpus(config)
    shape = job.target_config(config, corpus.tokenizer.vocab_size)
    target = train_target(config, corpus, shape)
    rows = [compare(config, name, corpus, shape, target) for name in DRAFTERS]
    console.print(as_table(rows))
    out.mkdir(parents=True, exist_ok=True)
    (out / "drafters.json").write_text(json.dumps(rows, indent=2) + "\n")
    plot(rows, out / "drafters.png")


def train_target(config: TrainConfig, corpus: Corpus, shape: Any) -> Any:
    """The params of the trained target."""
    grad = window_grad(job.target_loss(shape))
    windows = partial(job.target_windows, config, corpus)
    params = job.target_init(config, shape)
    options = config.target
    return fit(lambda step: grad, params, windows, options.num_windows, options.lr, "target")


def compare(
    config: TrainConfig, name: str, corpus: Corpus, shape: Any, target: Any
) -> dict[str, Any]:
    """How one drafter fares, untrained and trained."""
    config = with_overrides(config, [f"drafter.model={name}"])
    kind = job.drafter_kind(config)
    drafter = job.drafter_config(config, shape, corpus.tokenizer.special_ids["mask"])
    frozen = job.drafter_target(config, drafter, target)
    loss_fn = job.drafter_loss(config, drafter, frozen)
    den_fn = job.drafter_den(config, drafter, frozen)
    untrained = job.drafter_init(config, drafter, frozen)

    def grad_at(step: int) -> Grad:
        return window_grad(loss_fn, job.drafter_objective(config, drafter, step), den_fn=den_fn)

    def windows(*, first: int) -> Any:
        return job.drafter_windows(config, corpus, shape, drafter, target, first=first)

    options = config.drafter
    trained = fit(grad_at, untrained, windows, options.num_windows, options.lr, kind.title)
    prompts = [
        row.tokens[: config.data.min_length] for row in corpus.held_out[: config.run.prompts]
    ]
    decoded = job.decode(
        kind,
        prompts,
        target,
        shape,
        {"untrained": untrained, "trained": trained},
        drafter,
        frozen,
        new_tokens=config.run.new_tokens,
    )
    return {
        "drafter": kind.title,
        "parameters": sum(leaf.numel() for leaf in tree.leaves(trained)),
        "drafted": kind.num_drafted(drafter),
        **{name: tokens_per_step(each) for name, each in decoded.by_drafter.items()},
        "equal": all(
            torch.equal(plain, each.tokens)
            for each_prompt in decoded.by_drafter.values()
            for plain, each in zip(decoded.plain, each_prompt, strict=True)
        ),
    }


def tokens_per_step(decoded: list[Decoded]) -> float:
    """The mean over all rounds of all prompts."""
    accepted = [kept for each in decoded for kept in each.accepted]
    return 1 + sum(accepted) / max(1, len(accepted))


def fit(
    grad_at: Callable[[int], Grad],
    params: Any,
    windows: Callable[..., Any],
    num_windows: int,
    lr: float,
    label: str,
) -> Any:
    """Params after training, as ``numden train`` trains them on one rank."""
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.from_torch(torch.optim.AdamW, lr=job.one_cycle(lr, num_windows), weight_decay=0.01),
    )

    def step(state: dist.TrainState, window: Any) -> Any:
        return dist.train_step(grad_at(state.step), optimizer, donate=True)(state, window)

    state, _ = dist.fit(
        step,
        dist.init_state(tree.map(torch.Tensor.clone, params), optimizer),
        lambda first: windows(first=first),
        num_windows=num_windows,
        label=label,
    )
    return state.params


def as_table(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    table = Table(title="Tokens for each target step, on held-out text", title_justify="left")
    for name in ("drafter", "parameters", "drafted", "untrained", "trained", "target's own tokens"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for row in rows:
        sizes = f"{row['parameters']:,}", str(row["drafted"])
        lengths = f"{row['untrained']:.2f}", f"{row['trained']:.2f}"
        table.add_row(row["drafter"], *sizes, *lengths, "all" if row["equal"] else "NOT ALL")
    return table


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of accepted lengths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    for offset, name, color in ((-0.2, "untrained", "tab:gray"), (0.2, "trained", "tab:blue")):
        at = [place + offset for place in places]
        bars = axes.barh(at, [row[name] for row in rows], 0.4, label=name, color=color)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_yticks(list(places), [row["drafter"] for row in rows])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(title="Tokens for each target step", xlabel="1 = no drafted token accepted")
    axes.margins(x=0.15)
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
