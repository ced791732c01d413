"""Expert parallelism: experts cut over `ep`, everything else replicated over it, router included.

The ranks of `ep` have different tokens, so the sums go over it as over any dimension of the data.
Tokens travel to the owners of their experts (`all_to_all`), and their gradients travel back: at its
owner an expert's gradient is already the sum over `ep`. That is what `owned_over` says. The others'
gradients are partial over `ep`.
"""

import time

import pytest
import torch.distributed as c10d
from layout_cases import (
    EXPERT_OBJECTIVE,
    EXPERT_WINDOWS,
    ROUNDING,
    exchange_over,
    expert_params,
    experts_of_whole_batch,
    off,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from numden import dist
from numden.dist import run_local

PLANS = ("columns", "replay")

OVER_EP = """\
parameter    number  summed over ep by
['experts']  1       whole at its owner
['router']   1       window_grad, all-reduce
['trunk']    1       window_grad, all-reduce"""

OVER_DP_AND_EP = """\
parameter    number  summed over dp by        summed over ep by
['experts']  1       window_grad, all-reduce  whole at its owner
['router']   1       window_grad, all-reduce  window_grad, all-reduce
['trunk']    1       window_grad, all-reduce  window_grad, all-reduce"""

SHARDED_EXPERTS = """\
parameter    number  summed over ep by        summed over fsdp by
['experts']  1       whole at its owner       window_grad, reduce-scatter
['router']   1       window_grad, all-reduce  window_grad, reduce-scatter
['trunk']    1       window_grad, all-reduce  window_grad, reduce-scatter"""

FSDP_EXPERTS = """\
parameter  number  summed over ep by        summed over fsdp by
experts.w  1       whole at its owner       FSDP2, reduce-scatter
router     1       window_grad, all-reduce  FSDP2, reduce-scatter
trunk      1       window_grad, all-reduce  FSDP2, reduce-scatter"""


def test_experts():
    def on_rank():
        mesh, params = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), expert_params()
        params["experts"] = dist.shard(params["experts"], mesh)
        window, numbers = EXPERT_WINDOWS[c10d.get_rank()], []
        for plan in PLANS:
            grad = dist.window_grad(
                exchange_over(mesh), EXPERT_OBJECTIVE, mesh=mesh, owned_over="ep", plan=plan
            )
            numbers += off(grad(params, window), *experts_of_whole_batch(2))
        return str(dist.explain_reduction(params, mesh, owned_over="ep")), numbers

    for table, numbers in run_local(on_rank, 2):
        assert table == OVER_EP
        assert max(numbers) < ROUNDING


def test_experts_replicated_over_data():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        params, window = expert_params(), EXPERT_WINDOWS[c10d.get_rank()]
        params["experts"] = dist.shard(params["experts"], mesh["ep"])
        grad = dist.window_grad(
            exchange_over(mesh["ep"]), EXPERT_OBJECTIVE, mesh=mesh, owned_over="ep"
        )
        numbers = off(grad(params, window), *experts_of_whole_batch(4))
        return str(dist.explain_reduction(params, mesh, owned_over="ep")), numbers

    for table, numbers in run_local(on_rank, 4):
        assert table == OVER_DP_AND_EP
        assert max(numbers) < ROUNDING


@pytest.mark.parametrize("gather", ["window", "micro-step"])
def test_experts_owned_and_sharded(gather):
    """Both dimensions larger than 1: an expert's part of its owner is cut over `fsdp` once more."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
        params, window = expert_params(), EXPERT_WINDOWS[c10d.get_rank()]
        experts = dist.shard(params.pop("experts"), mesh)
        params = dist.shard(params, mesh["fsdp"]) | {"experts": experts}
        grad = dist.window_grad(
            exchange_over(mesh["ep"]),
            EXPERT_OBJECTIVE,
            mesh=mesh,
            owned_over="ep",
            gather=gather,
        )
        numbers = off(grad(params, window), *experts_of_whole_batch(4))
        return str(dist.explain_reduction(params, mesh, owned_over="ep")), numbers

    for table, numbers in run_local(on_rank, 4):
        assert table == SHARDED_EXPERTS
        assert max(numbers) < ROUNDING


class Experts(nn.Module):
    """This rank's experts, as a DTensor that is cut over ``ep``."""

    def __init__(self, mesh):
        super().__init__()
        self.w = nn.Parameter(dist.shard(expert_params()["experts"], mesh))

    def forward(self):
        return self.w.to_local().clone()  # FSDP2 warns of views


