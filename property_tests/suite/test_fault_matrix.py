"""What goes wrong in a training step on one rank, and how it ends on all.

Each line ends in one error that is the same on all ranks, with params, optimizer state and schedule
as they were; or in the correct step. None hangs: each has a time limit. Replicated parameters go
on with the next window; where FSDP2 gathers within the passes, a rank that failed there cannot go
on, and its end is the others'.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as c10d
from dist_cases import (
    CASES,
    ROUNDING,
    WINDOW,
    apart,
    plain,
    reference,
    wrapped,
)
from fault_cases import BAD, EVEN, NO_FORWARD, OTHER_TREE, on_bad_rank, raising, terms_of
from lone_ranks import KILLED, outcomes
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR

from numden import dist
from numden.dist import TrainState, init_state, train_step
from numden.pure import LossTerms, optim, tree

CORRECT = "the correct step"
SECONDS = 30


class Fault(NamedTuple):
    """A line of the matrix.

    Attributes:
        name: what goes wrong.
        loss: the loss function, as it is on all ranks.
        windows: of each rank.
        ends: the error's pattern, or ``CORRECT``.
        within: whether it comes within the passes, where FSDP2 leaves peers waiting.
    """

    name: str
    loss: Callable[..., Any]
    windows: list[Any]
    ends: str
    within: bool = False


def is_killed(terms):
    os.kill(os.getpid(), signal.SIGKILL)


def is_slow(terms):
    time.sleep(0.5)
    return terms


def breaks_off():
    yield EVEN[BAD][0]
    raise OSError("no disk")


BATCHES = EVEN[BAD]

FAULTS = [
    Fault(
        "raises in the first micro-step", on_bad_rank(raising(), BATCHES[0]), EVEN, NO_FORWARD, True
    ),
    Fault(
        "raises in a middle micro-step", on_bad_rank(raising(), BATCHES[1]), EVEN, NO_FORWARD, True
    ),
    Fault(
        "raises in the last micro-step", on_bad_rank(raising(), BATCHES[-1]), EVEN, NO_FORWARD, True
    ),
    Fault(
        "returns another tree",
        on_bad_rank(lambda terms: LossTerms({"a": terms.num}, terms.den)),
        EVEN,
        OTHER_TREE + r"num, den; rank 1 has num\['a'\], den\.",
    ),
    Fault(
        "returns another number of terms",
        on_bad_rank(lambda terms: LossTerms([terms.num] * 2, terms.den)),
        EVEN,
        OTHER_TREE + r"num, den; rank 1 has num\[0\], num\[1\], den\.",
    ),
    Fault(
        "has a NaN numerator",
        on_bad_rank(lambda terms: LossTerms(terms.num * float("nan"), terms.den), BATCHES[2]),
        EVEN,
        r"NonFiniteLossError: window: num is not finite in micro-step 2 on rank 1\. Nothing was",
    ),
    Fault(
        "has, as all have, nothing supervised",
        lambda predict, batch: tree.map(lambda leaf: leaf * 0, terms_of(predict, batch)),
        EVEN,
        r"EmptyWindowError: window: a total den must be positive and finite, got den = 0\.",
    ),
    Fault(
        "is killed in the window",
        on_bad_rank(is_killed, BATCHES[1]),
        EVEN,
        r"RankError: window: a rank failed: ConnectionError: this rank lost the connection to an",
        True,
    ),
    Fault("is slow", on_bad_rank(is_slow, BATCHES[1]), EVEN, CORRECT),
    Fault("has fewer micro-steps", terms_of, [WINDOW[:6], WINDOW[6:]], CORRECT),
    Fault("has no data left", terms_of, [WINDOW, []], CORRECT),
    Fault(
        "has data that break off",
        terms_of,
        [EVEN[0], breaks_off],
        r"RankError: window: a rank failed: OSError: no disk \(rank 1\)\. Nothing was updated",
    ),
]
"""Of rank 1; "it" is that rank."""


def scheduled():
    """Clipping, and AdamW with a rate that falls from step to step."""
    schedule = partial(StepLR, step_size=1, gamma=0.5)
    rate = optim.schedule_from_torch(schedule, lr=0.1, num_steps=10)
    return optim.chain(
        optim.clip_by_global_norm(1.0, sum_squares=dist.sum_of_squares),
        optim.from_torch(torch.optim.AdamW, lr=rate),
    )


def copy_of(state: TrainState):
    """All tensors of params and optimizer, this rank's parts, and the numbers beside them."""
    params = state.params
    if isinstance(params, torch.nn.Module):
        params = dict(params.named_parameters())
    return tree.map(_value, (params, state.opt_state, state.step))


def _value(leaf):
    if isinstance(leaf, DTensor):
        leaf = leaf.to_local()
    return leaf.detach().clone().tolist() if isinstance(leaf, torch.Tensor) else leaf


def attempt(kind, number):
    """One step with a fault, and the next without: what it ended in, and whether all was as before.

    Returns:
        The error, or ``CORRECT``; whether it left the state as it was; and whether the next step
        had the right gradient, None where there can be no next one.
    """
    fault, rank = FAULTS[number], c10d.get_rank()
    params, on = wrapped(kind)
    optimizer, window = scheduled(), fault.windows[rank]
    state = init_state(params, optimizer)
    step = train_step(dist.window_grad(on(fault.loss)), optimizer, donate=True)
    before = copy_of(state)
    try:
        _, result = step(state, window() if callable(window) else window)
        return CORRECT if is_right(result) else "a wrong step", True, None
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    same = copy_of(state) == before
    if not goes_on(fault, kind):
        return said, same, None
    _, result = train_step(dist.window_grad(on(terms_of)), optimizer)(state, EVEN[rank])
    return said, same, is_right(result)


def is_right(result):
    return apart(plain(result.grads), reference(CASES["mean"])[1]) < ROUNDING


def goes_on(fault, kind):
    """Whether the ranks can take another step together after a fault."""
    return "killed" not in fault.name and not (fault.within and kind == "fsdp")


@pytest.mark.parametrize("kind", ["tree", "fsdp"])
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault.name for fault in FAULTS])
def test_fault(kind, number):
    fault = FAULTS[number]
    found = outcomes(attempt, 2, kind, number, timeout=SECONDS)
    if "killed" in fault.name:
        assert found.pop(BAD) == KILLED
    for said, same, next_is_right in found:
        assert said == CORRECT if fault.ends is CORRECT else re.match(fault.ends, said), said
        assert same
        assert next_is_right is not False
    assert len({said for said, *_ in found}) == 1
    assert (found[0][2] is True) == (fault.ends is not CORRECT and goes_on(fault, kind))
