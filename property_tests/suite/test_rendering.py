"""Reports as people and programs see them."""

import io
import json

import pytest
import torch
from rich.console import Console

from numden.property_tests.reports._layout import Row, headline, in_words, sentence
from numden.property_tests.reports.rendering import as_json, as_text, print_report
from numden.property_tests.reports.report import CheckFailed, Diagnosis, Report, Verdict
from numden.property_tests.violation import Difference, LawViolation

CODE = (
    "import torch\n"
    "from my_trainer import step\n"
    "\n"
    "world = World([[token_batch([[8.0]]), token_batch([[2.0, 2.0, 2.0]])]])\n"
    "if step({'w': torch.tensor(1.0)}, world) != 3.5:  # longer than a terminal is wide\n"
    "    print('wrong')\n"
)
DIAGNOSIS = Diagnosis(
    faults=("mean of micro-step means",),
    explanation="The means of the micro-steps are averaged: (8/1 + 6/3) / 2 = 5.",
    remedy="Count the tokens of the window first, and divide each sum by that count.",
    where="grads['w']",
    alternatives=(("mean of rank means", "double division"),),
    windows=12,
)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def violation(differences=None, law="gradient"):
    differences = differences or [Difference("grads['w']", scalar(3.5), scalar(5.0))]
    return LawViolation(law, "the gradient must be that of the ratio.", differences, "a slip.")


def broken(**fields):
    fields = {"violation": violation(), "diagnoses": (DIAGNOSIS,), "code": CODE} | fields
    return Verdict("gradient", "broken", example="rank 0: 1 token\nrank 1: 3 tokens", **fields)


HOLDS = Verdict("logged loss", "holds", "equals the optimised loss")
SKIPPED = Verdict("clipping", "skipped", "max_norm is not given")
FAILED = Verdict("evaluation loss", "failed", "IndexError: index 0 is out of bounds (step.py:7)")


def report_of(*verdicts, notes=()):
    return Report("my_trainer.py:step", verdicts, 60, 8.21, 7, notes)


REPORT = report_of(broken(), HOLDS, SKIPPED, FAILED, notes=("The step draws at random.",))


def on_terminal(report, width, color=False):
    system = "standard" if color else None
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, force_terminal=color, color_system=system))
    return out.getvalue()


def words(text):
    """Without frames, colours and line ends."""
    return " ".join(text.translate({ord(c): " " for c in "│╭╮╰╯─"}).split())


# --- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([HOLDS], "all laws hold"),
        ([HOLDS, SKIPPED], "all laws hold (1 skipped)"),
        ([SKIPPED], "no law could be tried"),
        ([broken(), HOLDS, SKIPPED], "1 of 2 laws broken: gradient"),
        ([HOLDS, FAILED], "1 of 2 laws could not be tried: evaluation loss"),
        (
            [broken(), FAILED],
            "1 of 2 laws broken: gradient; 1 of 2 laws could not be tried: evaluation loss",
        ),
    ],
)
def test_the_headline_says_what_was_found(verdicts, said):
    assert headline(report_of(*verdicts)) == f"my_trainer.py:step: {said}"


def test_a_broken_law_is_told_by_its_fault_or_else_its_first_value():
    assert sentence(broken()) == "mean of micro-step means"
    both = (DIAGNOSIS, DIAGNOSIS._replace(faults=("local count", "stale grad")))
    assert sentence(broken(diagnoses=both)) == "mean of micro-step means; local count + stale grad"
    unknown = DIAGNOSIS._replace(faults=())
    values = "grads['w']: expected 3.5, got 5 (ratio 1.42857 = 10/7)"
    assert sentence(broken(diagnoses=(unknown,))) == values
    assert sentence(SKIPPED) == "max_norm is not given"


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (("den", torch.tensor(2), torch.tensor(1)), "expected 2, got 1 (ratio 0.5 = 1/2)"),
        (("n", scalar(0.0), scalar(2.0)), "expected 0, got 2"),
        (("n", scalar(1.0), scalar(float("nan"))), "expected 1, got nan"),
        (("n", scalar(1.0), scalar(4.0)), "expected 1, got 4 (ratio 4)"),
        (("n", scalar(1.0), scalar(-4.0)), "expected 1, got -4 (ratio -4)"),
        (("n", scalar(1.0), scalar(0.123456789)), "expected 1, got 0.123457 (ratio 0.123457)"),
        (("n", scalar(1.0), scalar(1 + 2**-40)), "expected 1.0, got 1.0000000000009095 (ratio 1)"),
        (("x", torch.ones(2), "none"), "expected tensor([1., 1.]), got none"),
        (("x", torch.ones(2), torch.ones(3)), "expected shape [2], got shape [3]"),
        (("x", torch.tensor(True), torch.tensor(False)), "expected True, got False"),
    ],
)
def test_values_in_words(difference, said):
    report = as_text(report_of(broken(violation=violation([Difference(*difference)]))))
    assert f"  values       {difference[0]}: {said}\n" in report


