"""What one rank may do wrong in a window, and what all ranks then say."""

import torch
import torch.distributed as c10d
from dist_cases import DEALS, WINDOW, FailsBackward, mean_loss, own_dens_loss

from numden import pure
from numden.pure import LossTerms, tree

BAD = 1
"""The rank that fails; its window are the last four batches."""

FIRST, SECOND, THIRD, LAST = WINDOW[4:]


def terms_of(predict, batch):
    return mean_loss(predict, batch)[0]


def on_bad_rank(change, at=None):
    """The loss with ``change`` made to its terms on the bad rank, in one micro-step or in all."""

    def loss(predict, batch):
        terms = terms_of(predict, batch)
        if c10d.get_rank() == BAD and (at is None or batch is at):
            return change(terms)
        return terms

    return loss


def raising(kind=RuntimeError, text="no forward"):
    def change(terms):
        raise kind(text)

    return change


def other_each_time():
    count = iter(range(10**6))
    return lambda terms: LossTerms(terms.num * (1 + next(count)), terms.den)


def broken(windows, at):
    """The windows, of which the bad rank's breaks off."""

    def iterator():
        for index, batch in enumerate(windows[BAD]):
            if index == at:
                raise OSError("no disk")
            yield batch

    return [iterator() if rank == BAD else window for rank, window in enumerate(windows)]


def count(batch):
    return batch["mask"].sum()


def one_more_on_bad_rank(batch):
    return batch["mask"].sum() + (c10d.get_rank() == BAD)


def clipped_mean(totals):
    """It has one term group where nums are small, as made-up ones are, and two at real totals."""
    ratios = pure.divide(totals)
    return ratios["a"] + ratios["b"] + torch.relu(totals.num["a"] - 4.0)


def two_terms(predict, batch):
    num, den = terms_of(predict, batch)
    return LossTerms({"a": num, "b": 2 * num}, den)


EVEN = DEALS["even"]
NAMES_RANK = r"RankError: window: a rank failed: {} \(rank 1\)\. Nothing was updated on any rank\.$"
NO_FORWARD = NAMES_RANK.format("RuntimeError: no forward")
OTHER_TREE = r"TermStructureError: window: all ranks must return the same sums, but rank 0 has "

# name: (loss, windows by rank, options, message)
ENDS_OF_WINDOW = {
    "another tree": (
        on_bad_rank(lambda terms: LossTerms({"a": terms.num}, terms.den)),
        EVEN,
        {},
        OTHER_TREE + r"num, den; rank 1 has num\['a'\], den\. Return a pair of zeros",
    ),
    "another number of terms": (
        on_bad_rank(lambda terms: LossTerms([terms.num] * 2, terms.den)),
        EVEN,
        {"plan": "replay"},
        OTHER_TREE + r"num, den; rank 1 has num\[0\], num\[1\], den\.",
    ),
    "another shape": (
        on_bad_rank(lambda terms: LossTerms(terms.num.expand(2), terms.den)),
        EVEN,
        {},
        OTHER_TREE + r"num, den; rank 1 has num\[2\], den\.",
    ),
    "another metric": (
        lambda predict, batch: (
            terms_of(predict, batch),
            {"own" if c10d.get_rank() == BAD else "other": LossTerms(1.0, 1)},
        ),
        EVEN,
        {},
        OTHER_TREE + r".*metrics\['other'\].num.*; rank 1 has .*metrics\['own'\].num",
    ),
    "num is NaN": (
        on_bad_rank(lambda terms: LossTerms(terms.num * float("nan"), terms.den), THIRD),
        EVEN,
        {},
        r"NonFiniteLossError: window: num is not finite in micro-step 2 on rank 1\. Nothing was",
    ),
    "num is NaN in a replay": (
        on_bad_rank(lambda terms: LossTerms(terms.num / 0, terms.den), FIRST),
        EVEN,
        {"plan": "replay"},
        r"NonFiniteLossError: window: num is not finite in micro-step 0 on rank 1\.",
    ),
    "den is negative": (
        on_bad_rank(lambda terms: LossTerms(terms.num, terms.den - 6), SECOND),
        EVEN,
        {},
        r"TermStructureError: window: den is negative in micro-step 1 on rank 1\. A den is",
    ),
    "nothing is supervised": (
        lambda predict, batch: tree.map(lambda leaf: leaf * 0, terms_of(predict, batch)),
        EVEN,
        {},
        r"EmptyWindowError: window: a total den must be positive and finite, got den = 0\.",
    ),
    "no rank has a batch": (
        terms_of,
        [[], []],
        {},
        r"EmptyWindowError: window: the window has no micro-step\. Give it at least one batch",
    ),
    "dens of den_fn": (
        terms_of,
        EVEN,
        {"den_fn": one_more_on_bad_rank},
        r"TermStructureError: window: the dens that loss_fn returned do not sum to those that "
        r"den_fn counted \(relative difference 0\.\d+\)\.",
    ),
    "a direction that made-up totals hide": (
        two_terms,
        EVEN,
        {"plan": "after", "objective": clipped_mean},
        r"PlanError: plan 'after': at these totals the cotangent of the objective has a direction",
    ),
    "a direction that the rank without a batch cannot know": (
        two_terms,
        DEALS["first rank without a batch"],
        {"plan": "after", "objective": clipped_mean},
        r"PlanError: plan 'after': at these totals the cotangent of the objective has a direction",
    ),
    "the window breaks off at its start": (
        terms_of,
        lambda: broken(EVEN, 0),
        {},
        NAMES_RANK.format("OSError: no disk"),
    ),
    "the window breaks off within": (
        terms_of,
        lambda: broken(EVEN, 2),
        {},
        NAMES_RANK.format("OSError: no disk"),
    ),
    "a dict as window": (
        terms_of,
        [EVEN[0], EVEN[1][0]],
        {},
        NAMES_RANK.format(r"TypeError: window: a window is an iterable of batches, got a dict.*"),
    ),
}
"""Faults that are found at the end of a window, or before its first pass, for FSDP2 as well."""

