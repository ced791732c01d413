"""What loss functions return is read as loss terms, or refused with what to return."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from numden.property_tests.loss_checker.outputs import as_loss_fn, read_output
from numden.pure import LossTerms

THREE = torch.tensor(3.0)
TERMS = LossTerms(THREE, 2)


@pytest.mark.parametrize(
    ("result", "terms", "metrics"),
    [
        (TERMS, TERMS, {}),
        ((TERMS, {"aux": TERMS}), TERMS, {"aux": TERMS}),
        ((THREE, 2), TERMS, {}),
        (({"a": THREE}, {"a": 2}), LossTerms({"a": THREE}, {"a": 2}), {}),
        (({"a": THREE, "b": THREE}, 2), LossTerms({"a": THREE, "b": THREE}, 2), {}),
        ((torch.ones(4), torch.ones(4)), LossTerms(torch.ones(4), torch.ones(4)), {}),
    ],
)
def test_sums_are_read(result, terms, metrics):
    output = read_output(result)
    assert output.kind == "terms"
    assert str(output.terms) == str(terms)
    assert output.metrics == metrics


@pytest.mark.parametrize(
    "result",
    [
        THREE,
        {"loss": THREE, "logits": torch.ones(2)},
        SimpleNamespace(loss=THREE),
        (THREE, {"logits": torch.ones(2)}),
    ],
)
def test_scalars_are_read(result):
    output = read_output(result)
    assert (output.kind, output.terms, output.metrics) == ("scalar", LossTerms(THREE, 0), {})


@pytest.mark.parametrize(
    ("result", "got", "advice"),
    [
        (None, "got None", "LossTerms(loss_sum, token_count)"),
        (2.5, "got a float", "without item()"),
        (torch.ones(2, 3), "got a tensor of shape [2, 3]", "LossTerms(losses.sum(), count)"),
        (torch.tensor(3), "got a tensor of shape [] and dtype torch.int64", "LossTerms("),
        ({"logits": THREE}, "got a dict with the keys ['logits']", "Give the model its labels"),
        (SimpleNamespace(loss=None), "got a SimpleNamespace", "Give the model its labels"),
        ((THREE, torch.ones(2, 3)), "got a tuple of a tensor of shape []", "LossTerms("),
        ((THREE, THREE, THREE), "got a tuple of", "LossTerms("),
        ([THREE, 2], "got a list of", "LossTerms("),
        ((), "got a tuple of nothing", "LossTerms("),
    ],
)
def test_anything_else_is_refused(result, got, advice):
    with pytest.raises(TypeError, match="loss_fn: must return LossTerms") as caught:
        read_output(result)
    assert got in str(caught.value)
    assert advice in str(caught.value)


def test_metrics_must_be_a_dict():
    with pytest.raises(ValueError, match="metrics must be a dict of LossTerms by name, got int"):
        read_output((TERMS, 3))


def test_a_mean_times_its_den():
    loss_fn = as_loss_fn(lambda w, x: (w * x).mean(), den_fn=lambda x: torch.tensor(x.numel()))
    w = torch.tensor(2.0, requires_grad=True)
    terms = loss_fn(w, torch.tensor([1.0, 3.0]))
    assert terms == LossTerms(torch.tensor(8.0), torch.tensor(2))
    assert torch.autograd.grad(terms.num, w)[0] == 4


def test_a_product_is_no_more_exact_than_the_mean():
    loss_fn = as_loss_fn(lambda w, x: x.mean(), den_fn=lambda x: torch.tensor(2.0).double())
    assert loss_fn(None, torch.ones(2)).num.dtype == torch.float32


def test_a_module_is_called_with_the_fields():
    class Model(nn.Module):
        def forward(self, x, y):
            return {"loss": (x - y).square().sum()}

    model = Model()
    batch = {"x": torch.ones(2), "y": torch.zeros(2)}
    assert as_loss_fn(model)(model, batch).num == 2
    with pytest.raises(TypeError, match=r"a module is called as module\(\*\*batch\)"):
        as_loss_fn(model)(model, torch.ones(2))
