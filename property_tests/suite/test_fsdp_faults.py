"""A rank that fails within the passes of an FSDP2 module, where the others wait for it."""

import contextlib
import os
import re
import socket
import sys
import time

import pytest
import torch.distributed as c10d
from dist_cases import DEALS, FailsBackward, mean_loss, said, wrapped

from numden import dist, pure
from numden.dist import RankError, run_local
from numden.pure import LossTerms

BAD = 1
EVEN = DEALS["even"]
FIRST, LAST = EVEN[BAD][0], EVEN[BAD][-1]


def terms_of(model, batch):
    return mean_loss(model, batch)[0]


def fails_before(model, batch):
    raise RuntimeError("no forward")


def fails_between_blocks(model, batch):
    model[0](batch["x"])
    raise RuntimeError("no forward")


def fails_after(model, batch):
    terms_of(model, batch)
    raise RuntimeError("no forward")


def fails_backward(model, batch):
    terms = terms_of(model, batch)
    return LossTerms(FailsBackward.apply(terms.num), terms.den)


def has_no_backward(model, batch):
    terms = terms_of(model, batch)
    return LossTerms(terms.num.detach(), terms.den)


PASSES = {
    fails_before: r"window: a rank failed: RuntimeError: no forward \(rank 1\)\. Nothing was",
    fails_between_blocks: r"window: a rank failed: RuntimeError: no forward \(rank 1\)\.",
    fails_after: r"window: a rank failed: RuntimeError: no forward \(rank 1\)\.",
    fails_backward: r"window: a rank failed: RuntimeError: no backward \(rank 1\)\.",
    has_no_backward: r"loss_fn: with an FSDP2 module or in lockstep each mic.* \(rank 1\)",
}


def fsdp_fault(fails, at=LAST):
    def loss(model, batch):
        return (
            fails(model, batch)
            if batch is at and c10d.get_rank() == BAD
            else terms_of(model, batch)
        )

    return loss


@pytest.mark.parametrize("fails", PASSES)
def test_fsdp_failing_rank_ends_the_run(fails):
    """The error that ends its process ends the others', long before a time-out."""

    def on_rank():
        params, _ = wrapped("fsdp")
        dist.window_grad(terms_of)(params, EVEN[c10d.get_rank()])
        dist.window_grad(fsdp_fault(fails))(params, EVEN[c10d.get_rank()])

    start = time.monotonic()
    with pytest.raises((RankError, pure.TermStructureError), match=PASSES[fails]) as failure:
        run_local(on_rank, 2, timeout=30)
    assert time.monotonic() - start < 15
    assert "rank 1 of 2 raised" in "".join(failure.value.__notes__)


def close_connections():
    """What the end of a process does to those that wait for it."""
    for name in os.listdir("/proc/self/fd"):
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(int(name))) as connection,
        ):
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("fails", [fails_between_blocks, fails_backward])
@pytest.mark.parametrize("at", [FIRST, LAST])
def test_fsdp_waiting_rank_hears_why_the_other_ended(fails, at):
    def on_rank():
        (params, _), rank = wrapped("fsdp"), c10d.get_rank()
        grad = dist.window_grad(fsdp_fault(fails, at))
        error = said(lambda: grad(params, EVEN[rank]))
        if rank == BAD:
            close_connections()
        return error, c10d.is_initialized()

    (waiting, _), (failing, alive) = run_local(on_rank, 2, timeout=20)
    assert re.match("RankError: " + PASSES[fails], failing)
    assert waiting == failing
    assert not alive