WITHIN = {
    "raises in the first micro-step": (on_bad_rank(raising(), FIRST), EVEN, {}, NO_FORWARD),
    "raises in a middle micro-step": (on_bad_rank(raising(), SECOND), EVEN, {}, NO_FORWARD),
    "raises in the last micro-step": (on_bad_rank(raising(), LAST), EVEN, {}, NO_FORWARD),
    "raises in a replay": (
        on_bad_rank(raising(), LAST),
        EVEN,
        {"plan": "replay"},
        NO_FORWARD,
    ),
    "raises in columns": (on_bad_rank(raising(), THIRD), EVEN, {"plan": "columns"}, NO_FORWARD),
    "raises in before": (on_bad_rank(raising(), THIRD), EVEN, {"den_fn": count}, NO_FORWARD),
    "raises while the other rank has no batch": (
        on_bad_rank(raising(), THIRD),
        DEALS["first rank without a batch"],
        {},
        NO_FORWARD,
    ),
    "raises where nobody reads faults": (
        on_bad_rank(raising(), THIRD),
        EVEN,
        {"on_empty": "skip"},
        NO_FORWARD,
    ),
    "raises where empty windows count zero": (
        on_bad_rank(raising(), THIRD),
        EVEN,
        {"on_empty": "zero"},
        NO_FORWARD,
    ),
    "raises in the backward pass after the sums were sent": (
        on_bad_rank(lambda terms: LossTerms(FailsBackward.apply(terms.num), terms.den), LAST),
        EVEN,
        {},
        NAMES_RANK.format("RuntimeError: no backward"),
    ),
    "raises on both ranks, each in its own way": (
        lambda predict, batch: raising(KeyError, f"of {c10d.get_rank()}")(batch),
        EVEN,
        {},
        r"RankError: window: a rank failed: KeyError: 'of 0' \(rank 0\); "
        r"KeyError: 'of 1' \(rank 1\)",
    ),
    "raises alike on both ranks": (
        lambda predict, batch: raising()(batch),
        EVEN,
        {},
        r"RankError: window: a rank failed: RuntimeError: no forward\. Nothing was updated",
    ),
    "den_fn raises": (
        terms_of,
        EVEN,
        {"den_fn": lambda batch: 1 // (1 - c10d.get_rank()) + count(batch)},
        NAMES_RANK.format("ZeroDivisionError: .*"),
    ),
    "den_fn returns another tree": (
        terms_of,
        EVEN,
        {"den_fn": lambda batch: {"a": count(batch)} if c10d.get_rank() == BAD else count(batch)},
        r"TermStructureError: .*den",
    ),
    "den depends on params on one rank": (
        on_bad_rank(lambda terms: LossTerms(terms.num, terms.num.abs() + 1)),
        EVEN,
        {"plan": "after"},
        r"PlanError: plan 'after': den depends on params.* \(rank 1\)$",
    ),
    "the plan cannot express the objective": (
        own_dens_loss,
        EVEN,
        {"plan": "after"},
        r"PlanError: plan 'after': the terms form 2 groups.*Use plan='columns'\.$",
    ),
    "other terms in one micro-step": (
        on_bad_rank(lambda terms: LossTerms([terms.num], terms.den), SECOND),
        EVEN,
        {},
        r"TermStructureError: loss_fn: .*from micro-step 1.* \(rank 1\)$",
    ),
    "a replay that does not repeat": (
        on_bad_rank(other_each_time()),
        EVEN,
        {"plan": "replay"},
        r"PlanError: plan 'replay': loss_fn gave other sums in the second pass.* \(rank 1\)$",
    ),
    "the objective raises": (
        terms_of,
        DEALS["first rank without a batch"],
        {"objective": lambda totals: totals.num / totals.den if totals.den < 10 else 1 / 0},
        r"RankError: window: a rank failed: ZeroDivisionError",
    ),
}
"""Faults within the passes of a window, after which FSDP2 modules are left waiting."""
