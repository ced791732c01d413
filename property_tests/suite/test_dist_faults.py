"""What goes wrong on one rank is the same error on all, in the same window, and nothing hangs."""

import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as c10d
from dist_cases import (
    CASES,
    DEALS,
    WINDOW,
    FailsBackward,
    apart,
    mean_loss,
    on_tree,
    own_dens_loss,
    plain,
    reference,
    said,
    whole_params,
    wrapped,
)

from numden import dist, pure
from numden.dist import run_local
from numden.dist.reduction import WindowCollectives
from numden.pure import LossTerms, optim, tree

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


def faults_of(kind, faults):
    """On a rank: the error of each fault, and how far off the good window after it is."""
    (params, on), rank, found = wrapped(kind), c10d.get_rank(), {}
    good, (_, expected, _) = dist.window_grad(on(terms_of)), reference(CASES["mean"])
    for name, (loss, windows, options, _) in faults.items():
        window = (windows() if callable(windows) else windows)[rank]
        options = dict(options)
        grad = dist.window_grad(on(loss), options.pop("objective", pure.term_mean()), **options)
        state = torch.random.get_rng_state()
        error = said(lambda grad=grad, window=window: grad(params, window))
        assert torch.equal(torch.random.get_rng_state(), state)
        off = apart(plain(good(params, EVEN[rank]).grads), expected)
        found[name] = error, off
    own = params.parameters() if isinstance(params, torch.nn.Module) else params.values()
    assert all(param.grad is None for param in own)
    return found


def assert_told_on_all_ranks(found, faults):
    for name, (*_, message) in faults.items():
        errors = [each[name][0] for each in found]
        assert re.match(message, errors[0], re.DOTALL), f"{name}: {errors[0]}"
        assert set(errors) == {errors[0]}, name
        assert all(each[name][1] < 1e-13 for each in found), name


@pytest.mark.parametrize("kind", ["tree", "module", "ddp", "shard"])
def test_one_fails_all_hear_and_go_on(kind):
    faults = ENDS_OF_WINDOW | WITHIN
    assert_told_on_all_ranks(run_local(faults_of, 2, kind, faults, timeout=20), faults)


def test_fsdp_one_fails_all_hear_and_go_on():
    found = run_local(faults_of, 2, "fsdp", ENDS_OF_WINDOW, timeout=20)
    assert_told_on_all_ranks(found, ENDS_OF_WINDOW)


def test_window_value_one_fails_all_hear():
    names = ("raises in a middle micro-step", "another tree", "num is NaN", "no rank has a batch")
    names += ("the window breaks off within", "raises while the other rank has no batch")
    faults = {name: (ENDS_OF_WINDOW | WITHIN)[name] for name in names}

    def on_rank():
        found, rank = {}, c10d.get_rank()
        for name, (loss, windows, _, _) in faults.items():
            window = (windows() if callable(windows) else windows)[rank]
            value = dist.window_value(on_tree(loss))
            error = said(lambda value=value, window=window: value(whole_params(), window))
            loss = dist.window_value(on_tree(terms_of))(whole_params(), EVEN[rank]).loss
            found[name] = error, float(abs(loss - reference(CASES["mean"])[0]))
        return found

    assert_told_on_all_ranks(run_local(on_rank, 2, timeout=20), faults)


def unsupervised(predict, batch):
    return tree.map(lambda leaf: leaf * 0, terms_of(predict, batch))


@pytest.mark.parametrize("kind", ["tree", "ddp", "fsdp", "shard"])
def test_policies_for_empty_windows(kind):
    """With "zero" the loss and the gradient are 0 on all ranks, with "skip" no rank is valid."""

    def on_rank():
        (params, on), rank = wrapped(kind), c10d.get_rank()
        for windows in (EVEN, DEALS["last rank without a batch"], [[], []]):
            for den_fn in (None, lambda batch: 0 * count(batch)):
                options, window = {"den_fn": den_fn}, windows[rank]
                zero = dist.window_grad(on(unsupervised), on_empty="zero", **options)
                skip = dist.window_grad(on(unsupervised), on_empty="skip", **options)
                zero, skip = zero(params, window), skip(params, window)
                for result in (zero, skip):
                    assert all(not bool(grad.any()) for grad in plain(result.grads).values())
                assert (zero.loss.item(), bool(zero.valid)) == (0.0, True)
                assert skip.loss.isnan()
                assert not skip.valid
            value = dist.window_value(on(unsupervised), on_empty="zero")
            assert value(params, window).loss == 0
            value = dist.window_value(on(unsupervised), on_empty="skip")
            assert value(params, window).loss.isnan()

    run_local(on_rank, 2, timeout=30)


