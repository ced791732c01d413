"""The corpus of public bugs: their own numbers, and what the checker says of them."""

import math

import pytest
from known_bugs import CASES, OUT_OF_SCOPE
from known_bugs.judge import judged, value

from numden.property_tests.worlds.reference import reference_of

UNCLIPPED = [case for case in CASES if "max_norm" not in case.options]
# In the fast suite: one of each theme, of one term and few ranks. All of them take minutes.
FEW = [case for case in CASES if case.id in {"B01", "B02", "B42"}]


# Chunks within a micro-batch are not seen from outside; what is seen is that digits are missing.
SEEN_AS = {"B48": ("rounding",)}


def ids(cases):
    return {"argvalues": cases, "ids": [case.id for case in cases]}


def same(a, b):
    # Some numbers of the corpus are no binary fractions, or are printed to six digits.
    return a == b or math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("case", **ids(CASES))
def test_reproducer_gives_the_numbers_of_the_report(case):
    assert same(value(case, case.right), case.expected)
    assert same(value(case, case.wrong), case.got)
    assert not same(case.expected, case.got)


@pytest.mark.parametrize("case", **ids(UNCLIPPED))
def test_expected_value_is_the_ratio_of_total_sums(case):
    if case.quantity == "params" or case.before:
        pytest.skip("the number is one of several windows, or what an optimizer makes of it")
    right = reference_of(case.problem, case.world)
    is_loss = case.quantity.endswith("loss")
    assert same(float(right.loss if is_loss else right.grads[f"[{case.leaf!r}]"]), case.expected)


def test_corpus_is_complete():
    bugs = sorted({*(case.id.removesuffix("b") for case in CASES), *OUT_OF_SCOPE})
    assert bugs == [f"B{number:02}" for number in range(1, 78)]


@pytest.mark.parametrize("case", **ids(FEW))
def test_checker_flags_and_names_a_known_bug(case):
    require_named(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", **ids([case for case in CASES if case not in FEW]))
def test_checker_flags_and_names_all_known_bugs(case):
    require_named(case)


def require_named(case):
    found = judged(case, budget_s=120.0)
    assert found.flagged
    assert not found.false_alarms
    assert sorted(found.faults) == sorted(SEEN_AS.get(case.id, case.faults))
