"""Whether a step can be compared at all: it runs, is a function, and leaves its inputs alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...pure import tree
from ..diagnosis.compare import Observation, close
from ..reports.report import Diagnosis, Verdict
from ..violation import Difference, LawViolation, worst_place
from ..worlds.reference import as_tree
from ..worlds.world import StepResult, World
from .example import as_example
from .run import StepFailed
from .smallest import Search

__all__ = ["all_runs", "first_runs"]

_NUM_TRIES = 5
"""So many windows are run even if there is no time."""


def first_runs(search: Search, tried: Sequence[World]) -> list[Verdict]:
    """Verdicts on purity, dtypes and repeatability; one that failed if the step never runs."""
    search.progress("running the step for the first time")
    if not tried:
        return [Verdict("runs", "failed", "no window could be drawn whose total dens are positive")]
    failures = []
    for world in sorted(tried, key=_num_batches)[:_NUM_TRIES]:
        try:
            first = search.runner(world)
        except StepFailed as failure:
            failures.append((world, failure))
            continue
        result, changed = search.runner.watched(world)
        params = search.runner.problem.params
        return [_purity(changed), _dtypes(params, result), _repeats(search, first, tried)]
    world, failure = failures[0]
    return [_failed(search, world, f"{failure}", "failed")]


def all_runs(search: Search, tried: Sequence[World]) -> tuple[Verdict, list[Observation]]:
    """Run the step on all worlds, as long as there is time."""
    seen, failures = [], []
    for index, world in enumerate(tried):
        if index >= _NUM_TRIES and search.deadline.is_over():
            break
        search.progress(f"running the step on window {index + 1} of {len(tried)}")
        try:
            seen.append(search.runner(world))
        except StepFailed as failure:
            failures.append((world, failure))
    if failures:
        world, failure = failures[0]
        count = f"{len(failures)} of {len(tried)}"
        return _smallest_failure(search, world, failure, count), seen
    return Verdict("runs", "holds", f"on each of {len(seen)} windows"), seen


def _smallest_failure(search: Search, world: World, failure: StepFailed, count: str) -> Verdict:
    def fails(world: World) -> bool:
        try:
            search.runner(world)
        except StepFailed:
            return True
        return False

    world = search.smallest(fails) or world
    try:
        search.runner(world)
    except StepFailed as again:
        failure = again
    return _failed(search, world, f"on {count} windows {failure}", "broken")


def _failed(search: Search, world: World, words: str, status: Any) -> Verdict:
    rule = "the step must give a result on each window that has something to learn from."
    cause = "a micro-step, a row or a rank without tokens, or a window with fewer micro-steps."
    violation = LawViolation("runs", rule, [Difference("step", "a result", words)], cause)
    example = as_example(search.runner.problem, world, None, None)
    return Verdict("runs", status, words, violation if status == "broken" else None, example)


def _purity(changed: Sequence[Difference]) -> Verdict:
    if not changed:
        return Verdict("purity", "holds", "params and batches stay as they are")
    return Verdict(
        "purity",
        "broken",
        f"{changed[0].term} is changed by the step",
        LawViolation(
            "purity",
            "a step must leave its params and batches as they are.",
            changed,
            "an operation in place, or batch.pop. Work on copies: the next window, and whoever "
            "else holds the batch, sees the change.",
        ),
    )


def _dtypes(params: Any, result: StepResult) -> Verdict:
    like = tree.named(as_tree(params))
    wrong = [
        Difference(f"{root}{name}", f"{like[name].dtype}", f"{leaf.dtype}")
        for root, given in (("grads", result.grads), ("params", result.params))
        for name, leaf in tree.named(as_tree(given)).items()
        if isinstance(leaf, Tensor) and name in like and _is_coarser(leaf, like[name])
    ]
    if not wrong:
        return Verdict("dtype", "holds", "as exact as the params")
    rule = "what a step returns must be as exact as the params."
    cause = "autocast or a cast of the gradient. Accumulate and return in the dtype of the params."
    words = f"{wrong[0].term} is {wrong[0].got}, the param is {wrong[0].expected}"
    return Verdict("dtype", "broken", words, LawViolation("dtype", rule, wrong, cause))


def _is_coarser(leaf: Tensor, like: Tensor) -> bool:
    if not (leaf.is_floating_point() and like.is_floating_point()):
        return leaf.is_floating_point() != like.is_floating_point()
    return torch.finfo(leaf.dtype).eps > torch.finfo(like.dtype).eps


def _repeats(search: Search, first_run: Observation, tried: Sequence[World]) -> Verdict:
    """Whether a window gives the same after other windows as it gave first."""
    world = first_run.world
    runs = [first_run, _first_that_runs(search, tried), *map(search.runner, [world] * 2)]
    for name, quantity in first_run.quantities.items():
        if any(name not in each.quantities for each in runs):
            continue
        first, between, again, once_more = [each.quantities[name].got for each in runs]
        if close(first, again, quantity.eps, search.rtol):
            continue
        grows = close(again - between, once_more - again, quantity.eps, search.rtol)
        lags = close(between, again, quantity.eps, search.rtol)
        worst = worst_place(first, again)
        diagnosis = _LEFT_OVER if grows or lags else _DEPENDS
        return Verdict(
            "repeatability",
            "broken",
            f"the {name} of a window is another after other windows ran",
            LawViolation(
                "repeatability",
                "a window must give the same result each time, whatever ran before.",
                [Difference(name, first[worst], again[worst])],
                diagnosis.explanation,
            ),
            as_example(search.runner.problem, world, None, None),
            "",
            (diagnosis._replace(where=name),),
        )
    return Verdict("repeatability", "holds", "the same after another window")


def _first_that_runs(search: Search, tried: Sequence[World]) -> Observation:
    """A run on another window, the last drawn that the step can do."""
    for world in reversed(tried):
        try:
            return search.runner(world)
        except StepFailed:
            continue
    raise AssertionError("some window ran before")


_LEFT_OVER = Diagnosis(
    ("gradient left over from the window before",),
    "The result of a window is added to that of the windows before.",
    "Zero the gradients (zero_grad) before the first micro-step of each window.",
)
_DEPENDS = Diagnosis(
    ("depends on more than params and windows",),
    "The same window gives another result the second time: by random draws, or by state that the "
    "step keeps.",
    "Key the draws by row (numden.pure.random), seed them in the step, or turn dropout off; pass "
    "state in and out.",
)


def _num_batches(world: World) -> int:
    return sum(map(len, world))
