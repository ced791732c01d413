"""Windows for several ranks: ragged batches, objectives, and models in each wrapping.

``reference`` is the loss of all rows at once with plain autograd, and knows nothing of windows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from numden.dist import shard
from numden.pure import LossTerms, term_mean, tree

# --- rows ----------------------------------------------------------------------------------------


def _batch(num_rows, generator):
    def draw(width):
        return torch.randn(num_rows, width, dtype=torch.float64, generator=generator)

    mask = torch.rand(num_rows, generator=generator) > 0.4
    return {"x": draw(3), "y": draw(4), "mask": mask}


def _window():
    generator = torch.Generator().manual_seed(5)
    window = [_batch(num_rows, generator) for num_rows in (3, 1, 0, 2, 7, 4, 5, 2)]
    window[1]["mask"][:] = False
    window[4]["mask"][:3] = True
    return window


WINDOW = _window()
"""Eight ragged micro-batches, of which one has no row and one no supervised row."""

DEALS = {
    "even": [WINDOW[:4], WINDOW[4:]],
    "ragged": [WINDOW[:1], WINDOW[1:]],
    "a rank without supervised rows": [WINDOW[1:3], WINDOW[:1] + WINDOW[3:]],
    "first rank without a batch": [[], WINDOW],
    "last rank without a batch": [WINDOW, []],
}


def whole(window):
    return {name: torch.cat([batch[name] for batch in window]) for name in window[0]}


# --- losses --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A loss ``(predict, batch) -> (terms, metrics)``, its objective, and plans that can do it."""

    loss: Callable[..., Any]
    objective: Any
    plans: tuple[str, ...]
    den_fn: Callable[..., Any] | None = None


def _hits(predictions, batch):
    hits = (predictions.argmax(-1) == batch["y"].argmax(-1)) & batch["mask"]
    return {
        "hits": LossTerms(hits.sum(), len(hits)),
        "kept": LossTerms(batch["mask"].sum(), len(hits)),
    }


def mean_loss(predict, batch):
    out, mask = predict(batch["x"]), batch["mask"]
    errors = (out - batch["y"]).square().sum(-1)
    return LossTerms((errors * mask).sum(), mask.sum()), _hits(out, batch)


def own_dens_loss(predict, batch):
    (terms, metrics), out = mean_loss(predict, batch), predict(batch["x"])
    nums = {"fit": terms.num, "size": out.abs().sum(0)}
    return LossTerms(nums, own_dens(batch)), metrics


def own_dens(batch):
    return {"fit": batch["mask"].sum(), "size": len(batch["mask"])}


def dspine_loss(predict, batch):
    out, mask = predict(batch["x"]), batch["mask"]
    ce = (nn.functional.log_softmax(out, -1) * -batch["y"].softmax(-1)).sum(-1)
    nums = {"ce": ce, "l1": (out - batch["y"]).abs().sum(-1), "a": out[..., 0].square()}
    return LossTerms(tree.map(lambda num: (num * mask).sum(), nums), mask.sum()), {}


def dspine_objective(totals):
    num, den = totals
    return (0.3 * num["ce"] + 0.7 * num["l1"] + 0.5 * (num["ce"] / den).detach() * num["a"]) / den


def dice_loss(predict, batch):
    chance, target = predict(batch["x"]).sigmoid(), (batch["y"] > 0).double()
    mask = batch["mask"][:, None]
    overlap = (2 * chance * target * mask).sum()
    return LossTerms(overlap, ((chance + target) * mask).sum()), {}


def dice_objective(totals):
    return 1 - totals.num / totals.den


CASES = {
    "mean": Case(
        mean_loss,
        term_mean(),
        ("auto", "after", "before", "columns", "replay"),
        lambda batch: batch["mask"].sum(),
    ),
    "own dens": Case(
        own_dens_loss,
        term_mean({"fit": 1.0, "size": 0.25}),
        ("auto", "before", "columns", "replay"),
        own_dens,
    ),
    "dspine": Case(dspine_loss, dspine_objective, ("auto", "columns", "replay")),
    "dice": Case(dice_loss, dice_objective, ("auto", "columns", "replay")),
}


def options(case, plan):
    """What to give ``window_grad`` for a plan; "auto" would take "before" with a den_fn."""
    return {"plan": plan, "den_fn": case.den_fn if plan == "before" else None}


# --- models --------------------------------------------------------------------------------------


def net():
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)
    for index, weight in enumerate(p for layer in layers for p in layer.parameters()):
        values = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
        weight.data = torch.sin(3 * values + index) / 2
    return nn.Sequential(*layers)


_NET = net()


def whole_params():
    return {name: p.detach().clone() for name, p in _NET.named_parameters()}


def predict_with(params, x):
    return torch.func.functional_call(_NET, params, (x,))


def on_tree(loss):
    """A loss of a pytree of params."""
    return lambda params, batch: loss(partial(predict_with, params), batch)


def fully_sharded(module, mesh=None, **options):
    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


KINDS = ("tree", "module", "ddp", "fsdp", "shard")


def wrapped(kind, mesh=None):
    """Params of a kind on this rank, and how a loss is called with them."""
    if kind == "tree":
        return whole_params(), on_tree
    if kind == "shard":
        mesh = mesh or init_device_mesh("cpu", (c10d.get_world_size(),))
        return shard(whole_params(), mesh), on_tree
    group = None if mesh is None else mesh.get_group()
    wrap = {
        "module": lambda: net(),
        "ddp": lambda: DistributedDataParallel(net(), process_group=group),
        "fsdp": lambda: fully_sharded(net(), mesh),
    }[kind]
    return wrap(), lambda loss: loss


def plain(grads):
    """Whole gradients by the names of the bare model."""
    return {
        name.removeprefix("module."): grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads.items()
    }


def reference(case):
    """The loss, the gradient and the metrics of all rows at once."""
    model = net()
    terms, metrics = case.loss(model, whole(WINDOW))
    loss = case.objective(terms)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return loss.detach(), dict(zip(names, grads, strict=True)), metrics


def apart(grads, expected):
    """The largest difference between two dicts of tensors, relative to the largest element."""
    largest = max(value.abs().max() for value in expected.values())
    assert grads.keys() == expected.keys()
    return max(float((grads[k].double() - v).abs().max() / largest) for k, v in expected.items())


ROUNDING = 1e-13
"""Of sums of some twenty rows in another order: a few roundings of 1e-16."""


def compare(result, expected):
    """How far a window is from the whole batch, relatively, and the bits of its loss."""
    loss, grads, metrics = expected
    ratios = {name: float(metric.num) / float(metric.den) for name, metric in metrics.items()}
    assert result.metrics.keys() == ratios.keys()
    differences = [abs(float(result.metrics[name]) - ratio) for name, ratio in ratios.items()]
    differences.append(float((result.loss - loss).abs() / loss.abs()))
    if grads is not None:
        differences.append(apart(plain(result.grads), grads))
    return max(differences), result.loss.item()


def assert_same_and_exact(by_rank):
    """All ranks have the same bits, and those of the whole batch up to rounding."""
    for found in by_rank:
        assert {key: off for key, (off, _) in found.items() if not off <= ROUNDING} == {}
        assert {k: bits for k, (_, bits) in found.items()} == {
            k: bits for k, (_, bits) in by_rank[0].items()
        }
    assert by_rank[0]


# --- faults ---------------------------------------------------------------------------------------


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no backward")


def said(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
