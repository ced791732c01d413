"""``check_step``: a trainer, as a black box, against Σnum/Σden."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from ...pure import tree
from ...pure.objective import Objective, term_mean
from ...pure.optim import Optimizer
from ...pure.terms import LossFn
from .._threads import one_thread
from ..diagnosis.compare import Observation
from ..diagnosis.formulas import Candidate
from ..diagnosis.recipe import Finish
from ..reports.report import Progress, Report, Verdict
from ..rows import has_rows
from ..worlds.draw import batches_of, drawn, step_worlds, tiled
from ..worlds.problems import Problem, tokens
from ..worlds.reference import as_tree, reference_of
from ..worlds.world import Step, World
from .run import Deadline, Runner
from .runs import all_runs, first_runs
from .smallest import Search, counts_something
from .verdicts import compared

__all__ = ["check_step", "report_step"]


def check_step(step: Step, *args: Any, **kwargs: Any) -> Report:
    """``report_step`` that raises when something is wrong; same arguments.

    Raises:
        CheckFailed: a law is broken, or the step raised; the message is the report.

    Examples:
        >>> import torch
        >>> def mean_of_means(params, world):
        ...     w = params["w"].requires_grad_()
        ...     for batch in world[0]:
        ...         mean = (w * batch["losses"])[batch["mask"]].sum() / batch["mask"].sum().clamp(1)
        ...         (mean / len(world[0])).backward()
        ...     return {"w": w.grad}
        >>> check_step(mean_of_means, ranks=1)
        Traceback (most recent call last):
            ...
        numden.property_tests.reports.report.CheckFailed: ...mean of micro-step means...
    """
    return report_step(step, *args, **kwargs).require()


@one_thread()
def report_step(
    step: Step,
    loss_fn: LossFn | None = None,
    params: Any = None,
    batches: Any = None,
    *,
    objective: Objective = term_mean(),
    ranks: int | tuple[int, int] | None = None,
    mesh: Mapping[str, int] | SearchStrategy[dict[str, int]] | None = None,
    max_micro_steps: int = 4,
    uneven: bool = False,
    returns: Literal["grads", "params"] = "grads",
    lr: float = 1.0,
    optimizer: Optimizer | None = None,
    max_norm: float | None = None,
    max_examples: int = 60,
    seed: int = 0,
    timeout_s: float = 60.0,
    budget_s: float = 25.0,
    rtol: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Try a step on drawn windows, compare with Σnum/Σden, and explain what is wrong.

    Args:
        step: ``(params, world) -> StepResult``, or a bare tree. ``world[rank][micro_step]`` is a
            batch. Adapters for trainers are in ``numden.property_tests.adapters``.
        loss_fn: the sums that are right: ``(params, batch) -> LossTerms``. Without it the step is
            tried on the token losses of ``problems.tokens``.
        params: a pytree of tensors or an ``nn.Module``; the step gets a copy each time.
        batches: a micro-batch, a sequence of them, or a Hypothesis strategy that draws them.
        objective: from total sums to the loss. Diagnoses know ``term_mean`` alone.
        ranks: how many data ranks, a number or the least and the most; what ``step.ranks`` says,
            or one to three.
        mesh: mesh axes and their sizes, or a strategy that draws them; in place of ``ranks``.
        max_micro_steps: the longest window.
        uneven: whether ranks may differ in their number of micro-steps.
        returns: what a bare tree is.
        lr: the learning rate with which new params were made by plain SGD.
        optimizer: what makes new params instead; ``numden.pure.optim``, its state fresh.
        max_norm: the global norm to which the gradient is clipped, once, at the end.
        max_examples: how many worlds are drawn.
        seed: of the draws.
        timeout_s: the time limit of one run of the step.
        budget_s: no new run is started after so many seconds, in all.
        rtol: tolerance relative to the largest element of a leaf; the root of the machine epsilon
            if not given.
        progress: is called with what is being done.

    Returns:
        A report with the verdicts ``runs``, ``purity``, ``repeatability``, and for each value that
        the step shows: ``gradient`` or ``update``, ``logged loss``, ``evaluation loss``.

    Raises:
        ValueError: only some of loss_fn, params and batches are given.

    Examples:
        >>> from numden.pure import window_grad
        >>> from numden.property_tests.worlds.problems import tokens
        >>> loss_fn, params, batches, _ = tokens()
        >>> def step(params, world):
        ...     return window_grad(loss_fn)(params, [b for window in world for b in window])
        >>> report = report_step(step, loss_fn, params, batches, max_examples=10)
        >>> [(verdict.law, verdict.status) for verdict in report.verdicts if verdict.law[0] in "gl"]
        [('gradient', 'holds'), ('logged loss', 'holds')]
    """
    start, deadline, say = time.monotonic(), Deadline.after(budget_s), progress or (lambda _: None)
    problem = _problem(loss_fn, params, batches, objective)
    finish = Finish(max_norm, None if optimizer is None else _update_of(optimizer, problem.params))
    runner = Runner(step, problem, finish, lr, returns, timeout_s)
    meshes, fewest_ranks = _meshes(step, ranks, mesh)
    worlds = step_worlds(
        problem.batches,
        meshes,
        max_micro_steps=max_micro_steps,
        uneven=uneven,
    )
    search = Search(runner, worlds, fewest_ranks, seed, rtol, deadline, say)
    say("drawing windows")
    try:
        tried = drawn(worlds, max_examples, seed, lambda world: counts_something(problem, world))
        tried += _with_many_tokens(problem, tried)
    except Exception as error:  # Of the loss function, or of what draws its batches.
        said = f"the loss function cannot be run on a drawn batch: {type(error).__name__}: {error}"
        return _report(step, [Verdict("runs", "failed", said)], [], start, seed)
    verdicts, seen = first_runs(search, tried), []
    if all(verdict.status == "holds" for verdict in verdicts):
        runs, seen = all_runs(search, tried)
        names = dict.fromkeys(name for each in seen for name in each.quantities)
        hints: list[Candidate] = []  # What explains one value often explains the next.
        verdicts = [runs, *verdicts, *[compared(search, seen, name, hints) for name in names]]
    return _report(step, verdicts, seen, start, seed, _notes(tried, seen, max_norm))


