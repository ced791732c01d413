"""Training: a state, one step, and a loop that says how it goes."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..pure import WindowGrad
from ..pure.optim import Optimizer, global_norm
from ._checkpointing import checkpointing, resumed
from ._together import rank
from .norm import sum_of_squares

__all__ = ["Record", "TrainState", "fit", "init_state", "train_step"]


class TrainState(NamedTuple):
    """What training carries from window to window.

    Attributes:
        params: a pytree of tensors, or a module.
        opt_state: of the optimizer.
        step: the number of windows so far.
        carry: of an unfinished window (``numden.pure.Carry``), else None.
    """

    params: Any
    opt_state: Any
    step: int = 0
    carry: Any = None


class Record(NamedTuple):
    """How one window went.

    Attributes:
        step: the number of windows so far.
        loss: the objective of the window, over all ranks.
        grad_norm: the global norm of its gradient, before clipping.
        tokens_per_second: what the ``tokens`` of this rank's batches hold, padding counted, over
            the time since the last record; 0 where batches are no dicts with ``tokens``.
        metrics: the ratios of the total metrics, those that are scalars.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    metrics: dict[str, float]


def init_state(params: Any, optimizer: Optimizer) -> TrainState:
    """The state before the first window.

    Examples:
        >>> import torch
        >>> from numden.pure import optim
        >>> init_state({"w": torch.ones(2)}, optim.from_torch(torch.optim.SGD, lr=0.1)).step
        0
    """
    return TrainState(params, optimizer.init(trainable(params)))


def trainable(params: Any) -> Any:
    """The tensors that an optimizer updates: the tree, or a module's parameters by name."""
    if isinstance(params, nn.Module):
        return {name: p for name, p in params.named_parameters() if p.requires_grad}
    return params


def train_step(
    grad: Callable[[Any, Iterable[Any]], WindowGrad],
    optimizer: Optimizer,
    *,
    donate: bool = False,
    skip_invalid: bool = False,
) -> Callable[[TrainState, Iterable[Any]], tuple[TrainState, WindowGrad]]:
    """One step: the gradient of a window, then the optimizer.

        result = grad(state.params, window)
        params, opt_state = optimizer.update(result.grads, state.opt_state, state.params)

    Args:
        grad: from ``window_grad`` of ``numden.pure`` or ``numden.dist``.
        optimizer: with clipping in it, if any; over shards give the clipping ``sum_of_squares``.
        donate: reuse the memory of the state that is given. A module is always updated in place.
        skip_invalid: leave params and state as they are in a window that ``grad``, made with
            ``on_empty="skip"``, found empty. It costs a copy of both.

    Returns:
        ``(state, window) -> (state, WindowGrad)``. When ``grad`` raises, nothing has changed.

    Examples:
        >>> import torch
        >>> from numden.pure import LossTerms, optim, window_grad
        >>> sgd = optim.from_torch(torch.optim.SGD, lr=0.5)
        >>> step = train_step(window_grad(lambda w, x: LossTerms((w * x).sum(), x.numel())), sgd)
        >>> state, result = step(init_state(torch.tensor(1.0), sgd), [torch.tensor([2.0, 4.0])])
        >>> state.params, state.step
        (tensor(-0.5000), 1)
    """

    def step(state: TrainState, window: Iterable[Any]) -> tuple[TrainState, WindowGrad]:
        result = grad(state.params, window)
        in_place = donate or isinstance(state.params, nn.Module)
        params, opt_state = optimizer.update(
            result.grads,
            state.opt_state,
            trainable(state.params),
            valid=result.valid if skip_invalid else None,
            donate=in_place,
        )
        params = state.params if isinstance(state.params, nn.Module) else params
        return TrainState(params, opt_state, state.step + 1), result

    return step


