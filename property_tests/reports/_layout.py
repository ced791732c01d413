"""What a reader is told of a report, as plain words and numbers; ``rendering`` sets it."""

import math
from fractions import Fraction
from textwrap import shorten
from typing import Any, NamedTuple

from torch import Tensor

from ..violation import Difference, worst_element
from .report import Diagnosis, Report, Verdict

__all__ = [
    "Row",
    "details",
    "explanations",
    "headline",
    "in_words",
    "ratio_of",
    "row_of",
    "rows_of",
    "sentence",
    "shown",
    "summary",
]

_LARGEST_DENOMINATOR = 64  # of a ratio that is also shown as a fraction


class Row(NamedTuple):
    """A value that breaks a law; of a tensor the element that is furthest off.

    Attributes:
        term: its place as code, such as ``num['ce']`` or ``grads['w'][2]``.
        expected: a number, or words.
        got: the same.
        note: what else there is to say, such as ``"3 of 8 elements differ"``.
    """

    term: str
    expected: float | int | bool | str
    got: float | int | bool | str
    note: str = ""


def headline(report: Report) -> str:
    """What was found, in one line.

    Examples:
        >>> headline(Report("loss_fn", (Verdict("additivity", "holds"),), 30, 1.0, 0))
        'loss_fn: all laws hold'
        >>> verdicts = (Verdict("additivity", "broken"), Verdict("padding", "skipped"))
        >>> headline(Report("loss_fn", verdicts, 30, 1.0, 0))
        'loss_fn: 1 of 1 laws broken: additivity'
    """
    tried = [verdict for verdict in report.verdicts if verdict.status != "skipped"]
    said = [
        f"{len(bad)} of {len(tried)} laws {what}: {', '.join(verdict.law for verdict in bad)}"
        for bad, what in ((report.broken, "broken"), (report.failed, "could not be tried"))
        if bad
    ]
    skipped = len(report.verdicts) - len(tried)
    good = f"all laws hold ({skipped} skipped)" if skipped else "all laws hold"
    if not tried:
        good = "no law could be tried"
    return f"{report.subject}: {'; '.join(said) or good}"


def summary(report: Report) -> str:
    """How it was found: examples, time, seed."""
    examples = "1 example" if report.examples == 1 else f"{report.examples} examples"
    return f"{examples} in {report.seconds:.1f} s, seed {report.seed}"


def details(report: Report) -> tuple[Verdict, ...]:
    """The verdicts that need more than the sentence of the table."""
    shown = [verdict for verdict in report.failed if verdict.example or verdict.code]
    return (*report.broken, *shown)


def sentence(verdict: Verdict) -> str:
    """What there is to say about a law in a line of a table.

    Of a broken law that is the known fault, or else the first value that is wrong.
    """
    if verdict.status != "broken":
        return verdict.words
    named = [_name(diagnosis.faults) for diagnosis in verdict.diagnoses if diagnosis.faults]
    if named:
        return "; ".join(dict.fromkeys(named))
    rows = rows_of(verdict)
    return in_words(rows[0]) if rows else verdict.words


def explanations(verdict: Verdict) -> list[tuple[str, str]]:
    """What went wrong and what to do about it: labels and sentences."""
    violation, said = verdict.violation, []
    if violation:
        said.append(("rule", violation.rule))
    said.append(("found", verdict.words))
    for diagnosis in verdict.diagnoses:
        said += _of_diagnosis(diagnosis)
    if violation and not any(diagnosis.faults for diagnosis in verdict.diagnoses):
        said.append(("usual cause", violation.cause))
    return [(label, text) for label, text in said if text]


def _of_diagnosis(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    place = f"{diagnosis.where}: " if diagnosis.where else ""
    name = f"{_name(diagnosis.faults)}. " if diagnosis.faults else ""
    others = "; or ".join(map(_name, diagnosis.alternatives))
    return [
        ("cause", f"{place}{name}{diagnosis.explanation}"),
        ("what to do", diagnosis.remedy),
        ("or it is", f"{others}: the same numbers on all windows" if others else ""),
    ]


def _name(faults: tuple[str, ...]) -> str:
    return " + ".join(faults)


def in_words(row: Row) -> str:
    """A wrong value as a sentence.

    Examples:
        >>> in_words(Row("num", 14.0, 3.5, "1 of 2 elements differ"))
        'num: expected 14, got 3.5 (ratio 0.25 = 1/4; 1 of 2 elements differ)'
    """
    expected, got, ratio = shown(row)
    asides = [f"ratio {ratio}" if ratio else "", row.note]
    aside = "; ".join(filter(None, asides))
    return f"{row.term}: expected {expected}, got {got}{f' ({aside})' if aside else ''}"


def rows_of(verdict: Verdict) -> list[Row]:
    """The values that break a law."""
    return [row_of(each) for each in verdict.violation.differences] if verdict.violation else []


def row_of(difference: Difference) -> Row:
    """A difference as numbers and words.

    Examples:
        >>> import torch
        >>> row_of(Difference("grads['w']", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
        Row(term="grads['w'][1]", expected=2.0, got=4.0, note='1 of 2 elements differ')
        >>> row_of(Difference("num", torch.tensor([1.0]), torch.tensor([[1.0]])))
        Row(term='num', expected='shape [1]', got='shape [1, 1]', note='')
    """
    term, expected, got = difference
    if not (isinstance(expected, Tensor) and isinstance(got, Tensor)):
        return Row(term, _plain(expected), _plain(got))
    if expected.shape != got.shape:
        return Row(term, f"shape {list(expected.shape)}", f"shape {list(got.shape)}")
    if expected.ndim == 0:
        return Row(term, _plain(expected), _plain(got))
    (place, expected, got), note = worst_element(difference)
    return Row(place, _plain(expected), _plain(got), note)


def ratio_of(row: Row) -> float | None:
    """``got / expected``, if that is a number."""
    values = (row.expected, row.got)
    if any(isinstance(value, str | bool) or not math.isfinite(value) for value in values):
        return None
    expected, got = map(float, values)
    return got / expected if expected else None


def shown(row: Row) -> tuple[str, str, str]:
    """Expected, got, and their ratio, for people: six digits, and all digits if six are the same.

    Examples:
        >>> shown(Row("num", 3.5, 5.0))
        ('3.5', '5', '1.42857 = 10/7')
        >>> shown(Row("num", 0.1 + 0.2, 0.3))
        ('0.30000000000000004', '0.3', '1')
        >>> shown(Row("batch['x']", "a tensor", "none"))
        ('a tensor', 'none', '')
    """
    values = (row.expected, row.got)
    expected, got = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
    if expected == got:
        expected, got = map(str, values)
    return expected, got, _fraction(ratio_of(row))


def _fraction(ratio: float | None) -> str:
    """A ratio, and what it is as a fraction if that is a simple one: a fault is often a count."""
    if ratio is None:
        return ""
    simple = Fraction(ratio).limit_denominator(_LARGEST_DENOMINATOR)
    if simple.denominator == 1 or not math.isclose(simple, ratio, rel_tol=1e-9):
        return f"{ratio:.6g}"
    return f"{ratio:.6g} = {simple}"


def _plain(value: Any) -> float | int | bool | str:
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, float | int):
        return value
    return shorten(str(value), 60, placeholder=" …")
