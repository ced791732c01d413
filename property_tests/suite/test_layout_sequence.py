"""Sequence or context parallelism: each rank of `cp` has a part of every sequence.

Each token is counted once, by the rank that has it, so the sums go over `cp` as over the data. Keys
and values of the other parts come by `all_gather`, whose transpose brings their gradients back.
Whatever part of a gradient a rank finds is an addend: all parameters are partial over `cp`.
"""

import pytest
import torch
from layout_cases import ROUNDING, off, values
from torch.distributed.device_mesh import init_device_mesh

from numden import dist
from numden.dist import run_local
from numden.property_tests.counters import count_collectives
from numden.pure import LossTerms, tree

WIDTH, LENGTH = 3, 8

TABLE = """\
parameter  number  summed over dp by        summed over cp by
['out']    1       window_grad, all-reduce  window_grad, all-reduce
['qkv']    1       window_grad, all-reduce  window_grad, all-reduce"""


def attention_params():
    return {"qkv": values(3, WIDTH, WIDTH, seed=1), "out": values(WIDTH, WIDTH, seed=2)}


def attention_batch(num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_rows, LENGTH, generator=generator) > 0.3
    shape = num_rows, LENGTH, WIDTH
    return {"x": values(*shape, seed=seed), "y": values(*shape, seed=-seed), "mask": mask}


WINDOWS = [[attention_batch(2, 1), attention_batch(1, 2)], [attention_batch(3, 3)]]
"""Of the two ranks of ``dp``, which differ in their number of micro-steps."""


def causal_loss(params, batch, others=lambda keys: keys, first=0):
    """Causal attention from the positions of a batch, which start at ``first``, to all keys."""
    x = batch["x"]
    query, key, value = (x @ weight for weight in params["qkv"])
    key, value = others(key), others(value)
    positions = first + torch.arange(x.shape[1])
    later = torch.arange(key.shape[1]) > positions[:, None]
    scores = (query @ key.mT).masked_fill(later, float("-inf"))
    out = scores.softmax(-1) @ value @ params["out"]
    errors = (out - batch["y"]).square().sum(-1) * batch["mask"]
    return LossTerms(errors.sum(), batch["mask"].sum())


def of_one_process():
    params = tree.map(lambda p: p.requires_grad_(), attention_params())
    batches = [batch for window in WINDOWS for batch in window]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    terms = causal_loss(params, whole)
    loss = terms.num / terms.den
    leaves, structure = tree.flatten(params)
    return loss.detach(), tree.unflatten(structure, list(torch.autograd.grad(loss, leaves)))


def test_sequence_split():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        cp, size = mesh["cp"], LENGTH // 2
        first = cp.get_local_rank() * size

        def loss_fn(params, batch):
            part = tree.map(lambda x: x[:, first : first + size], batch)
            return causal_loss(params, part, lambda x: dist.all_gather(x, cp, dim=1), first)

        params = attention_params()
        grad = dist.window_grad(loss_fn, mesh=mesh, lockstep=True)
        result = grad(params, WINDOWS[mesh["dp"].get_local_rank()])
        den = sum(int(batch["mask"].sum()) for window in WINDOWS for batch in window)
        counted = float(result.terms.den) / den
        return str(dist.explain_reduction(params, mesh)), counted, off(result, *of_one_process())

    for table, counted, numbers in run_local(on_rank, 4):
        assert table == TABLE
        assert counted == 1.0
        assert max(numbers) < ROUNDING


@pytest.mark.parametrize(("plan", "more"), [("after", 1), ("auto", 2)])
def test_lockstep_is_one_more_collective_whatever_the_window(plan, more):
    """The counts of micro-steps travel once, before a window; and so does what "auto" takes."""

    def on_rank():
        totals = []
        for lockstep in (False, True):
            grad = dist.window_grad(causal_loss, plan=plan, lockstep=lockstep)
            for window in WINDOWS:
                with count_collectives() as calls:
                    grad(attention_params(), window)
                totals.append(calls.total())
        return totals

    for totals in run_local(on_rank, 2):
        short, long, short_in_step, long_in_step = totals
        assert short == long
        assert short_in_step == long_in_step == short + more


def test_ranks_of_one_group_only():
    """A mesh of the data alone, without its sequence dimension, would count each token once too."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        window = WINDOWS[mesh["dp"].get_local_rank()]
        # Both ranks of cp have whole sequences here: the same data, counted over dp alone.
        result = dist.window_grad(causal_loss, mesh=mesh["dp"])(attention_params(), window)
        return off(result, *of_one_process())

    assert max(map(max, run_local(on_rank, 4))) < ROUNDING
