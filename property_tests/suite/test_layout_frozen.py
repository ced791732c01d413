"""Frozen parameters have no gradient; those that are unused on a rank have a zero there."""

import pytest
import torch
import torch.distributed as c10d
from dist_cases import DEALS, WINDOW, fully_sharded, net
from layout_cases import ROUNDING, off
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from numden import dist, pure
from numden.dist import run_local
from numden.pure import LossTerms

TABLES = {
    "module": """\
parameter  number  summed over ranks by
*.bias     2       window_grad, all-reduce
*.weight   1       window_grad, all-reduce
*.weight   1       frozen""",
    "fsdp": """\
parameter  number  summed over ranks by
*.bias     2       FSDP2, reduce-scatter
*.weight   1       FSDP2, reduce-scatter
*.weight   1       frozen""",
}


def loss_fn(predict, batch):
    errors = (predict(batch["x"]) - batch["y"]).square().sum(-1) * batch["mask"]
    return LossTerms(errors.sum(), batch["mask"].sum())


@pytest.mark.parametrize("kind", TABLES)
def test_frozen_parameter(kind):
    def frozen_net():
        module = net()
        module[0].weight.requires_grad_(False)
        return module

    def on_rank():
        expected = pure.window_grad(loss_fn)(frozen_net(), WINDOW)
        module = {"module": frozen_net, "fsdp": lambda: fully_sharded(frozen_net())}[kind]()
        result = dist.window_grad(loss_fn)(module, DEALS["ragged"][c10d.get_rank()])
        numbers = off(result, expected.loss, expected.grads)
        return str(dist.explain_reduction(module)), list(result.grads), numbers

    for table, names, numbers in run_local(on_rank, 2):
        assert table == TABLES[kind]
        assert "0.weight" not in names
        assert max(numbers) < ROUNDING


class Branches(nn.Module):
    """Two weights, of which a batch may leave out the second."""

    def __init__(self):
        super().__init__()
        self.always = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, batch):
        return branches(dict(self.named_parameters()), batch)


def branches(params, batch):
    out = torch.tanh(batch["x"] @ params["always"])
    if batch["deep"]:
        out = torch.tanh(out @ params["sometimes"])
    errors = (out - batch["y"]).square().sum(-1) * batch["mask"]
    return LossTerms(errors.sum(), batch["mask"].sum())


def call_branches(module, batch):
    return module(batch)


KINDS = {
    "tree": lambda: tree_of(Branches()),
    "module": Branches,
    "ddp": lambda: DistributedDataParallel(Branches()),
    "fsdp": lambda: fully_shard(Branches()),
    "shard": lambda: dist.shard(tree_of(Branches()), init_device_mesh("cpu", (2,))),
}


def tree_of(module):
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("users", [[0], [1], []])
@pytest.mark.parametrize("kind", KINDS)
def test_parameter_unused_on_one_rank(kind, users):
    """Its gradient is the sum over the ranks that use it; none waits for one that does not come."""
    windows = [
        [batch | {"deep": rank in users} for batch in window]
        for rank, window in enumerate(DEALS["even"])
    ]

    def on_rank():
        expected = pure.window_grad(branches)(tree_of(Branches()), windows[0] + windows[1])
        params = KINDS[kind]()
        loss_fn = call_branches if kind in ("module", "ddp", "fsdp") else branches
        grad = dist.window_grad(loss_fn)
        found = []
        for _ in range(2):
            result = grad(params, windows[c10d.get_rank()])
            grads = {name.removeprefix("module."): g for name, g in result.grads.items()}
            found += off(result._replace(grads=grads), expected.loss, expected.grads)
        return found

    for numbers in run_local(on_rank, 2, timeout=30):
        assert max(numbers) < ROUNDING
