"""What is tried: a trainer, the code that its user writes, a problem, and what is drawn."""

import sys
import venv
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from subprocess import check_call
from typing import Any, NamedTuple

from transformers import Trainer

from numden.property_tests.adapters import (
    from_accelerate,
    from_command,
    from_lightning,
    from_trainer,
)
from numden.property_tests.worlds.problems import Problem

from .models import LightningProbe, MeanProbe, Probe, dense, mixture_of_experts, probe

JAX = ("jax==0.10.2", "optax==0.2.8")
JAX_ENVIRONMENT = Path("runs/trainers/jax")


class Case(NamedTuple):
    """One row of the report.

    Attributes:
        trainer: its name, by which it is asked for.
        code: what its user writes.
        step: makes the step of a problem.
        problem: makes the problem.
        ranks: number of processes.
        max_micro_steps: the longest window.
        rtol: how exact the trainer can be, if not by the dtype of the params.
    """

    trainer: str
    code: str
    step: Callable[[Problem], Any]
    problem: Callable[[], Problem]
    ranks: int = 1
    max_micro_steps: int = 4
    rtol: float | None = None


def cases() -> list[Case]:
    """All of them."""
    return [*_transformers(), *_accelerate(), *_lightning(), *_optax()]


# --- transformers --------------------------------------------------------------------------------


def _transformers() -> list[Case]:
    # transformers casts logits to float32, and the Trainer adds losses up in float32.
    case = partial(Case, "transformers", rtol=1e-5)
    sizes = [(ranks, length) for ranks in (1, 2) for length in (1, 2, 4)]
    models = [
        ("Qwen3, as it comes", dense),
        ("Mixtral with output_router_logits, as it comes", mixture_of_experts),
    ]
    return [
        *[
            case(code, partial(_trainer, ranks), problem, ranks, length)
            for code, problem in models
            for ranks, length in sizes
        ],
        case("a model that returns a mean and takes no count", _mean_trainer, probe),
        case(
            "Qwen3, with evaluate() called before train()",
            partial(_trainer, 2, make_trainer=EvaluatesFirst, evaluate=False),
            dense,
            ranks=2,
        ),
    ]


class EvaluatesFirst(Trainer):
    """A Trainer whose user wants to know the loss from before the training."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, then train."""
        self.evaluate()
        return super().train(*args, **kwargs)


def _trainer(ranks: int, problem: Problem, **options: Any) -> Any:
    # All parameters of these models take part, and torch warns when told to look for others.
    arguments = {"ddp_find_unused_parameters": False}
    return from_trainer(problem.params, ranks, arguments=arguments, **options)


def _mean_trainer(problem: Problem) -> Any:
    return from_trainer(MeanProbe())


# --- accelerate ----------------------------------------------------------------------------------


def _accelerate() -> list[Case]:
    loops = [
        ("accumulate() around a mean", _with_accumulate),
        ("the recipe of its documentation, with the count of the window", _with_count),
    ]
    return [
        Case("accelerate", code, partial(_accelerated, loop, ranks), probe, ranks)
        for code, loop in loops
        for ranks in (1, 2)
    ]


def _accelerated(loop: Any, ranks: int, problem: Problem) -> Any:
    return from_accelerate(loop, Probe(), ranks)


def _with_accumulate(accelerator: Any, model: Any, optimizer: Any, window: Any) -> None:
    for batch in window:
        with accelerator.accumulate(model):
            loss = model(**batch) / batch["mask"].sum().clamp(min=1)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def _with_count(accelerator: Any, model: Any, optimizer: Any, window: Any) -> None:
    batches = list(window)
    count = sum(batch["mask"].sum() for batch in batches)
    count = accelerator.gather(count).sum().item()
    factor = accelerator.gradient_accumulation_steps * accelerator.num_processes
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            accelerator.backward(model(**batch) * factor / count)
    optimizer.step()
    optimizer.zero_grad()


# --- Lightning, optax ----------------------------------------------------------------------------


def _lightning() -> list[Case]:
    code = "accumulate_grad_batches, training_step returns a mean"
    return [
        Case("lightning", code, partial(_lightning_step, ranks), probe, ranks) for ranks in (1, 2)
    ]


def _lightning_step(ranks: int, problem: Problem) -> Any:
    return from_lightning(LightningProbe(), ranks, eval_loss="val_loss")


def _optax() -> list[Case]:
    kinds = {
        "mean": "MultiSteps, each micro-step a mean",
        "share": "MultiSteps, each micro-step its share of the count of the window",
    }
    # MultiSteps averages with weights in float32, in a float64 program too.
    case = partial(Case, "optax", rtol=1e-5)
    return [case(code, partial(_multi_steps, kind), probe) for kind, code in kinds.items()]


def _multi_steps(kind: str, problem: Problem) -> Any:
    python = (
        JAX_ENVIRONMENT.resolve() / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    )
    if not python.exists():
        venv.create(JAX_ENVIRONMENT, with_pip=True)
        check_call([str(python), "-m", "pip", "install", "--quiet", *JAX, "numpy"])
    program = Path(__file__).with_name("optax_step.py")
    return from_command([str(python), str(program), kind], num_ranks=1)