def test_of_a_tensor_the_worst_element_is_shown():
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = torch.tensor([[1.0, 2.5], [3.0, 8.0]])
    row = in_words(Row("w[1, 1]", 4.0, 8.0, "2 of 4 elements differ"))
    text = as_text(report_of(broken(violation=violation([Difference("w", expected, got)]))))
    assert row == "w[1, 1]: expected 4, got 8 (ratio 2; 2 of 4 elements differ)"
    assert row in text
    got[0, 0] = float("nan")  # further off than any number
    text = as_text(report_of(broken(violation=violation([Difference("w", expected, got)]))))
    assert "w[0, 0]: expected 1, got nan (3 of 4 elements differ)" in text


def test_many_values_are_cut_for_people_and_not_for_programs():
    differences = [Difference(f"grads[{i}]", scalar(1.0), scalar(2.0)) for i in range(20)]
    report = report_of(broken(violation=violation(differences)))
    for shown in (as_text(report), on_terminal(report, 100)):
        assert "grads[7]" in shown
        assert "grads[8]" not in shown
        assert "and 12 more" in shown
    assert len(as_json(report)["verdicts"][0]["differences"]) == 20


# --- plain text ----------------------------------------------------------------------------------


def test_the_whole_text():
    report = report_of(broken(), HOLDS, SKIPPED, FAILED, notes=("The step draws at random.",))
    assert as_text(report, width=80) == (
        "my_trainer.py:step: 1 of 3 laws broken: gradient; "
        "1 of 3 laws could not be tried: evaluation loss\n"
        "60 examples in 8.2 s, seed 7\n"
        "\n"
        "  gradient         BROKEN   mean of micro-step means\n"
        "  logged loss      holds    equals the optimised loss\n"
        "  clipping         skipped  max_norm is not given\n"
        "  evaluation loss  FAILED   IndexError: index 0 is out of bounds (step.py:7)\n"
        "\n"
        "gradient is broken\n"
        "------------------\n"
        "  rule         the gradient must be that of the ratio.\n"
        "  values       grads['w']: expected 3.5, got 5 (ratio 1.42857 = 10/7)\n"
        "  cause        grads['w']: mean of micro-step means. The means of the\n"
        "               micro-steps are averaged: (8/1 + 6/3) / 2 = 5.\n"
        "  what to do   Count the tokens of the window first, and divide each sum by that\n"
        "               count.\n"
        "  or it is     mean of rank means + double division: the same numbers on all\n"
        "               windows\n"
        "  example      rank 0: 1 token\n"
        "               rank 1: 3 tokens\n"
        "\n"
        "to repeat it:\n"
        "\n"
        f"{CODE}\n"
        "Note: The step draws at random."
    )


@pytest.mark.parametrize("width", [60, 80])
def test_sentences_fit_the_width_and_code_is_whole(width):
    text = as_text(report_of(broken(), HOLDS, SKIPPED, FAILED), width=width)
    beside = [line for line in text.splitlines() if line.startswith("  ")]
    assert max(len(line) for line in beside if line.strip() not in CODE) <= width
    assert CODE.strip() in text


def test_without_a_known_fault_the_usual_cause_is_told():
    unknown = Diagnosis((), "No known formula gives 5.", "")
    text = as_text(report_of(broken(diagnoses=(unknown,))))
    assert "  cause        No known formula gives 5.\n  usual cause  a slip.\n" in text
    assert "what to do" not in text
    assert "usual cause" not in as_text(REPORT)


