"""The verdict on one value that a step shows: right, or wrong and why."""

from collections.abc import Callable, Sequence

import torch

from ..diagnosis.compare import Leaf, Observation, Quantity, wrong_leaves
from ..diagnosis.explain import Laboratory, diagnosed
from ..diagnosis.formulas import Candidate
from ..reports.code import as_code
from ..reports.report import Diagnosis, Verdict
from ..violation import Difference, LawViolation
from ..worlds.world import World
from .example import as_example, worst_of
from .run import StepFailed
from .smallest import Search, size_of, smallest_wrong

__all__ = ["compared"]

_IMPORTS = "import torch\nfrom numden.property_tests import World"
_UPDATES = {"gradient", "update"}


def compared(
    search: Search, seen: Sequence[Observation], name: str, hints: list[Candidate]
) -> Verdict:
    """The verdict on the quantity ``name``, of which all runs are in ``seen``.

    ``hints`` are the formulas behind other quantities; what is found is added to them.
    """
    shown = [each for each in seen if name in each.quantities]
    wrong = [each for each in shown if wrong_leaves(each.quantities[name], search.rtol)]
    if not wrong:
        return Verdict(name, "holds", f"equal to Σnum/Σden on each of {len(shown)} windows")
    search.progress(f"the {name} is wrong: looking for the smallest window")
    smallest = smallest_wrong(search, name) or min(wrong, key=size_of)
    search.progress(f"the {name} is wrong: looking for the formula behind it")
    diagnoses = diagnosed(_laboratory(search, hints), smallest, shown, name)
    quantity = smallest.quantities[name]
    leaves = wrong_leaves(quantity, search.rtol)
    problem = search.runner.problem
    return Verdict(
        name,
        "broken",
        _words(name, len(wrong), shown, search.rtol),
        _violation(name, quantity, leaves, diagnoses),
        as_example(problem, smallest.world, quantity, leaves[0]),
        _code(smallest.world),
        diagnoses,
    )


def _laboratory(search: Search, hints: list[Candidate]) -> Laboratory:
    def run_where(condition: Callable[[World], bool]) -> Observation | None:
        world = search.smallest(condition, max_examples=40)
        try:
            return None if world is None else search.runner(world)
        except StepFailed:
            return None

    runner = search.runner
    time_is_up = search.deadline.is_over
    return Laboratory(runner.problem, hints, runner.finish, search.rtol, run_where, time_is_up)


def _words(name: str, num_wrong: int, shown: Sequence[Observation], rtol: float | None) -> str:
    words = f"wrong on {num_wrong} of {len(shown)} windows"
    gradients = [each.quantities[key] for each in shown for key in _UPDATES & set(each.quantities)]
    if name == "logged loss" and gradients and not any(wrong_leaves(g, rtol) for g in gradients):
        words += "; the gradient is right: what is logged is not what is optimised"
    return words


def _violation(
    name: str, quantity: Quantity, leaves: Sequence[Leaf], diagnoses: Sequence[Diagnosis]
) -> LawViolation:
    differences = []
    for leaf in leaves:
        place, expected, got = worst_of(quantity, leaf)
        differences.append(
            Difference(place, torch.tensor(expected).double(), torch.tensor(got).double())
        )
    causes = [f"{', '.join(each.faults)}. {each.explanation}" for each in diagnoses if each.faults]
    cause = " ".join(causes) or "no known wrong formula gives these values."
    return LawViolation(
        name, f"the {name} must be Σnum/Σden over all micro-steps and ranks.", differences, cause
    )


def _code(world: World) -> str:
    options = [f"accumulation={world.accumulation}"]
    if list(world.mesh) != ["dp"]:
        options.insert(0, f"mesh={world.mesh}")
    windows = as_code([list(window) for window in world])
    made = f"world = World({windows}, {', '.join(options)})"
    return f"{_IMPORTS}\n\n{made}\nstep(params, world)  # with your step and params"