def fit(
    step: Callable[[TrainState, Iterable[Any]], tuple[TrainState, WindowGrad]],
    state: TrainState,
    windows: Iterable[list[Any]] | Callable[[int], Iterable[list[Any]]],
    *,
    num_windows: int | None = None,
    log_every: int = 10,
    on_record: Callable[[Record], None] | None = None,
    progress: bool = True,
    label: str = "train",
    checkpoints: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: int | None = 2,
) -> tuple[TrainState, list[Record]]:
    """Step through windows, with a progress bar and a record every ``log_every`` windows.

    The loss, the norm and the metrics are read on the host only for a record.

    With ``checkpoints`` a run goes on by itself: called again with the same arguments, in a new
    process and on any number of ranks, it takes up the last whole checkpoint. It then also stops
    cleanly on SIGTERM to some rank: all ranks stop after the window in which it came, save, and
    return. It costs a small all-reduce between the hosts after each window.

    Args:
        step: from ``train_step``.
        state: from ``init_state``; with ``checkpoints``, the state that the run starts from.
        windows: this rank's windows, each a list of micro-batches, from the start of the run. Those
            that a checkpoint has seen are asked for and thrown away; not so with a function of
            their number that gives the windows after them.
        num_windows: stop after as many from ``state``, without asking ``windows`` for one more;
            where not given, at the end of ``windows``, which must then come on all ranks at once.
        log_every: windows from record to record; the last window has one too.
        on_record: called with each record, on each rank.
        progress: show a bar on rank 0, if rich is installed.
        label: what the bar is called.
        checkpoints: a folder for ``save``. One is written at the end, too.
        save_every: windows from checkpoint to checkpoint.
        keep: how many checkpoints stay; None for all.

    Returns:
        The state after the last window, and the records of this call. Where SIGTERM came, the
        state's step says so.

    Raises:
        ValueError: ``checkpoints`` has those of another run.
    """
    start = state.step
    state, found = resumed(checkpoints, state)
    done = state.step - start
    records: list[Record] = []
    result, tokens, since = None, 0, time.perf_counter()
    with (
        _bar(label, num_windows, progress) as bar,
        checkpointing(
            checkpoints,
            saved=state.step if found else None,
            save_every=save_every,
            keep=keep,
        ) as checkpoint,
    ):
        bar(advance=done)

        def record(result: WindowGrad) -> None:
            nonlocal tokens, since
            said = _record(state.step, result)  # reads the device, which ends what is timed
            rate = tokens / (time.perf_counter() - since)
            records.append(said._replace(tokens_per_second=rate))
            bar(said=_said(records[-1]))
            if on_record:
                on_record(records[-1])
            tokens, since = 0, time.perf_counter()

        for window in _left(windows, done, num_windows):
            result = None  # or its gradients would live through the next window
            state, result = step(state, window)
            tokens += sum(_num_tokens(batch) for batch in window)
            if state.step % log_every == 0:
                record(result)
            bar(advance=1)
            if checkpoint(state):
                break
        if result is not None and not (records and records[-1].step == state.step):
            record(result)
        checkpoint(state, last=True)
    return state, records


def _left(
    windows: Iterable[list[Any]] | Callable[[int], Iterable[list[Any]]],
    done: int,
    num_windows: int | None,
) -> Iterator[list[Any]]:
    """The windows after the first ``done`` of ``num_windows``."""
    left = None if num_windows is None else max(0, num_windows - done)
    if callable(windows):
        return islice(windows(done), left)
    if left == 0:
        return iter(())  # without going through them for nothing
    return islice(windows, done, num_windows)


def _num_tokens(batch: Any) -> int:
    tokens = batch.get("tokens") if isinstance(batch, dict) else None
    return 0 if tokens is None else tokens.numel()


def _record(step: int, result: WindowGrad) -> Record:
    norm = float(global_norm(result.grads, sum_squares=sum_of_squares))
    scalars = {
        name: float(value)
        for name, value in result.metrics.items()
        if isinstance(value, Tensor) and value.dim() == 0
    }
    return Record(step, float(result.loss), norm, 0.0, scalars)


@contextmanager
def _bar(label: str, total: int | None, show: bool) -> Iterator[Callable[..., None]]:
    """A progress bar with an estimate of the time left; what updates ``advance`` or ``said``."""
    if not show or rank() or not find_spec("rich"):
        yield lambda **fields: None
        return
    from rich import progress

    columns = (
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=None),  # what the other columns leave
        progress.MofNCompleteColumn(),
        progress.TextColumn("eta"),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        progress.TextColumn("{task.fields[said]}"),
    )
    with progress.Progress(*columns, expand=True) as bar:
        yield partial(bar.update, bar.add_task(label, total=total, said=""))


def _said(record: Record) -> str:
    return (
        f"loss {record.loss:.3f} norm {record.grad_norm:.2f} "
        f"{record.tokens_per_second:,.0f} tok/s/rank"
    )
