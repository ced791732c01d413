"""The report on trainers from PyPI: its rows are those of the cases, and say what was found."""

import pytest
from trainers import run
from trainers.cases import cases

RULE = "|---"


def rows_in_report():
    lines = run.REPORT.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(RULE))
    cells = [line.strip("|").split("|") for line in lines[start + 1 :]]
    return [run.Row(*(cell.strip() for cell in row)) for row in cells]


def test_each_case_is_in_the_report():
    shown = {(row.trainer, row.code, row.processes) for row in rows_in_report()}
    assert {(case.trainer, case.code, str(case.ranks)) for case in cases()} == shown


def test_each_row_of_the_report_holds_or_does_not():
    rows = rows_in_report()
    holds = [row for row in rows if row.result.startswith("holds, equal to Σnum/Σden")]
    wrong = [row for row in rows if row.result.startswith("wrong on ")]
    raised = [row for row in rows if "windows the step raised ReplicasDiffer" in row.result]
    assert len(holds) + len(wrong) + len(raised) == len(rows)
    assert not any(row.explained for row in holds)
    assert all(row.explained for row in wrong)


@pytest.mark.parametrize(("index", "start"), [(0, "wrong on "), (2, "holds, ")])
def test_a_row_of_accelerate(index, start):
    case = [case for case in cases() if case.trainer == "accelerate"][index]
    (row,) = run.rows_of(case._replace(max_micro_steps=2), max_examples=6, budget_s=4)
    assert row[:5] == ("accelerate", case.code, "1", "1 to 2", "gradient")
    assert row.result.startswith(start)
    assert bool(row.explained) == (start == "wrong on ")
