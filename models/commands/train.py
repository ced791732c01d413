"""What ``numden train`` runs, step after step, and what each rank does of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from rich.console import Console
from torch import Tensor

from ... import dist, pure
from ...dist import Record
from ...pure import WindowGrad, optim, tree
from .. import job
from ..job_rows import Corpus
from ..module import as_params
from ..report import Report
from ..train_config import TrainConfig
from .exactness import receipt_on_ranks
from .ranks import Ranks, rank_and_number, sharded
from .saved import records_before, writer
from .setup import Models, Setup

__all__ = ["Stopped", "run"]

console = Console()


class Stopped(Exception):
    """SIGTERM came, and what was trained is saved."""


class Trained(NamedTuple):
    """Whole params after training, on each rank the same, and the records."""

    params: Any
    records: list[Record]
    stopped: bool


def run(setup: Setup, on_ranks: Ranks, saved: Path | None) -> Report:
    """Train a target and a drafter, decode with both, and compare gradients.

    Args:
        setup: from ``set_up``.
        on_ranks: runs functions on ranks.
        saved: a folder for checkpoints, from which it also goes on; None for no checkpoints.

    Raises:
        Stopped: by SIGTERM, after which the next run goes on.
    """
    config, drafter = setup.config, setup.drafter
    _say(on_ranks, _corpus_text(setup.corpus))
    target = _finished(on_ranks(_train_target, setup, saved)[0])
    if config.drafter.features:
        _say(on_ranks, f"Writing the target's hidden states to {config.drafter.features}")
        on_ranks(_save_states, setup, target.params)
        setup = setup._replace(corpus=job.read_states(config, setup.corpus))
    models = Models(target.params, job.drafter_target(config, drafter, target.params))
    by_ranks = _finished(on_ranks(_train_drafter, setup, models, saved)[0])
    alone = _finished(_train_drafter_alone(setup, models, saved))
    drafters = {
        "untrained": job.drafter_init(config, drafter, models.frozen),
        "1 rank": alone.params,
        on_ranks.name: by_ranks.params,
    }
    _say(on_ranks, "Decoding held-out text with the target alone and with each drafter")
    decoded = on_ranks(_decode, setup, models, drafters)
    _say(on_ranks, "Computing one window's gradient in different ways, in float64")
    return Report(
        config=config,
        target=target.records,
        drafter={on_ranks.name: by_ranks.records, "1 rank": alone.records},
        decoded=_gathered(decoded),
        receipt=receipt_on_ranks(setup, models, by_ranks.params, on_ranks),
        text=setup.corpus.tokenizer.decode,
    )


def _finished(trained: Trained) -> Trained:
    if trained.stopped:
        raise Stopped
    return trained


def _say(on_ranks: Ranks, text: str) -> None:
    if on_ranks.is_first:
        console.print(text)


def _corpus_text(corpus: Corpus) -> str:
    num_tokens = sum(len(row.tokens) for row in corpus.rows)
    return (
        f"{len(corpus.rows):,} rows with {num_tokens:,} tokens of a vocabulary of "
        f"{corpus.tokenizer.vocab_size:,}, and {len(corpus.held_out)} rows held out"
    )


def _whole(module: Any) -> Any:
    return dist.gather(as_params(module))


def _optimizer(config: TrainConfig, lr: float, num_windows: int) -> optim.Optimizer:
    return optim.chain(
        optim.clip_by_global_norm(config.run.max_norm, sum_squares=dist.sum_of_squares),
        optim.from_torch(torch.optim.AdamW, lr=job.one_cycle(lr, num_windows), weight_decay=0.01),
    )


class _Stage(NamedTuple):
    """A part of the training.

    Attributes:
        name: of its checkpoints.
        label: of its progress bar.
        windows: ``first -> iterator``, those from the number ``first`` on.
        num_windows: how many of them.
        lr: the peak of the learning rate.
    """

    name: str
    label: str
    windows: Callable[[int], Any]
    num_windows: int
    lr: float


def _fit(
    config: TrainConfig,
    stage: _Stage,
    grad_at: Callable[[int], Callable[[Any, Any], WindowGrad]],
    params: Any,
    saved: Path | None,
) -> Trained:
    """Train a stage; ``grad_at`` gives the gradient of the window of a number."""
    optimizer = _optimizer(config, stage.lr, stage.num_windows)

    def step(state: dist.TrainState, window: Any) -> tuple[dist.TrainState, WindowGrad]:
        return dist.train_step(grad_at(state.step), optimizer, donate=True)(state, window)

    log = saved and saved / f"{stage.name}.jsonl"
    state, records = dist.fit(
        step,
        dist.init_state(params, optimizer),
        stage.windows,
        num_windows=stage.num_windows,
        log_every=config.run.log_every,
        on_record=writer(log),
        label=stage.label,
        checkpoints=saved and saved / stage.name,
        save_every=config.run.save_every or None,
        keep=config.run.keep,
    )
    return Trained(
        state.params, records_before(records, log) + records, stopped=state.step < stage.num_windows
    )


def _train_target(setup: Setup, saved: Path | None) -> Trained:
    rank, num_ranks = rank_and_number()
    config, shape, target = setup.config, setup.shape, setup.config.target
    stage = _Stage(
        "target",
        f"target, {num_ranks} ranks",
        lambda first: job.target_windows(config, setup.corpus, rank, num_ranks, first=first),
        target.num_windows,
        target.lr,
    )
    grad = dist.window_grad(job.target_loss(shape))
    module = sharded(job.target_init(config, shape))
    trained = _fit(config, stage, lambda step: grad, module, saved)
    return trained._replace(params=_whole(trained.params))


def _drafter_stage(
    setup: Setup, models: Models, name: str, rank: int = 0, num_ranks: int = 1
) -> _Stage:
    def windows(first: int) -> Any:
        return job.drafter_windows(*setup, models.target, rank, num_ranks, first=first)

    config, ranks = setup.config, "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    label = f"{job.drafter_kind(config).title}, {ranks}"
    return _Stage(name, label, windows, config.drafter.num_windows, config.drafter.lr)


def _grad_at(window_grad: Callable[..., Any], setup: Setup, models: Models) -> Callable[[int], Any]:
    """The gradient of the drafter's window of a number."""
    config, drafter = setup.config, setup.drafter
    loss_fn = job.drafter_loss(config, drafter, models.frozen)
    den_fn = job.drafter_den(config, drafter, models.frozen)

    def grad_at(step: int) -> Any:
        objective = job.drafter_objective(config, drafter, step)
        return window_grad(loss_fn, objective, den_fn=den_fn)

    return grad_at


