"""Ranks simulated by threads sum by hand, and fail as one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.property_tests import LawViolation, over_ranks
from numden.property_tests.ranks import on_simulated_ranks
from numden.property_tests.strategies import dyadic_tensors
from numden.pure import LOCAL


@given(st.lists(dyadic_tensors((2,)), min_size=1, max_size=4))
def test_equivalent_simulated_sum(values):
    def on_rank(reduction, value):
        first = reduction.totals({"a": value, "b": 1.0})
        value.add_(1)  # No rank may see what another does after the sum.
        return first, reduction.grads({"a": value})

    expected = torch.stack(values).sum(0)
    for first, second in on_simulated_ranks(on_rank, [value.clone() for value in values]):
        assert torch.equal(first["a"], expected)
        assert first["b"] == len(values)
        assert torch.equal(second["a"], expected + len(values))


def test_ranks_without_sums_are_left_out():
    assert on_simulated_ranks(lambda r, x: r.totals(x), [None, 2.0, None, 3.0]) == [5.0] * 4
    assert on_simulated_ranks(lambda r, x: r.totals(x), [None, None]) == [None, None]


def test_reports_come_from_each_rank():
    reports = on_simulated_ranks(lambda r, text: r.reports(text), ["bad", None])
    assert reports == [[(0, "bad"), (1, None)]] * 2


def test_a_failure_ends_all_ranks():
    def on_rank(reduction, rank):
        if rank == 1:
            raise RuntimeError("rank 1 failed")
        return reduction.totals(1.0)

    with pytest.raises(RuntimeError, match="rank 1 failed"):
        on_simulated_ranks(on_rank, [0, 1, 2])


def test_over_ranks_catches_ranks_that_disagree():
    def grad_of(reduction):
        return lambda params, window: (next(iter(window)), reduction.grads(params))

    step = over_ranks(grad_of)
    assert step(torch.tensor(2.0), [[torch.tensor(1.0)], [torch.tensor(1.0)]])[1] == 4.0
    with pytest.raises(LawViolation, match=r"rank 1 must have(.|\n)* loss: expected 1.0, got 2.0"):
        step(torch.tensor(2.0), [[torch.tensor(1.0)], [torch.tensor(2.0)]])


def test_one_rank_is_local():
    values = {"a": torch.tensor(1.5)}
    (result,) = on_simulated_ranks(lambda r, x: r.totals(x), [values])
    assert torch.equal(result["a"], LOCAL.totals(values)["a"])
    assert result["a"] is not values["a"]
