"""Objectives of your own: which plan can compute their gradient, and what that costs."""

import torch

from numden.pure import LossTerms, PlanError, explain_plan, fold, term_mean, window_grad

torch.manual_seed(0)
params = {"w": torch.randn(3, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}
window = [
    {"x": torch.randn(n, 3, dtype=torch.float64), "y": (torch.rand(n) > 0.6).double()}
    for n in (5, 1, 8)
]


def dice_terms(params, batch):
    """Soft Dice: the den depends on the params, so its gradient counts too."""
    p = torch.sigmoid(batch["x"] @ params["w"] + params["b"])
    return LossTerms(num=2 * (p * batch["y"]).sum(), den=p.sum() + batch["y"].sum())


def one_minus_dice(totals):
    return 1 - totals.num / totals.den


def two_terms(params, batch):
    """A fit over examples and a penalty over weights: each has a den of its own."""
    z = batch["x"] @ params["w"] + params["b"]
    fit = torch.nn.functional.binary_cross_entropy_with_logits(z, batch["y"], reduction="sum")
    num = {"fit": fit, "size": params["w"].square().sum()}
    return LossTerms(num, den={"fit": len(z), "size": 1})


for name, terms, objective in (
    ("soft Dice", dice_terms, one_minus_dice),
    ("two dens", two_terms, term_mean({"fit": 1.0, "size": 0.1})),
):
    report = explain_plan(terms, objective, params, window[0])
    print(f"{name}: plan {report.plan!r}, {report.reason}")
    for plan, why in report.rejected.items():
        print(f"    not {plan!r}: {why}")
    result = window_grad(terms, objective)(params, window)

    # The definition, with the whole window in one graph.
    whole = torch.func.grad(lambda p, t=terms, f=objective: f(fold(t)(p, window)))(params)
    apart = max(float((result.grads[k] - whole[k]).abs().max()) for k in params)
    print(f"    loss {float(result.loss):.6f}, gradient {apart:.1e} from the whole batch's")
    assert apart < 1e-14  # a few float64 roundings of numbers below 1

try:
    window_grad(dice_terms, one_minus_dice, plan="after")(params, window)
except PlanError as error:
    print(f"PlanError: {error}")