def _train_drafter(setup: Setup, models: Models, saved: Path | None) -> Trained:
    """On ranks: an FSDP2 module, its gradients reduced by SUM."""
    stage = _drafter_stage(setup, models, "drafter", *rank_and_number())
    module = sharded(job.drafter_init(setup.config, setup.drafter, models.frozen))
    grad_at = _grad_at(dist.window_grad, setup, models)
    trained = _fit(setup.config, stage, grad_at, module, saved)
    return trained._replace(params=_whole(trained.params))


def _train_drafter_alone(setup: Setup, models: Models, saved: Path | None) -> Trained:
    """On one rank: a pytree of params and no process group. The same windows."""
    stage = _drafter_stage(setup, models, "drafter-1-rank")
    untrained = job.drafter_init(setup.config, setup.drafter, models.frozen)
    params = tree.map(Tensor.clone, untrained)
    return _fit(setup.config, stage, _grad_at(pure.window_grad, setup, models), params, saved)


def _save_states(setup: Setup, target: Any) -> None:
    job.save_states(*setup, target, *rank_and_number())
    c10d.barrier()  # before they are read


def _decode(
    setup: Setup, models: Models, drafters: dict[str, Any]
) -> list[tuple[int, job.Decodings]]:
    """This rank's share of the prompts, each with its number."""
    rank, num_ranks = rank_and_number()
    config, corpus, shape, drafter = setup
    rows = corpus.held_out[: config.run.prompts]
    numbers = range(rank, len(rows), num_ranks)
    prompts = [[rows[i].tokens[: config.data.min_length]] for i in numbers]
    new_tokens = config.run.new_tokens
    kind = job.drafter_kind(config)
    decoded = [
        job.decode(
            kind,
            prompt,
            models.target,
            shape,
            drafters,
            drafter,
            models.frozen,
            new_tokens=new_tokens,
        )
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
