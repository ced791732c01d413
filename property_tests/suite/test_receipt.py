"""The receipt: what it compares is one batch, and what it says apart is apart."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.models.data import collate
from numden.models.receipt import apart, mean_of_means, receipt, whole_batch
from numden.models.rows import Row
from numden.pure import EmptyWindowError, LossTerms, random, term_mean, tree, window_grad


def ragged(x, mask):
    return {
        "x": torch.tensor(x, dtype=torch.float64),
        "mask": torch.tensor(mask),
    }


WINDOW = [
    ragged([[1.0, 2.0]], [[True, True]]),
    ragged([[4.0, 6.0, 8.0], [5.0, 9.0, 7.0]], [[True, False, False], [True, True, False]]),
]
PARAMS = {
    "w": torch.tensor(2.0, dtype=torch.float64),
    "v": torch.tensor([1.0], dtype=torch.float64),
}


def loss_fn(params, batch):
    """``Σ m (w x + v x²) / Σ m``: its gradient is the masked means of x and of x²."""
    x, mask = batch["x"], batch["mask"]
    num = (params["w"] * x + params["v"] * x.square()) * mask
    return LossTerms(num.sum(), mask.sum())


def test_mean_of_means_on_a_closed_form():
    # Means of the micro-steps: (1 + 2) / 2 and (4 + 5 + 9) / 3; of the whole: 21 / 5.
    result = mean_of_means(loss_fn, term_mean(), PARAMS, WINDOW)
    assert result.grads["w"] == (1.5 + 6) / 2
    assert result.grads["v"] == ((1 + 4) / 2 + (16 + 25 + 81) / 3) / 2
    assert result.loss == 2 * result.grads["w"] + result.grads["v"]
    truth = window_grad(loss_fn)(PARAMS, WINDOW)
    assert truth.grads["w"] == 21 / 5


def test_mean_of_means_counts_an_empty_micro_step_as_zero():
    nothing = ragged([[7.0]], [[False]])
    result = mean_of_means(loss_fn, term_mean(), PARAMS, [*WINDOW, nothing])
    assert result.grads["w"] == pytest.approx((1.5 + 6) / 3, rel=1e-15)  # a third is rounded
    assert math.isfinite(result.loss)


def test_even_micro_steps_have_the_mean_of_means_as_their_mean():
    even = [ragged([[1.0, 2.0]], [[True, True]]), ragged([[4.0], [8.0]], [[True], [True]])]
    said = receipt(loss_fn, term_mean(), PARAMS, even, {})
    assert said["mean of means"]["gradient"] == 0.0


def test_a_receipt_has_each_way_and_its_distance():
    whole = window_grad(loss_fn)(PARAMS, WINDOW)
    wrong = whole._replace(
        loss=whole.loss + 1, grads=whole.grads | {"w": whole.grads["w"] + whole.grads["v"]}
    )
    said = receipt(loss_fn, term_mean(), PARAMS, WINDOW, {"elsewhere": wrong, "same": whole})
    assert list(said) == ["1 rank x 1", "1 rank x 2", "elsewhere", "same", "mean of means"]
    assert said["1 rank x 1"] == said["1 rank x 2"] == said["same"]
    loss = 2 * 21 / 5 + (1 + 4 + 16 + 25 + 81) / 5
    assert said["same"] == {"loss": pytest.approx(loss, rel=1e-15), "gradient": 0.0}
    assert said["elsewhere"] == {"loss": pytest.approx(loss + 1, rel=1e-15), "gradient": 1.0}
    expected = abs((2.5 + 122 / 3) / 2 - 127 / 5) / (127 / 5)
    assert said["mean of means"]["gradient"] == pytest.approx(expected, rel=1e-14)


def test_a_receipt_sees_a_loss_that_depends_on_the_cut():
    def depends(params, batch):
        terms = loss_fn(params, batch)
        return terms._replace(num=terms.num * len(batch["x"]))  # rows count by their companions

    said = receipt(depends, term_mean(), PARAMS, WINDOW, {})
    assert said["1 rank x 1"]["loss"] == pytest.approx(3 * (2 * 21 + 127) / 5, rel=1e-15)
    assert said["1 rank x 2"]["gradient"] > 0.1


def test_a_receipt_of_nothing_is_an_error():
    with pytest.raises(EmptyWindowError):
        receipt(loss_fn, term_mean(), PARAMS, [ragged([[7.0]], [[False]])], {})


# --- one batch -----------------------------------------------------------------------------------

LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)


def row(length, i):
    tokens = torch.arange(length) + 10 * i
    return Row(
        tokens, torch.arange(length) > 0, i, {"states": tokens[:, None] / torch.arange(1, 4)}
    )


@given(LENGTHS)
def test_the_whole_batch_is_what_collate_makes_of_all_rows(lengths):
    numbers = iter(range(99))
    groups = [[row(length, next(numbers)) for length in group] for group in lengths]
    key = random.key(0)
    whole = whole_batch([collate(group, key=key) for group in groups])
    expected = collate([each for group in groups for each in group], key=key)
    assert whole.keys() == expected.keys() - {"supervised"}
    for name, value in whole.items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype == expected[name].dtype


# --- distances -----------------------------------------------------------------------------------


def test_apart_is_relative_to_the_largest_element_of_all_leaves():
    expected = {"a": torch.tensor([1.0, -8.0]), "b": torch.tensor([[2.0]])}
    grads = {"a": torch.tensor([1.5, -8.0]), "b": torch.tensor([[-2.0]])}
    assert apart(grads, expected) == 4 / 8
    assert apart(expected, expected) == 0


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_apart_sees_a_nan_in_any_leaf(name):
    expected = {"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(())}
    assert math.isnan(apart(expected | {name: expected[name] * torch.nan}, expected))


def test_apart_needs_the_same_tree():
    with pytest.raises(ValueError, match="dict"):
        apart({"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_apart_of_a_gradient_of_zeros_is_no_zero():
    zeros = tree.map(torch.zeros_like, PARAMS)
    assert not apart(PARAMS, zeros) < 1
    assert not apart(zeros, zeros) < 1
