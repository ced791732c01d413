"""What a check found: a verdict for each law, as data. ``rendering`` shows it."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from ..violation import Difference, LawViolation

__all__ = ["CheckFailed", "Diagnosis", "Progress", "Report", "Verdict"]

Progress = Callable[[str], None]
"""Is called with what is being done."""


class Diagnosis(NamedTuple):
    """Which wrong formula gives the wrong numbers.

    Attributes:
        faults: the names of what went wrong, of the catalogue in ``faults``: ``("mean of
            micro-step means",)``. Empty if no formula of the catalogue matches.
        explanation: what the step computes, in plain words, with the numbers.
        remedy: what to do about it.
        where: what is wrong, such as ``"grads['w']"``; the rest may be right.
        alternatives: other faults that give the same numbers on each window that was drawn.
        windows: on how many windows the formula was seen to match.
    """

    faults: tuple[str, ...]
    explanation: str
    remedy: str
    where: str = ""
    alternatives: tuple[tuple[str, ...], ...] = ()
    windows: int = 1


class Verdict(NamedTuple):
    """What was found about one law.

    Attributes:
        law: its name, such as ``"additivity"`` or ``"gradient"``.
        status: ``"holds"``; ``"broken"``; ``"skipped"``, it does not apply or could not be tried;
            ``"failed"``, the code under test raised or hung, so nothing can be said.
        words: one sentence: what was tried, why it was skipped, or what was raised.
        violation: the broken law on the smallest example: rule, values, usual cause.
        example: that example for a reader: token counts, losses, expected, got.
        code: that example as Python to copy and paste.
        diagnoses: for a step, which wrong formula explains the values.
    """

    law: str
    status: Literal["holds", "broken", "skipped", "failed"]
    words: str = ""
    violation: LawViolation | None = None
    example: str = ""
    code: str = ""
    diagnoses: tuple[Diagnosis, ...] = ()


class Report(NamedTuple):
    """What a check found.

    Attributes:
        subject: the name of what was checked.
        verdicts: one for each law.
        examples: how many examples were tried in all.
        seconds: how long it took.
        seed: what reproduces it.
        notes: what else a reader should know, a sentence each.
    """

    subject: str
    verdicts: tuple[Verdict, ...]
    examples: int
    seconds: float
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts that are broken."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == "broken")

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """The verdicts that could not be had, since the code under test raised or hung."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == "failed")

    @property
    def exit_code(self) -> int:
        """0: no law is broken; 1: one is; 2: the code under test could not be run."""
        return 1 if self.broken else 2 if self.failed else 0

    def require(self) -> "Report":
        """This report, if nothing is broken and nothing failed.

        Raises:
            CheckFailed: else; its message is the report.
        """
        if self.exit_code:
            raise CheckFailed(self)
        return self

    def __str__(self) -> str:
        from .rendering import as_text

        return as_text(self)


class CheckFailed(LawViolation):
    """A check found something; the message is its report.

    Attributes:
        report: the report.
    """

    def __init__(self, report: Report):
        bad = [*report.broken, *report.failed]
        violations = [verdict.violation for verdict in bad if verdict.violation]
        differences: list[Difference] = [d for each in violations for d in each.differences]
        super().__init__(
            ", ".join(verdict.law for verdict in bad),
            f"{report.subject} must keep its laws.",
            differences,
            next((each.cause for each in violations), ""),
        )
        self.report = report

    def __str__(self) -> str:
        return str(self.report)
