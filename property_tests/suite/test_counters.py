"""The counters see collectives and host syncs of each kind, and nothing else."""

import re

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.checkpoint import checkpoint

from numden.property_tests import count_collectives, count_host_syncs


def _world():
    return c10d.distributed_c10d._get_default_group()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_count_collectives_counts_each_kind_once(two_ranks):
    x = torch.ones(2)
    with count_collectives() as calls:
        c10d.all_reduce(x)
        c10d.all_gather_into_tensor(torch.empty(4), x)
        c10d.reduce_scatter_tensor(torch.empty(1), x)
        c10d.broadcast(x, 0)
        c10d.all_to_all_single(torch.empty(2), x)
        c10d.all_gather([torch.empty(2), torch.empty(2)], x)
        c10d.barrier()
        (2 * funcol.all_gather_tensor(x, 0, two_ranks)).sum()
        (2 * funcol.reduce_scatter_tensor(x, "sum", 0, two_ranks)).sum()
        (2 * funcol.all_to_all_single_autograd(x, [1, 1], [1, 1], two_ranks)).sum()
    assert calls == {
        "c10d.allreduce_": 1,
        "c10d._allgather_base_": 1,
        "c10d._reduce_scatter_base_": 1,
        "c10d.broadcast_": 1,
        "c10d.alltoall_base_": 1,
        "c10d.allgather_": 1,
        "c10d.barrier": 1,
        "_c10d_functional.all_gather_into_tensor": 1,
        "_c10d_functional.reduce_scatter_tensor": 1,
        "_c10d_functional.all_to_all_single": 1,
    }
    assert calls.total() == len(calls.places) == 10


def test_count_collectives_sees_dtensor(two_ranks):
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with count_collectives() as calls:
        partial.redistribute(placements=[Replicate()]).to_local()
    assert calls == {"_c10d_functional.all_reduce": 1}


def test_count_collectives_sees_the_reducer_of_ddp(tmp_path):
    c10d.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    module = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    with count_collectives() as calls:
        module(torch.ones(3, 2)).sum().backward()
    c10d.destroy_process_group()
    assert calls["c10d.allreduce_"] == 1


X = torch.tensor([1.0, -2.0, 3.0])
MASK, INDEX = X > 0, torch.tensor(1)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense"),
        (lambda x: float(x.sum()), "aten._local_scalar_dense"),
        (lambda x: 1 if (x > 0).any() else 0, "aten._local_scalar_dense"),
        (lambda x: x[INDEX], "aten._local_scalar_dense"),
        (lambda x: x[:INDEX], "aten._local_scalar_dense"),
        (lambda x: f"{x[0]:.2f}", "aten._local_scalar_dense"),
        (lambda x: x.new_full((2,), INDEX), "aten._local_scalar_dense"),
        (lambda x: x[MASK], "aten.index"),
        (lambda x: x.index_put((MASK,), torch.ones(2)), "aten.index_put"),
        (lambda x: x.masked_select(MASK), "aten.masked_select"),
        (lambda x: MASK.nonzero(), "aten.nonzero"),
        (lambda x: torch.where(MASK), "aten.nonzero"),
        (lambda x: x.unique(), "aten._unique2"),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0])), "aten.repeat_interleave"),
        (lambda x: torch.equal(x, x + 1), "aten.equal"),
        (lambda x: torch.bincount(torch.tensor([1, 2])), "aten.bincount"),
        (lambda x: x.tolist(), "Tensor.tolist"),
        (lambda x: x.numpy(), "Tensor.numpy"),
        (lambda x: x.cpu(), "Tensor.cpu"),
        (lambda x: repr(x), "Tensor.__repr__"),
        (lambda x: torch.tensor([x[0], x[1]]), "torch.tensor of tensors"),
    ],
)
def test_count_host_syncs_sees(read, name):
    with count_host_syncs() as calls:
        read(X)
    assert dict(calls) == {name: 1}
    assert re.search(r"test_counters\.py:\d+$", calls.places[0])


@pytest.mark.parametrize(
    "quiet",
    [
        lambda x: torch.where(MASK, x, 0.0).sum(),
        lambda x: x.clone().masked_fill_(MASK, 0.0),
        lambda x: x.clone().__setitem__(MASK, 0.0),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[0] + x[-1],
        lambda x: x.index_select(0, INDEX[None]),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 0]), output_size=3),
        lambda x: torch.nonzero_static(MASK, size=2),
        lambda x: x.to(torch.float64).sum(),
        lambda x: x.shape[0] * x.numel() + len(x),
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: [row for row in x],
    ],
)
def test_count_host_syncs_passes(quiet):
    with count_host_syncs() as calls:
        quiet(X)
    assert dict(calls) == {}


def test_counters_see_inside_transforms_and_checkpoints():
    def masked(w):
        return w[torch.tensor([True, False])].exp().sum()

    w = torch.ones(2, requires_grad=True)
    with count_host_syncs() as calls:
        torch.func.grad(masked)(w.detach())
    assert calls["aten.index"] == 1
    with count_host_syncs() as calls:
        checkpoint(masked, w, use_reentrant=False).backward()
    assert calls["aten.index"] == 2  # Recomputed in the backward pass.
