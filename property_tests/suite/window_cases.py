"""Objectives with their loss functions, and the same losses of the whole batch as plain formulas.

Each case is written twice. ``loss_fn`` and ``objective`` are what a user of windows writes;
``whole`` is the loss of all rows at once in plain torch, and knows nothing of terms and windows.
All values are polynomials, so that dyadic rows give sums that are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from numden.property_tests.rows import num_rows, take_rows
from numden.pure import LossTerms, term_mean, tree

NUM_CLASSES = 3
ALPHA, TOP_K = 0.5, 2


@dataclass(frozen=True)
class Case:
    """An objective.

    Attributes:
        name: for the test ids.
        loss_fn: ``(params, batch) -> LossTerms``.
        objective: from totals to the loss.
        whole: ``(params, all rows) -> loss`` without numden.
        plans: those that can express it, "auto"'s choice first.
        den_fn: for "before".
        exact: whether its gradient is exact with dyadic rows and dens that are powers of two.
    """

    name: str
    loss_fn: Callable[..., Any]
    objective: Callable[..., Any]
    whole: Callable[..., Any]
    plans: tuple[str, ...]
    den_fn: Callable[..., Any] | None = None
    exact: bool = True


def residuals(params, rows):
    return rows["x"] @ params["w"] + params["b"] - rows["y"]


def parts(params, rows):
    """Addends of each row: two losses, a penalty, and a score; ``[n]`` each."""
    r = residuals(params, rows)
    return r**2, 0.5 * r * rows["y"], (rows["x"] * params["w"]).sum(1), r * (params["b"] + 1)


def one_hot(rows):
    """``[n, C]``; torch's own reads its argument on the host."""
    return (rows["group"][:, None] == torch.arange(NUM_CLASSES, device=rows["x"].device)).double()


# --- one den -------------------------------------------------------------------------------------


def mean_terms(params, rows):
    return LossTerms((rows["mask"] * residuals(params, rows) ** 2).sum(), rows["mask"].sum())


def mean_whole(params, rows):
    return (residuals(params, rows) ** 2)[rows["mask"] > 0].mean()


WEIGHTS = {"ce": 0.5, "l1": 1.5, "confidence": -0.25}


def weighted_terms(params, rows):
    ce, l1, _, confidence = parts(params, rows)
    nums = {"ce": ce, "l1": l1, "confidence": confidence}
    return LossTerms(tree.map(lambda num: (rows["mask"] * num).sum(), nums), rows["mask"].sum())


def weighted_whole(params, rows):
    ce, l1, _, confidence = parts(params, take(rows, rows["mask"] > 0))
    return 0.5 * ce.mean() + 1.5 * l1.mean() - 0.25 * confidence.mean()


def squared_ratio(totals):
    return (totals.num / totals.den) ** 2


def vector_terms(params, rows):
    """A loss per class, all over the number of rows: a num ``[C]`` over a den ``[]``."""
    return LossTerms(residuals(params, rows) ** 2 @ one_hot(rows), num_rows(rows))


def vector_whole(params, rows):
    return (residuals(params, rows) ** 2).mean()


# --- several dens --------------------------------------------------------------------------------


def own_terms(params, rows):
    first, second, _, _ = parts(params, rows)
    return LossTerms(
        {"a": (rows["mask"] * first).sum(), "b": (rows["other"] * second).sum()},
        {"a": rows["mask"].sum(), "b": rows["other"].sum()},
    )


def own_dens(rows):
    return {"a": rows["mask"].sum(), "b": rows["other"].sum()}


def own_whole(params, rows):
    first, second, _, _ = parts(params, rows)
    return 2 * first[rows["mask"] > 0].mean() - 0.5 * second[rows["other"] > 0].mean()


def class_terms(params, rows):
    """A mean per class: a num ``[C]`` over a den ``[C]``."""
    return LossTerms(residuals(params, rows) ** 2 @ one_hot(rows), one_hot(rows).sum(0))


def class_whole(params, rows):
    each = residuals(params, rows) ** 2
    means = [each[rows["group"] == c].mean() for c in range(NUM_CLASSES)]
    return torch.stack(means).sum()


# --- cotangents that depend on the nums ----------------------------------------------------------

C, BETA = 0.25, 0.5


def dspine_terms(params, rows):
    ce, l1, penalty, score = parts(params, rows)
    nums = {"ce": ce, "l1": l1, "penalty": penalty, "score": score}
    return LossTerms(tree.map(lambda num: (rows["mask"] * num).sum(), nums), rows["mask"].sum())


def dspine(totals):
    num, den = totals
    first = C * num["ce"] + (1 - C) * num["l1"] + num["penalty"]
    return (first + BETA * (num["ce"] / den).detach() * num["score"]) / den


def dspine_whole(params, rows):
    ce, l1, penalty, score = (part.mean() for part in parts(params, take(rows, rows["mask"] > 0)))
    return C * ce + (1 - C) * l1 + penalty + BETA * ce.detach() * score


