"""The corpus of public bugs: their own numbers, and what the checker says of them."""

import math

import pytest
from known_bugs import CASES, OUT_OF_SCOPE

from numden.property_tests.checker.world import as_result


def value(case, step):
    """What a step gives on the case's own windows, those before it included."""
    results = [as_result(step(case.problem.params, world)) for world in (*case.before, case.world)]
    values = [getattr(result, case.quantity) for result in results]
    if case.quantity in ("grads", "params"):
        values = [tree[case.leaf] for tree in values]
    return sum(map(float, values))


def same(a, b):
    # Some numbers of the corpus are no binary fractions, or printed to six digits.
    return a == b or math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_reproducer_gives_the_numbers_of_the_report(case):
    assert same(value(case, case.right), case.expected)
    assert same(value(case, case.wrong), case.got)
    assert case.expected != case.got


def test_corpus_is_complete():
    ids = [case.id[:3] for case in CASES]
    assert sorted({*ids, *OUT_OF_SCOPE}) == [f"B{n:02}" for n in range(1, 78)]
