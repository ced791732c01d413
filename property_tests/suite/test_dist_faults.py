"""What goes wrong on one rank is the same error on all, in the same window, and nothing hangs."""

import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as c10d
from dist_cases import (
    CASES,
    DEALS,
    apart,
    on_tree,
    plain,
    reference,
    said,
    whole_params,
    wrapped,
)
from fault_cases import ENDS_OF_WINDOW, EVEN, LAST, WITHIN, count, on_bad_rank, raising, terms_of

from numden import dist, pure
from numden.dist import run_local
from numden.dist.reduction import WindowCollectives
from numden.pure import LossTerms, optim, tree


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
