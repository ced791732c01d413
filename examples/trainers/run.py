"""Try trainers from PyPI: python examples/trainers/run.py [NAME...].

Names are transformers, accelerate, lightning and optax. Without any all are tried, which takes some
minutes, and ``report.md`` beside this file is written anew. The first run of optax makes an
environment with jax in runs/trainers/jax (about 600 MB).
"""

import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from numden.property_tests.reports.report import Report, Verdict
from numden.property_tests.step_checker.check import report_step
from trainers.cases import JAX, Case, cases

REPORT = Path(__file__).with_name("report.md")
LAWS = ("runs", "repeatability", "gradient", "update", "logged loss", "evaluation loss")
COLUMNS = ("trainer", "code", "processes", "micro-steps", "value", "result", "explained by")
MAX_EXAMPLES, BUDGET_S = 10, 45.0


class Row(NamedTuple):
    """What was found of one value of one case; a column each."""

    trainer: str
    code: str
    processes: str
    micro_steps: str
    value: str
    result: str
    explained: str


def main() -> None:
    """Try what is asked for, and show it."""
    torch.set_num_threads(1)
    console, asked = Console(), sys.argv[1:]
    chosen = [case for case in cases() if not asked or case.trainer in asked]
    rows = [row for case in track(chosen, "checking", console=console) for row in rows_of(case)]
    console.print(_table(rows))
    if not asked:
        REPORT.write_text(report(rows))
        console.print(f"wrote {REPORT}")


def rows_of(
    case: Case, *, max_examples: int = MAX_EXAMPLES, budget_s: float = BUDGET_S
) -> list[Row]:
    """Check one case."""
    problem = case.problem()
    found = report_step(
        case.step(problem),
        problem.loss_fn,
        problem.params,
        problem.batches,
        objective=problem.objective,
        ranks=case.ranks,
        max_micro_steps=case.max_micro_steps,
        max_examples=max_examples,
        budget_s=budget_s,
        rtol=case.rtol,
    )
    up_to = f"1 to {case.max_micro_steps}" if case.max_micro_steps > 1 else "1"
    about = (case.trainer, case.code, str(case.ranks), up_to)
    return [Row(*about, v.law, _result(v), _explained(v)) for v in _shown(found)]


def _shown(found: Report) -> Iterable[Verdict]:
    """The verdicts on values; on other laws if they do not hold; an update if it is no gradient."""
    laws = {verdict.law: verdict for verdict in found.verdicts}
    if (
        "gradient" in laws
        and laws["gradient"].status == laws.get("update", laws["gradient"]).status
    ):
        laws.pop("update", None)
    values = ("gradient", "update", "logged loss", "evaluation loss")
    return [v for v in laws.values() if v.law in values or v.status in ("broken", "failed")]


def _result(verdict: Verdict) -> str:
    if verdict.status != "broken" or verdict.violation is None:
        return f"{verdict.status}, {verdict.words}"
    term, expected, got = verdict.violation.differences[0]
    if not isinstance(expected, torch.Tensor):
        return verdict.words.partition("\n")[0].rstrip(".")
    ratio = float(got) / float(expected) if float(expected) else float("nan")
    return (
        f"{verdict.words}; on the smallest, {term}: expected {float(expected):.6g}, "
        f"got {float(got):.6g}, ratio {ratio:.4g}"
    )


def _explained(verdict: Verdict) -> str:
    if verdict.status != "broken" or not verdict.diagnoses:
        return ""
    named = ["; ".join(each.faults) for each in verdict.diagnoses if each.faults]
    return ", ".join(dict.fromkeys(named)) or "none found"


def _table(rows: list[Row]) -> Table:
    table = Table("case", "value", "result", title="Against Σnum/Σden", show_lines=True)
    for row in rows:
        case = f"{row.trainer}, {row.processes} proc., {row.micro_steps} steps: {row.code}"
        found = f"{row.result}\n{row.explained}".strip()
        table.add_row(escape(case), row.value, escape(found))
    return table


def report(rows: list[Row]) -> str:
    """All rows as Markdown, with versions."""
    names = ("torch", "transformers", "accelerate", "lightning")
    versions = [f"{name} {version(name).partition('+')[0]}" for name in names]
    versions += [each.replace("==", " ") for each in JAX]
    head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    parts = [
        "# Trainers from PyPI against Σnum/Σden",
        "Made by `python examples/trainers/run.py` on CPU, with tiny random models in float64: "
        f"{', '.join(versions)}.",
        NOTES.strip(),
        "\n".join([*head, *lines]),
    ]
    return "\n\n".join(parts) + "\n"


NOTES = """
Each row is one value that a trainer shows, compared on drawn windows: ragged rows, prompts that are
not supervised, padding, and windows shorter than the configured accumulation. Right is the sum of
the losses of all predicted tokens of the window, over all processes, divided by their number; for
Mixtral plus 0.5 times the mean over micro-batches of its router loss. What "explained by" names was
found to give the numbers on all windows that were tried. The gradient is the one that the optimizer
gets, the logged loss what the trainer logs for the window, the evaluation loss what it reports for
the same micro-batches before the update. Models of transformers compute the loss in float32, and
MultiSteps was 3e-8 apart from Σnum/Σden with three micro-steps, so they are
compared to 1e-5. With the recipe of accelerate's documentation, and in the second row of optax, the
user counts the tokens of the window. "None found" says that no formula of the catalogue was seen to
match in the time given. What is named in Mixtral's gradient and logged loss is said of the router's
term: it is added up over micro-steps and processes, where the cross entropy is averaged.
"""


if __name__ == "__main__":
    main()