def test_a_failing_window_changes_neither_params_nor_optimizer():
    def on_rank():
        optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1)
        step = dist.train_step(dist.window_grad(on_tree(terms_of)), optimizer, donate=True)
        state, _ = step(dist.init_state(whole_params(), optimizer), EVEN[c10d.get_rank()])
        before = tree.map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, state)
        loss = on_bad_rank(raising(), LAST)
        step = dist.train_step(dist.window_grad(on_tree(loss)), optimizer, donate=True)
        assert "RankError" in said(lambda: step(state, EVEN[c10d.get_rank()]))
        pairs = zip(tree.leaves(state), tree.leaves(before), strict=True)
        return [torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs]

    for same in run_local(on_rank, 2, timeout=20):
        assert len(same) > 4
        assert all(same)


@pytest.mark.parametrize("unheard", [False, True])
@pytest.mark.parametrize("kind", ["tree", "fsdp"])
def test_skip_is_the_same_on_all_ranks(kind, unheard, monkeypatch):
    """What one rank alone sees is a window that no rank may use, or replicas would drift apart."""
    seen_by_one = {
        "a replay that does not repeat": (EVEN, {"plan": "replay"}),
        "a direction that the rank without a batch cannot know": (
            DEALS["first rank without a batch"],
            {"plan": "after"},
        ),
    }
    if unheard:  # as on accelerators, where nobody reads faults, and each rank needs a batch
        monkeypatch.setattr(WindowCollectives, "unheard", lambda self: True)
        seen_by_one.popitem()

    def on_rank():
        (params, on), found = wrapped(kind), []
        for name, (windows, options) in seen_by_one.items():
            loss, _, more, _ = (WITHIN | ENDS_OF_WINDOW)[name]
            objective = more.get("objective", pure.term_mean())
            grad = dist.window_grad(on(loss), objective, on_empty="skip", **options)
            found.append(bool(grad(params, windows[c10d.get_rank()]).valid))
        good = dist.window_grad(on(terms_of), on_empty="skip")
        return [*found, bool(good(params, EVEN[c10d.get_rank()]).valid)]

    assert run_local(on_rank, 2, timeout=20) == [[False] * len(seen_by_one) + [True]] * 2


@pytest.mark.parametrize("name", ["in the last micro-step", "in the backward pass after the sums"])
def test_skip_where_nobody_reads_whether_a_rank_failed(name, monkeypatch):
    """As on accelerators: the rank that failed says so, the others have a window not to use."""
    monkeypatch.setattr(WindowCollectives, "unheard", lambda self: True)
    (fault,) = (fault for each, (fault, *_) in WITHIN.items() if name in each)

    def on_rank():
        found, rank = [], c10d.get_rank()
        for loss in (fault, terms_of):
            grad = dist.window_grad(on_tree(loss), on_empty="skip")
            try:
                found.append(bool(grad(whole_params(), EVEN[rank]).valid))
            except RuntimeError as error:
                found.append(str(error))
        return found

    good, bad = run_local(on_rank, 2, timeout=20)
    assert good == [False, True]
    assert bad[0] in ("no forward", "no backward")
    assert bad[1] is True


def test_skip_where_nobody_reads_needs_a_batch_on_each_rank(monkeypatch):
    monkeypatch.setattr(WindowCollectives, "unheard", lambda self: True)

    def on_rank():
        grad = dist.window_grad(on_tree(terms_of), on_empty="skip")
        window = DEALS["last rank without a batch"][c10d.get_rank()]
        try:
            return bool(grad(whole_params(), window).valid)
        except ValueError as error:
            return str(error)

    good, idle = run_local(on_rank, 2, timeout=20)
    assert good is False
    assert idle.startswith("window: on_empty='skip' reads nothing on the host, so a rank without a")


def test_sums_whose_structure_cannot_travel():
    """A rank without a batch must learn the structure from the others, who must not stay behind."""

    class Own(NamedTuple):
        a: torch.Tensor

    def loss(predict, batch):
        num, den = terms_of(predict, batch)
        return LossTerms(Own(num), den)

    def on_rank():
        grad, rank = dist.window_grad(on_tree(loss)), c10d.get_rank()
        windows = DEALS["first rank without a batch"]
        return said(lambda: grad(whole_params(), windows[rank])), said(
            lambda: grad(whole_params(), EVEN[rank])
        )

    found = run_local(on_rank, 2, timeout=20)
    assert found[0] == found[1]
    assert "TypeError: the trees of sums must be picklable" in found[0][0]
    assert found[0][1] == "nothing was raised"
