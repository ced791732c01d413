"""Our own windows under our own checker: every plan, replicated, DDP and FSDP2, on real ranks."""

import pytest
import torch
from torch import nn

from numden.dist import sum_gradients, window_grad
from numden.property_tests import adapters, check_step
from numden.property_tests.worlds.problems import two_heads
from numden.pure import LossTerms, term_mean
from numden.pure import window_grad as window_grad_of_one_rank

PLANS = ("after", "before", "columns", "replay", "auto")
FEW = {"max_examples": 4, "max_micro_steps": 3, "budget_s": 20.0}


class Scale(nn.Module):
    """One weight for the losses of a batch, another for those of an extra head."""

    def __init__(self):
        super().__init__()
        self.main = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.extra = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.float64))

    def forward(self, batch):
        main = self.main.sum() * (batch["losses"] * batch["mask"]).sum()
        extra = self.extra.prod() * (batch["extra_losses"] * batch["extra_mask"]).sum()
        return {"main": main, "extra": extra}


def own_dens(module, batch):
    return LossTerms(module(batch), dens(batch))


def dens(batch):
    return {"main": batch["mask"].sum(), "extra": batch["extra_mask"].sum()}


def one_den(module, batch):
    return LossTerms(module(batch), batch["mask"].sum())


def parts_of(plan):
    """The loss that a plan can express, and what else it needs."""
    if plan == "after":
        return one_den, {}
    return own_dens, {"den_fn": dens} if plan == "before" else {}


def loop(plan, **options):
    loss_fn, needs = parts_of(plan)

    def run(module, window):
        return window_grad(loss_fn, WEIGHTED, plan=plan, **needs, **options)(module, window)

    return run


WEIGHTED = term_mean({"main": 1.0, "extra": 0.25})


def check(step, plan, **options):
    module = Scale()
    check_step(
        step, parts_of(plan)[0], module, two_heads().batches, objective=WEIGHTED, **FEW, **options
    )


@pytest.mark.parametrize("plan", PLANS)
def test_replicated_ranks(plan):
    check(adapters.on_ranks(loop(plan), Scale(), 2), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_ddp(plan):
    def run(module, window):
        sum_gradients(module)
        return loop(plan)(module, window)

    check(adapters.ddp(run, Scale(), 2), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_fsdp2(plan):
    def run(module, window):
        sum_gradients(module)
        return loop(plan)(module, window)

    check(adapters.fsdp2(run, Scale(), 2), plan)


def test_replicated_ranks_of_uneven_windows():
    check(adapters.on_ranks(loop("columns"), Scale(), 2), "columns", uneven=True)


@pytest.mark.parametrize("plan", PLANS)
def test_one_rank_on_many_windows(plan):
    loss_fn, needs = parts_of(plan)
    loop = window_grad_of_one_rank(loss_fn, WEIGHTED, plan=plan, **needs)
    step, batches = adapters.from_loop(loop, Scale()), two_heads().batches
    check_step(step, loss_fn, Scale(), batches, objective=WEIGHTED, ranks=1, max_examples=20)