def test_code_that_failed_is_shown_if_there_is_an_example():
    told = FAILED._replace(example="rank 0: 1 token", code="step(params, world)")
    text = as_text(report_of(told))
    assert "evaluation loss could not be tried\n" in text
    assert "  found        IndexError: index 0 is out of bounds (step.py:7)\n" in text
    assert text.endswith("  example      rank 0: 1 token\n\nto repeat it:\n\nstep(params, world)")
    assert "evaluation loss could not be tried" in on_terminal(report_of(told), 80)
    assert "found" not in as_text(report_of(FAILED))


def test_what_was_found_beside_the_values_is_told():
    text = as_text(report_of(broken(words="wrong on 50 of 53 windows")))
    assert "(ratio 1.42857 = 10/7)\n  found        wrong on 50 of 53 windows\n" in text


def test_the_message_of_a_failed_check_is_its_report():
    with pytest.raises(CheckFailed) as caught:
        REPORT.require()
    assert str(caught.value) == as_text(REPORT)


# --- on a terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_shows_all_that_the_text_says(width):
    shown = words(on_terminal(REPORT, width)).replace(" ", "")
    for verdict in REPORT.verdicts:
        assert f"{verdict.law}{verdict.status}".replace(" ", "") in shown
    for said in (
        "gradient is broken",
        "grads['w']: expected 3.5, got 5",
        *(DIAGNOSIS.explanation, DIAGNOSIS.remedy),
        "mean of rank means + double division",
        "rank 1: 3 tokens",
        "Note: The step draws at random.",
    ):
        assert said.replace(" ", "") in shown


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_is_not_overrun_and_code_can_be_copied(width):
    shown = on_terminal(REPORT, width)
    assert f"\n{CODE.strip()}\n\nNote: " in shown
    assert max(len(line) for line in shown.replace(CODE.strip(), "").splitlines()) <= width


def test_the_end_of_the_output_says_what_was_found():
    last = words("\n".join(on_terminal(REPORT, 100).splitlines()[-3:]))
    assert "1 of 3 laws broken: gradient" in last
    assert last.endswith("60 examples in 8.2 s, seed 7")


def test_colours_tell_verdicts_apart():
    shown = on_terminal(REPORT, 80, color=True)
    assert "\x1b[32mholds" in shown
    assert "\x1b[1;31mbroken" in shown
    assert "\x1b[1;33mfailed" in shown
    assert "\x1b[31mgot 5" in shown


# --- for programs --------------------------------------------------------------------------------


def test_json_is_plain_and_complete():
    plain = json.loads(json.dumps(as_json(REPORT), allow_nan=False))
    first = plain.pop("verdicts")[0]
    assert plain == {
        "subject": "my_trainer.py:step",
        "examples": 60,
        "seconds": 8.21,
        "seed": 7,
        "exit_code": 1,
        "notes": ["The step draws at random."],
    }
    assert first == {
        "law": "gradient",
        "status": "broken",
        "words": "",
        "example": "rank 0: 1 token\nrank 1: 3 tokens",
        "code": CODE,
        "rule": "the gradient must be that of the ratio.",
        "cause": "a slip.",
        "differences": [
            {"term": "grads['w']", "expected": 3.5, "got": 5.0, "ratio": 10 / 7, "note": ""}
        ],
        "diagnoses": [
            {
                "faults": ["mean of micro-step means"],
                "explanation": DIAGNOSIS.explanation,
                "remedy": DIAGNOSIS.remedy,
                "where": "grads['w']",
                "alternatives": [["mean of rank means", "double division"]],
                "windows": 12,
            }
        ],
    }


def test_json_has_no_nan():
    values = (scalar(float("inf")), scalar(float("nan")))
    report = report_of(broken(violation=violation([Difference("n", *values)])), HOLDS)
    plain = as_json(report)["verdicts"]
    json.dumps(plain, allow_nan=False)
    [difference] = plain[0]["differences"]
    assert (difference["expected"], difference["got"], difference["ratio"]) == ("inf", "nan", None)
    assert (plain[1]["rule"], plain[1]["cause"]) == (None, None)
