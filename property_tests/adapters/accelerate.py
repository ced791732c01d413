"""A loop that runs under ``accelerate`` as a step."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..worlds.world import StepResult
from ._processes import leave_group_of_one, make_process_step
from ._reading import Window, as_it_is, read_update

__all__ = ["from_accelerate"]

AccelerateLoop = Callable[[Any, Any, Any, Any], Any]
"""``(accelerator, model, optimizer, window) -> loss``."""


def from_accelerate(
    loop: AccelerateLoop,
    module: nn.Module,
    num_ranks: int = 1,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
) -> Any:
    """A step of a loop on ``accelerate``: ``loop(accelerator, model, optimizer, window)``.

    The loop does what its training script does for one update. Each call runs in new processes, as
    those of ``on_ranks``; they share the CPU by gloo, or are on their own if there is one.

    Args:
        loop: gets an ``Accelerator`` with the world's accumulation, the prepared model and
            optimizer, and the window as a data loader with a length, which tells the accelerator
            of its end; so a short window is the last of an epoch. It returns the loss that would be
            logged, or None.
        module: gets the params at each call.
        num_ranks: number of processes.
        optimizer: makes one of the parameters; plain SGD with lr 1 if None.
        options: more arguments of ``Accelerator``.
        timeout: seconds for one call.

    Returns:
        ``(params, world) -> StepResult``, as from a loop with ``updates=True``.

    Examples:
        The recipe for samples of different length in accelerate's documentation::

            def loop(accelerator, model, optimizer, window):
                batches = list(window)
                count = sum(batch["labels"].ne(-100).sum() for batch in batches)
                count = accelerator.gather(count).sum().item()
                for index, batch in enumerate(batches):
                    last = index == len(batches) - 1
                    with nullcontext() if last else accelerator.no_sync(model):
                        loss = model(**batch).sum()
                        factor = accelerator.gradient_accumulation_steps * accelerator.num_processes
                        accelerator.backward(loss * factor / count)
                optimizer.step()
                optimizer.zero_grad()

            step = from_accelerate(loop, module, num_ranks=2)
    """
    import_module("accelerate.data_loader")  # here once, and not in each process anew
    make_optimizer = optimizer or partial(torch.optim.SGD, lr=1.0)

    def run(module: nn.Module, params: Any, window: Window) -> StepResult:
        leave_group_of_one()
        accelerator = _accelerator(window.accumulation, options or {})
        model, ours = accelerator.prepare(module, make_optimizer(module.parameters()))
        body = lambda _, loader: loop(accelerator, model, ours, loader)
        return read_update(body, module, params, _loader(window))

    return make_process_step(
        run, module, "from_accelerate", num_ranks, subject=loop, timeout=timeout
    )


def _accelerator(accumulation: int, options: Mapping[str, Any]) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    # What the caller made of them before the fork belongs to another process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else it warns, and sets more threads
    return Accelerator(**{"cpu": True, "gradient_accumulation_steps": accumulation, **options})


def _loader(window: Window) -> Any:
    """The window as a loader that is not dealt out among ranks, as it is the share of one."""
    from accelerate.data_loader import DataLoaderShard

    return DataLoaderShard(list(window), batch_size=None, collate_fn=as_it_is)
