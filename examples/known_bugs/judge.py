"""What the checker makes of a case: whether it flags the bug, what it calls it, false alarms."""

import warnings
from typing import Any, NamedTuple

from numden.property_tests.reports.report import Diagnosis, Report, Verdict
from numden.property_tests.step_checker.check import report_step
from numden.property_tests.worlds.world import Step, World, as_result

from .case import Case

__all__ = ["Judgement", "diagnosis_of", "judged", "report", "value"]

LAWS = {
    "grads": "gradient",
    "loss": "logged loss",
    "eval_loss": "evaluation loss",
    "params": "update",
}


class Judgement(NamedTuple):
    """What was found about one case.

    Attributes:
        id: the case.
        flagged: whether the wrong step breaks the law that the case is about.
        faults: what the diagnosis calls it; empty if it has no name for it.
        alternatives: other names that fit all windows that were drawn.
        named: whether ``faults`` are those of the case.
        windows: on how many windows the formula was compared.
        false_alarms: laws that the right step is said to break.
        seconds: how long both checks took.
    """

    id: str
    flagged: bool
    faults: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]
    named: bool
    windows: int
    false_alarms: tuple[str, ...]
    seconds: float


def judged(case: Case, **options: Any) -> Judgement:
    """Check both steps of ``case``."""
    wrong, right = report(case, case.wrong, **options), report(case, case.right, **options)
    verdict = _verdict(wrong, case)
    found = diagnosis_of(wrong, case)
    return Judgement(
        case.id,
        verdict is not None and verdict.status == "broken",
        found.faults if found else (),
        found.alternatives if found else (),
        found is not None and sorted(found.faults) == sorted(case.faults),
        found.windows if found else 0,
        tuple(each.law for each in (*right.broken, *right.failed)),
        wrong.seconds + right.seconds,
    )


def report(case: Case, step: Step, **options: Any) -> Report:
    """The checker's report on one of the steps of ``case``."""
    loss_fn, params, batches, objective = case.problem
    options = case.options | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return report_step(step, loss_fn, params, batches, objective=objective, **options)


def diagnosis_of(report: Report, case: Case) -> Diagnosis | None:
    """What the report says of the value that the case is about."""
    verdict = _verdict(report, case)
    found = verdict.diagnoses if verdict else ()
    about = [each for each in found if case.leaf in each.where]
    return (about or [*found, None])[0]


def _verdict(report: Report, case: Case) -> Verdict | None:
    return next((each for each in report.verdicts if each.law == LAWS[case.quantity]), None)


def value(case: Case, step: Step) -> float:
    """What a step gives on the case's own windows; with those before it, added up."""
    return sum(_value(case, step, world) for world in (*case.before, case.world))


def _value(case: Case, step: Step, world: World) -> float:
    shown = getattr(as_result(step(case.problem.params, world)), case.quantity)
    return float(shown[case.leaf] if isinstance(shown, dict) else shown)
