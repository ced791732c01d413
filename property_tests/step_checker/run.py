"""One run of a step under a time limit, on copies, with its side effects noticed."""

import copy
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pure import tree
from ..diagnosis.compare import Observation, observe
from ..diagnosis.recipe import Finish
from ..violation import Difference
from ..worlds.problems import Problem
from ..worlds.reference import as_tree
from ..worlds.world import Step, StepResult, World, as_result
from ._time_limit import time_limit

__all__ = ["Deadline", "Runner", "StepFailed"]


class StepFailed(Exception):
    """A step raised, hung, or returned something else than a gradient; the message says which."""


class Runner(NamedTuple):
    """A step and what its results are compared by.

    Attributes:
        step: the step.
        problem: what is right.
        finish: what happens to the gradient before it is seen.
        lr: the learning rate of a step that returns new params without an optimizer.
        returns: what a bare tree is: ``"grads"`` or ``"params"``.
        timeout_s: the time limit of one run.
    """

    step: Step
    problem: Problem
    finish: Finish
    lr: float
    returns: str
    timeout_s: float

    def __call__(self, world: World) -> Observation:
        """Run the step on copies of the params and of ``world``.

        Raises:
            StepFailed: it raised, hung, or returned something that cannot be compared.
        """
        return self.observe(world, self.call(world, copy.deepcopy(self.problem.params)))

    def observe(self, world: World, result: StepResult) -> Observation:
        """Put a result beside what is right."""
        try:
            return observe(self.problem, world, result, self.finish, self.lr)
        except (ValueError, TypeError, RuntimeError) as error:
            raise StepFailed(str(error)) from error

    def call(self, world: World, params: Any) -> StepResult:
        """Run the step on these very objects."""
        try:
            with time_limit(self.timeout_s):
                result = as_result(self.step(params, world))
        except TimeoutError as error:
            raise StepFailed(f"the step hangs: {error}") from error
        except Exception as error:
            raise StepFailed(f"the step raised {type(error).__name__}: {error}") from error
        if self.returns == "params" and result.params is None:
            result = result._replace(params=result.grads, grads=None)
        if all(field is None for field in result):
            raise StepFailed("the step returned None, and no gradient, params or loss.")
        return result

    def watched(self, world: World) -> tuple[StepResult, list[Difference]]:
        """A result, and what the run changed of the params and batches that it was given."""
        params = copy.deepcopy(self.problem.params)
        before = _values(params, world)
        result = self.call(world, params)
        after = _values(params, world)
        return result, [
            Difference(name, value, after.get(name, "none"))
            for name, value in before.items()
            if not _same(value, after.get(name))
        ]


def _values(params: Any, world: World) -> dict[str, Any]:
    named = tree.named(as_tree(params), "params")
    for rank, window in enumerate(world):
        for index, batch in enumerate(window):
            named |= tree.named(batch, f"world[{rank}][{index}]")
    return {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in named.items()}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a is b or bool(a == b)


class Deadline(NamedTuple):
    """A moment after which no new run is started."""

    moment: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The moment ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() > self.moment
