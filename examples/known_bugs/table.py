"""Try the checker on all known bugs, and write what it finds: python examples/known_bugs/table.py.

Takes some minutes; the table is ``table.md`` beside this file.
"""

import multiprocessing
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from known_bugs import CASES, OUT_OF_SCOPE, Case
from known_bugs.judge import Judgement, judged, value

TABLE = Path(__file__).with_name("table.md")
BY_ID = {case.id: case for case in CASES}
BUDGET_S = 120.0  # enough for no check to be cut short
HEAD = (
    "| bug | source | expected | got | flagged | diagnosis | right kind | windows |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Check all cases, one process for each core, and write the table."""
    torch.set_num_threads(1)
    ids = sys.argv[1:] or list(BY_ID)
    with multiprocessing.get_context("fork").Pool() as pool:
        found = list(track(pool.imap(judge, ids), "checking", total=len(ids)))
    console = Console()
    console.print(totals(found), markup=False)
    if len(ids) == len(BY_ID):
        TABLE.write_text(table(found))
        console.print(f"wrote {TABLE}")
    else:
        console.print("\n".join(map(line, found)), markup=False)


def judge(case_id: str) -> Judgement:
    """One case, in a process of its own."""
    torch.set_num_threads(1)
    return judged(BY_ID[case_id], budget_s=BUDGET_S)


def table(found: list[Judgement]) -> str:
    """The table, as Markdown."""
    lines = [
        "# Known bugs, and what the checker says of them",
        "Made by `python examples/known_bugs/table.py`. Expected and got are what the steps "
        "give on the windows of the report; the last column says on how many drawn windows the "
        "diagnosis was compared.",
        totals(found),
        "\n".join([HEAD, *map(line, found)]),
        "Left out:",
        "\n".join(f"- {bug}: {why}" for bug, why in OUT_OF_SCOPE.items()),
    ]
    return "\n\n".join(lines) + "\n"


def totals(found: list[Judgement]) -> str:
    """The result in three lines."""
    named = [each for each in found if BY_ID[each.id].faults]
    alarms = [each.id for each in found if each.false_alarms]
    return "\n".join(
        [
            f"- flagged: {_of(each.flagged for each in found)}",
            f"- named: {_of(each.named for each in named)} whose numbers a formula over the sums "
            f"of micro-steps gives; of the other {len(found) - len(named)} it says that none does",
            f"- false alarms on the right steps: {', '.join(alarms) or 'none'}",
        ]
    )


def _of(flags: Iterable[bool]) -> str:
    flags = list(flags)
    return f"{sum(flags)} of {len(flags)}"


def line(found: Judgement) -> str:
    """One row of the table."""
    case = BY_ID[found.id]
    cells = [
        f"{case.id}: {case.title}",
        case.source,
        f"{value(case, case.right):.6g}",
        f"{value(case, case.wrong):.6g}",
        "yes" if found.flagged else "**no**",
        _diagnosis(found),
        _kind(case, found),
        str(found.windows),
    ]
    return f"| {' | '.join(cells)} |"


def _diagnosis(found: Judgement) -> str:
    names = [" + ".join(faults) for faults in (found.faults, *found.alternatives)]
    return ", or ".join(names) or "no formula matches"


def _kind(case: Case, found: Judgement) -> str:
    if found.named:
        return "yes" if case.faults else "yes, there is none"
    return f"**no**: {' + '.join(case.faults) or 'there is none'}"


if __name__ == "__main__":
    main()