def balance_terms(params, rows):
    """Router probabilities S and counts N of the experts, ``[E]`` each, over the rows."""
    scores = rows["x"] * params["w"] + params["b"]
    counts = TOP_K * one_hot(rows).sum(0)
    return LossTerms({"scores": scores.sum(0), "counts": counts}, num_rows(rows))


def balance(totals):
    counts = totals.num["counts"].detach()
    return ALPHA * NUM_CLASSES / (TOP_K * totals.den**2) * (counts * totals.num["scores"]).sum()


def balance_whole(params, rows):
    scores = (rows["x"] * params["w"] + params["b"]).mean(0)
    counts = torch.bincount(rows["group"], minlength=NUM_CLASSES).double() / num_rows(rows)
    return ALPHA * NUM_CLASSES * (counts * scores).sum()


def dice_terms(params, rows):
    p, target = residuals(params, rows) ** 2, rows["mask"]
    return LossTerms(2 * (p * target).sum(), p.sum() + target.sum())


def one_minus(totals):
    return 1 - totals.num / totals.den


def dice_whole(params, rows):
    p, target = residuals(params, rows) ** 2, rows["mask"]
    return 1 - 2 * (p * target).sum() / (p + target).sum()


ANY = ("after", "before", "columns", "replay")
CASES = [
    Case("token_mean", mean_terms, term_mean(), mean_whole, ANY, lambda rows: rows["mask"].sum()),
    Case(
        "weighted_sum",
        weighted_terms,
        term_mean(WEIGHTS),
        weighted_whole,
        ANY,
        lambda rows: rows["mask"].sum(),
    ),
    Case(
        "squared_mean",
        mean_terms,
        squared_ratio,
        lambda params, rows: mean_whole(params, rows) ** 2,
        ("after", "columns", "replay"),
    ),
    Case("vector", vector_terms, term_mean(), vector_whole, ANY, num_rows),
    Case(
        "own_dens",
        own_terms,
        term_mean({"a": 2.0, "b": -0.5}),
        own_whole,
        ("columns", "before", "replay"),
        own_dens,
    ),
    Case(
        "class_means",
        class_terms,
        term_mean(),
        class_whole,
        ("replay", "before", "columns"),
        lambda rows: one_hot(rows).sum(0),
        exact=False,
    ),
    Case("dspine", dspine_terms, dspine, dspine_whole, ("columns", "replay")),
    Case("balance", balance_terms, balance, balance_whole, ("replay", "columns")),
    Case("dice", dice_terms, one_minus, dice_whole, ("columns", "replay"), exact=False),
]
CASE_PLANS = [(case, plan) for case in CASES for plan in case.plans]


def ids(values):
    return "-".join(value.name if isinstance(value, Case) else str(value) for value in values)


# --- rows ----------------------------------------------------------------------------------------


def take(rows, where):
    return {name: leaf[where] for name, leaf in rows.items()}


def cut(rows, sizes):
    """Micro-batches of ``sizes`` rows, the last of the rest."""
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    ends = [*starts[1:], num_rows(rows)]
    return [take_rows(rows, range(a, b)) for a, b in zip(starts, ends, strict=True)]


def random_rows(n, seed=0):
    """Rows of normal floats, ``mask`` and ``other`` of both kinds, each group at least once."""
    keys = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n, NUM_CLASSES, generator=keys, dtype=torch.float64),
        "y": torch.randn(n, generator=keys, dtype=torch.float64),
        "mask": (torch.arange(n) % 3 != 1).double(),
        "other": (torch.arange(n) % 4 == 0).double(),
        "group": torch.arange(n) % NUM_CLASSES,
    }


def dyadic(seed, *shape):
    """Multiples of 1/4 between -4 and 4."""
    keys = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=keys).double() / 4


def dyadic_rows(seed):
    """16 rows; masks select 8 and 4 of them: dens are powers of two, so that division is exact."""
    keys = torch.Generator().manual_seed(seed)
    order = torch.randperm(16, generator=keys)
    return {
        "x": dyadic(seed, 16, NUM_CLASSES),
        "y": dyadic(seed + 1, 16),
        "mask": (order < 8).double(),
        "other": (order % 4 == 0).double(),
        "group": order % NUM_CLASSES,
    }


def dyadic_params(seed):
    return {"w": dyadic(seed + 2, NUM_CLASSES), "b": dyadic(seed + 3)}


def random_params(seed=1):
    keys = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(NUM_CLASSES, generator=keys, dtype=torch.float64),
        "b": torch.randn((), generator=keys, dtype=torch.float64),
    }


def whole_batch(case, params, rows):
    """The loss of all rows and its gradient, by plain autograd."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    loss = case.whole(leaves, rows)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, grads, strict=True))


def assert_same(actual, expected):
    """Bit for bit."""
    for name, a, b in zip(
        tree.names(expected, "tree"), tree.leaves(actual), tree.leaves(expected), strict=True
    ):
        assert torch.equal(a, b), f"{name}: {a} is not {b}"


def assert_close(actual, expected):
    # A few dozen float64 additions in another order: 1e-15 each, relative to the largest addend.
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