def _report(
    step: Step,
    verdicts: Sequence[Verdict],
    seen: Sequence[Observation],
    start: float,
    seed: int,
    notes: tuple[str, ...] = (),
) -> Report:
    name = getattr(step, "__name__", type(step).__name__)
    return Report(name, tuple(verdicts), len(seen), time.monotonic() - start, seed, notes)


def _problem(loss_fn: LossFn | None, params: Any, batches: Any, objective: Objective) -> Problem:
    given = [each is not None for each in (loss_fn, params, batches)]
    if not any(given):
        return tokens()
    if loss_fn is None or params is None or batches is None:
        raise ValueError(
            "check_step: needs loss_fn, params and batches, or none of them, got "
            f"{dict(zip(('loss_fn', 'params', 'batches'), given, strict=True))}. Give all three, "
            "or try the step on problems.tokens()."
        )
    return Problem(loss_fn, params, batches_of(batches), objective)


def _meshes(
    step: Step,
    ranks: int | tuple[int, int] | None,
    mesh: Mapping[str, int] | SearchStrategy[dict[str, int]] | None,
) -> tuple[SearchStrategy[dict[str, int]], int]:
    """What draws the mesh, and the fewest ranks of a mesh that has ``dp`` alone."""
    if isinstance(mesh, SearchStrategy):
        return mesh, 1
    if mesh is not None:
        return st.just(dict(mesh)), math.prod(mesh.values())
    bounds: int | tuple[int, int] = getattr(step, "ranks", (1, 3)) if ranks is None else ranks
    low, high = (bounds, bounds) if isinstance(bounds, int) else bounds
    return st.integers(low, high).map(lambda size: {"dp": size}), low


def _update_of(optimizer: Optimizer, params: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """What one update makes of a gradient and of a change so far, in vectors of all leaves."""
    leaves, structure = tree.flatten(as_tree(params))
    start = torch.cat([leaf.detach().double().reshape(-1) for leaf in leaves])

    def shaped(vector: Tensor) -> Any:
        parts = vector.split([leaf.numel() for leaf in leaves])
        likes = zip(parts, leaves, strict=True)
        return tree.unflatten(structure, [p.reshape(like.shape).to(like) for p, like in likes])

    def update(grads: Tensor, change: Tensor) -> Tensor:
        old = shaped(start + change)
        new, _ = optimizer.update(shaped(grads), optimizer.init(old), old)
        return torch.cat([leaf.detach().double().reshape(-1) for leaf in tree.leaves(new)]) - start

    return update


def _with_many_tokens(problem: Problem, tried: Sequence[World]) -> list[World]:
    """A small world with its rows repeated until a short dtype cannot hold its count."""
    for world in tried[:20]:
        count = int(reference_of(problem, world).dens[0].sum())
        times = [n for n in range(1, 2 + 600 // count) if _is_rounded(n * count)]
        if times:
            batches = [batch for window in world for batch in window]
            return [tiled(world, times[0])] if all(map(has_rows, batches)) else []
    return []


def _is_rounded(count: int) -> bool:
    return int(torch.tensor(count).bfloat16()) != count


def _notes(
    tried: Sequence[World], seen: Sequence[Observation], max_norm: float | None
) -> tuple[str, ...]:
    notes = []
    if 0 < len(seen) < len(tried):
        notes.append(f"The time was up after {len(seen)} of {len(tried)} windows; raise budget_s.")
    if max_norm is not None and seen and all(_norm(each) > max_norm for each in seen):
        notes.append(
            f"The gradient was clipped to {max_norm:g} on every window, which hides its scale; try "
            "a larger max_norm too."
        )
    return tuple(notes)


def _norm(seen: Observation) -> float:
    grads = [grad.double().reshape(-1) for grad in seen.reference.grads.values()]
    return float(torch.linalg.vector_norm(torch.cat(grads))) if grads else 0.0
