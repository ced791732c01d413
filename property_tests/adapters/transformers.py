"""The ``Trainer`` of transformers as a step."""

import os
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from ..worlds.world import StepResult
from ._module import require_micro_steps
from ._processes import leave_group_of_one, make_process_step
from ._reading import Window, loader_of, read_update

__all__ = ["from_trainer"]

ARGUMENTS = {
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_steps": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
    "prediction_loss_only": True,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def from_trainer(
    model: nn.Module,
    num_ranks: int = 1,
    *,
    make_trainer: Callable[..., Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    evaluate: bool = True,
    timeout: float = 120.0,
) -> Any:
    """A step of a ``transformers.Trainer``: one update on the window, and one evaluation before it.

    Each micro-batch of a window is one batch of the Trainer's data loader, as it is; the window is
    an epoch, so one that is shorter than the accumulation is the last of an epoch. Each call runs
    in new processes, as those of ``on_ranks``.

    Args:
        model: what the Trainer trains; gets the params at each call. It is called with the fields
            of a batch.
        num_ranks: number of processes, which train by DDP on gloo.
        make_trainer: ``transformers.Trainer``, or what takes the same keywords ``model``, ``args``,
            ``train_dataset`` and ``eval_dataset``, such as a subclass, or
            ``functools.partial(Trainer, compute_loss_func=...)``.
        arguments: of ``TrainingArguments``, in place of plain SGD with lr 1 without clipping.
        evaluate: whether to evaluate, too. Left out where ranks have different numbers of
            micro-steps, since the evaluation of the Trainer would hang.
        timeout: seconds for one call.

    Returns:
        ``(params, world) -> StepResult``: the gradient that the optimizer gets, the params after
        the step, the loss that the Trainer logs for it, and ``eval_loss`` of its
        evaluation before the step.

    Raises:
        UnfitWorld: by the step, when a rank has no micro-batch.

    Examples:
        >>> from transformers import Qwen3ForCausalLM  # doctest: +SKIP
        >>> step = from_trainer(Qwen3ForCausalLM(config).double())  # doctest: +SKIP
    """
    import_module("transformers.trainer")  # here once, and not in each process anew
    given = {**ARGUMENTS, **(arguments or {})}

    def run(model: nn.Module, params: Any, window: Window) -> StepResult:
        leave_group_of_one()
        with tempfile.TemporaryDirectory() as folder:
            even = len(set(window.lengths)) == 1
            ours = {"output_dir": folder, "eval_on_start": evaluate and even, **given}
            trainer = _trainer(make_trainer, model, window, ours)
            return read_update(lambda *_: _train(trainer), model, params, window)

    return make_process_step(
        run,
        model,
        "from_trainer",
        num_ranks,
        subject=make_trainer or model,
        require=require_micro_steps,
        timeout=timeout,
    )


def _trainer(
    make: Callable[..., Any] | None, model: nn.Module, window: Window, arguments: dict[str, Any]
) -> Any:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else accelerate warns, and sets more threads
    loader = loader_of(window)
    backend = "gloo" if len(window.lengths) > 1 else None  # one named for one process is looked for
    ours = {"gradient_accumulation_steps": window.accumulation, "ddp_backend": backend}
    trainer = (make or Trainer)(
        model=model,
        args=TrainingArguments(**ours | arguments),
        train_dataset=loader.dataset,
        eval_dataset=loader.dataset,
    )
    # Its own loaders would deal out the window, which is the share of one rank already.
    trainer.get_train_dataloader = lambda: loader
    trainer.get_eval_dataloader = lambda eval_dataset=None: loader
    trainer.remove_callback(PrinterCallback)
    return trainer


def _train(trainer: Any) -> StepResult:
    trainer.train()
    logged = {
        name: value for log in reversed(trainer.state.log_history) for name, value in log.items()
    }
    return StepResult(loss=logged.get("loss"), eval_loss=logged.get("eval_loss"))
