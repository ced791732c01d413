"""The ``Trainer`` of Lightning as a step."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from ..worlds.world import StepResult
from ._module import require_micro_steps
from ._processes import leave_group_of_one, make_process_step
from ._reading import Window, loader_of, read_update

__all__ = ["from_lightning"]

OPTIONS = {
    "accelerator": "cpu",
    "max_steps": 1,
    "max_epochs": 1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "log_every_n_steps": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def from_lightning(
    module: Any,
    num_ranks: int = 1,
    *,
    make_trainer: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    loss: str = "train_loss",
    eval_loss: str | None = None,
    timeout: float = 120.0,
) -> Any:
    """A step of a Lightning ``Trainer``: one update on the window.

    Each micro-batch of a window is one batch of the data loader, as it is; the window is an epoch,
    so one that is shorter than ``accumulate_grad_batches`` is the last of an epoch. Each call runs
    in new processes, as those of ``on_ranks``.

    Args:
        module: a ``LightningModule``; gets the params at each call.
        num_ranks: number of processes, which train by DDP on gloo.
        make_trainer: ``lightning.Trainer``, or what takes the same keywords, as that of
            ``pytorch_lightning`` for its modules.
        options: more keywords of the trainer.
        loss: the name under which the module logs its training loss, if it does.
        eval_loss: the name under which it logs its validation loss; with it the window is
            validated, too, before the step.
        timeout: seconds for one call.

    Returns:
        ``(params, world) -> StepResult``, as from a loop with ``updates=True``, with the logged
        losses.

    Raises:
        UnfitWorld: by the step, when a rank has no micro-batch, or not as many as another, as the
            Trainer would hang.

    Examples:
        >>> step = from_lightning(MyLightningModule(), num_ranks=2)  # doctest: +SKIP
    """
    # Imported here once, and not in each process anew.
    make = make_trainer or import_module("lightning").Trainer
    given = {**OPTIONS, **(options or {})}

    def run(module: Any, params: Any, window: Window) -> StepResult:
        leave_group_of_one()
        loader = loader_of(window)
        with _quiet():
            placed = {**_placed(window), **given}
            validated = _validate(make, placed, module, loader, eval_loss)
            trainer = make(**placed)
            result = read_update(lambda *_: trainer.fit(module, loader), module, params, window)
        logged = trainer.callback_metrics.get(loss)
        return result._replace(loss=logged, eval_loss=validated)

    return make_process_step(
        run,
        module,
        "from_lightning",
        num_ranks,
        subject=module,
        require=partial(require_micro_steps, equal=True),
        timeout=timeout,
    )


def _placed(window: Window) -> dict[str, Any]:
    num_ranks = len(window.lengths)
    placed = {"devices": num_ranks, "accumulate_grad_batches": window.accumulation}
    if num_ranks == 1:
        return placed
    os.environ["TORCHELASTIC_RUN_ID"] = "numden"  # so that it starts no processes of its own
    return {**placed, "strategy": "ddp"}


def _validate(
    make: Callable[..., Any], options: dict[str, Any], module: Any, loader: Any, name: str | None
) -> Any:
    if name is None:
        return None
    trainer = make(**options | {"limit_val_batches": 1.0})
    return trainer.validate(module, loader, verbose=False)[0][name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what it says of hardware, and of data loaders that are none of the user's."""
    for name in ("lightning", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(f"{name}.pytorch").setLevel(logging.WARNING)
        logging.getLogger(f"{name}.fabric").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*have no `val_dataloader`")
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
        yield
