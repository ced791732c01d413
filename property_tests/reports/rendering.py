"""A report for people, as plain text or in colour on a terminal, and for programs as JSON.

A reader sees, in this order: what was found; a line for each law; for each broken law the rule,
the wrong values, the cause, what to do, the smallest example, and code that repeats it.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ._layout import (
    Row,
    details,
    explanations,
    headline,
    in_words,
    ratio_of,
    rows_of,
    sentence,
    shown,
    summary,
)
from .report import Diagnosis, Report, Verdict

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

__all__ = ["as_json", "as_text", "print_report", "to_rich"]

_STYLES = {"holds": "green", "broken": "bold red", "skipped": "dim", "failed": "bold yellow"}
_LOUD = {"broken": "BROKEN", "failed": "FAILED"}  # what stands out where there is no colour
_LABEL = len("usual cause") + 4
_MOST_VALUES = 8
_PASTE = "to repeat it"


# --- plain text ----------------------------------------------------------------------------------


def as_text(report: Report, *, width: int = 100) -> str:
    """The report as plain text.

    Args:
        report: what a check found.
        width: columns that sentences are wrapped to; examples and code stay as they are.

    Examples:
        >>> from numden.property_tests import LawViolation
        >>> from numden.property_tests.violation import Difference
        >>> found = LawViolation("emptiness", "all 0.", [Difference("den", 0, 1)], "A clamp.")
        >>> verdicts = (Verdict("emptiness", "broken", violation=found), Verdict("purity", "holds"))
        >>> print(as_text(Report("loss_fn", verdicts, 30, 0.5, 0)))
        loss_fn: 1 of 2 laws broken: emptiness
        30 examples in 0.5 s, seed 0
        <BLANKLINE>
          emptiness  BROKEN   den: expected 0, got 1
          purity     holds
        <BLANKLINE>
        emptiness is broken
        -------------------
          rule         all 0.
          values       den: expected 0, got 1
          usual cause  A clamp.
    """
    lines = [headline(report), summary(report), "", *_table_lines(report, width)]
    for verdict in details(report):
        title = f"{verdict.law} {_is(verdict)}"
        lines += ["", title, "-" * len(title), *_detail_lines(verdict, width)]
    for note in report.notes:
        lines += ["", *wrap(f"Note: {note}", width)]
    return "\n".join(lines)


def _table_lines(report: Report, width: int) -> Iterator[str]:
    longest = max((len(verdict.law) for verdict in report.verdicts), default=0)
    for verdict in report.verdicts:
        word = _LOUD.get(verdict.status, verdict.status)
        yield from _hanging(f"  {verdict.law:{longest}}  {word:7}  ", [sentence(verdict)], width)


def _detail_lines(verdict: Verdict, width: int) -> Iterator[str]:
    for label, lines in _labelled(verdict):
        yield from _hanging(f"  {label:{_LABEL - 2}}", lines, width)
    if verdict.example:
        example = verdict.example.strip("\n").splitlines()
        margins = chain([f"  {'example':{_LABEL - 2}}"], [" " * _LABEL] * len(example))
        yield from (margin + line for margin, line in zip(margins, example, strict=False))
    if verdict.code:
        yield from ["", f"{_PASTE}:", "", verdict.code.strip("\n")]


def _labelled(verdict: Verdict) -> list[tuple[str, list[str]]]:
    """What goes beside a label, the values behind the rule."""
    said = [(label, [text]) for label, text in explanations(verdict)]
    rows, hidden = _first(rows_of(verdict))
    if rows:
        said.insert(1, ("values", [*map(in_words, rows), *hidden]))
    return said


def _first(rows: list[Row]) -> tuple[list[Row], list[str]]:
    hidden = len(rows) - _MOST_VALUES
    return rows[:_MOST_VALUES], [f"and {hidden} more"] if hidden > 0 else []


def _hanging(margin: str, texts: Sequence[str], width: int) -> Iterator[str]:
    """Texts beside a margin, each wrapped on its own."""
    room = max(20, width - len(margin))
    lines = [line for text in texts for line in _wrapped(text, room)] or [""]
    for number, line in enumerate(lines):
        yield f"{' ' * len(margin) if number else margin}{line}".rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    paragraphs = text.splitlines() or [""]
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return [line for each in paragraphs for line in wrap(each, width, **options) or [""]]


def _is(verdict: Verdict) -> str:
    return "is broken" if verdict.status == "broken" else "could not be tried"


# --- on a terminal -------------------------------------------------------------------------------


def print_report(report: Report, console: "Console") -> None:
    """Print the report. Code is printed to the full length of its lines, without a frame."""
    console.print(to_rich(report), crop=False)


def to_rich(report: Report) -> "Group":
    """The report as something that rich prints."""
    from rich.console import Group
    from rich.text import Text

    color = "green" if not report.exit_code else "red" if report.broken else "yellow"
    parts: list[Any] = [_rich_table(report)]
    for verdict in details(report):
        parts += [Text(), _rich_panel(verdict), *_rich_code(verdict)]
    for note in report.notes:
        parts += [Text(), Text.assemble(("Note: ", "bold"), note)]
    # Last, since the end is what a terminal shows.
    last = Text.assemble((headline(report), f"bold {color}"), (f"\n{summary(report)}", "dim"))
    return Group(*parts, Text(), last)


def _rich_table(report: Report) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("law", "verdict", "what was found"):
        table.add_column(name, overflow="fold", no_wrap=name == "verdict")
    for verdict in report.verdicts:
        style = _STYLES[verdict.status]
        said = Text(sentence(verdict), "" if verdict.status != "skipped" else "dim")
        table.add_row(Text(verdict.law), Text(verdict.status, style), said)
    return table


def _rich_panel(verdict: Verdict) -> "Panel":
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    body = Table.grid(padding=(0, 2, 1, 0))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(overflow="fold")
    for label, text in explanations(verdict):
        body.add_row(label, Text(text, "bold" if label == "what to do" else ""))
        if label == "rule" and rows_of(verdict):
            body.add_row("values", _rich_values(verdict))
    if verdict.example:
        body.add_row("example", Text(verdict.example.strip("\n")))
    style = _STYLES[verdict.status]
    title = Text(f"{verdict.law} {_is(verdict)}", style)
    return Panel(body, title=title, title_align="left", border_style=style.split()[-1])


def _rich_values(verdict: Verdict) -> "Text":
    from rich.text import Text

    rows, hidden = _first(rows_of(verdict))
    lines = [_rich_value(row) for row in rows] + [Text(text, "dim") for text in hidden]
    return Text("\n").join(lines)


def _rich_value(row: Row) -> "Text":
    """The words of ``in_words``, in colour."""
    from rich.text import Text

    expected, got, _ = shown(row)
    line = Text(in_words(row))
    line.stylize("bold", 0, len(row.term))
    for word, style in ((f"expected {expected}", "green"), (f"got {got}", "red")):
        start = line.plain.index(word, len(row.term))
        line.stylize(style, start, start + len(word))
    return line


def _rich_code(verdict: Verdict) -> Iterator[Any]:
    from rich.syntax import Syntax
    from rich.text import Text

    if verdict.code:
        code = Syntax("", "python", background_color="default").highlight(verdict.code.strip("\n"))
        code.rstrip()  # a line end, which Syntax adds
        code.no_wrap, code.overflow = True, "ignore"
        yield from [Text(f"\n{_PASTE}:\n", "bold"), code]


# --- for programs --------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON types.

    Keys: ``subject``, ``exit_code`` (0: all laws hold, 1: one is broken, 2: the code under test
    failed), ``examples``, ``seconds``, ``seed``, ``notes`` (texts), and ``verdicts``, each with

    - ``law``, ``status`` (holds, broken, skipped, failed), ``words``, ``example``, ``code``: texts;
    - ``rule`` and ``cause``: texts, null unless the law is broken;
    - ``differences``: each with ``term``, ``expected``, ``got`` (numbers or texts, of a tensor the
      element that is furthest off; "nan" and "inf" are texts), ``ratio`` (a number or null), and
      ``note`` (a text);
    - ``diagnoses``: each with ``faults`` (texts), ``explanation``, ``remedy``, ``where``,
      ``alternatives`` (lists of texts), ``windows`` (a number).

    Examples:
        >>> report = Report("loss_fn", (Verdict("purity", "holds"),), 30, 0.5, 0)
        >>> as_json(report)["exit_code"], as_json(report)["verdicts"][0]["status"]
        (0, 'holds')
    """
    plain = {field: getattr(report, field) for field in ("subject", "examples", "seconds", "seed")}
    return plain | {
        "exit_code": report.exit_code,
        "notes": list(report.notes),
        "verdicts": [_verdict_json(verdict) for verdict in report.verdicts],
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    fields = ("law", "status", "words", "example", "code")
    violation = verdict.violation
    return {field: getattr(verdict, field) for field in fields} | {
        "rule": violation and violation.rule,
        "cause": violation and violation.cause,
        "differences": [_row_json(row) for row in rows_of(verdict)],
        "diagnoses": [_diagnosis_json(diagnosis) for diagnosis in verdict.diagnoses],
    }


def _row_json(row: Row) -> dict[str, Any]:
    values = {"expected": _finite(row.expected), "got": _finite(row.got)}
    return {"term": row.term, **values, "ratio": ratio_of(row), "note": row.note}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    others = [list(faults) for faults in diagnosis.alternatives]
    return diagnosis._asdict() | {"faults": list(diagnosis.faults), "alternatives": others}