class Mixture(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.experts = Experts(mesh["ep"])
        self.router = nn.Parameter(expert_params()["router"])
        self.trunk = nn.Parameter(expert_params()["trunk"])

    def forward(self, loss, batch):
        experts = self.experts()
        return loss({"experts": experts, "router": self.router, "trunk": self.trunk}, batch)


def test_experts_of_an_fsdp_module():
    """FSDP2 shards over `fsdp` what is cut over `ep`, and knows nothing of it."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
        module = Mixture(mesh)
        fully_shard(module.experts, mesh=mesh["fsdp"])
        fully_shard(module, mesh=mesh["fsdp"])
        loss = exchange_over(mesh["ep"])

        def loss_fn(module, batch):
            return module(loss, batch)

        grad = dist.window_grad(loss_fn, EXPERT_OBJECTIVE, mesh=mesh, owned_over="ep")
        result = grad(module, EXPERT_WINDOWS[c10d.get_rank()])
        grads = {name.removesuffix(".w"): g for name, g in result.grads.items()}
        numbers = off(result._replace(grads=grads), *experts_of_whole_batch(4))
        return str(dist.explain_reduction(module, mesh, owned_over="ep")), numbers

    for table, numbers in run_local(on_rank, 4):
        assert table == FSDP_EXPERTS
        assert max(numbers) < ROUNDING


def test_experts_must_be_named_and_cut():
    def on_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        window = EXPERT_WINDOWS[c10d.get_rank()]
        module = Mixture({"ep": mesh})
        with pytest.raises(ValueError, match="owned_over='ep'"):
            dist.window_grad(exchange_over(mesh), mesh=mesh)(module, window)
        grad = dist.window_grad(exchange_over(mesh), mesh=mesh, owned_over="ep")
        with pytest.raises(ValueError, match="got owned_over=\\('ep',\\) and no parameter that is"):
            grad(expert_params(), window)

    run_local(on_rank, 2)


def test_owned_dimensions_come_first():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
        params = expert_params()
        params["experts"] = dist.shard(params["experts"], mesh)
        grad = dist.window_grad(exchange_over(mesh["ep"]), mesh=mesh, owned_over="ep")
        with pytest.raises(ValueError, match="must come first in their mesh, got owned_over="):
            grad(params, EXPERT_WINDOWS[c10d.get_rank()])

    run_local(on_rank, 4)


def test_failing_owner_ends_the_run():
    """Its peers wait for tokens that it cannot send any more: its end is theirs, with its words."""

    def on_rank():
        mesh, params = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), expert_params()
        params["experts"] = dist.shard(params["experts"], mesh)
        loss, window = exchange_over(mesh), EXPERT_WINDOWS[c10d.get_rank()]

        def loss_fn(params, batch):
            if c10d.get_rank() == 1:
                raise RuntimeError("no forward")
            return loss(params, batch)

        dist.window_grad(loss, EXPERT_OBJECTIVE, mesh=mesh, owned_over="ep")(params, window)
        dist.window_grad(loss_fn, EXPERT_OBJECTIVE, mesh=mesh, owned_over="ep")(params, window)

    start = time.monotonic()
    with pytest.raises(dist.RankError, match=r"a rank failed: RuntimeError: no forward \(rank 1\)"):
        run_local(on_rank, 2, timeout=30)
    assert time.monotonic() - start < 15
