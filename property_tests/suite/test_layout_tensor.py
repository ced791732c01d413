"""Tensor parallelism: ranks of `tp` have the same tokens, and cut parameters between them.

The sums go over the dimensions of the data alone, so that each token counts once. What DTensor has
cut or replicated over `tp` it also sums there itself.
"""

import torch
from dist_cases import WINDOW, mean_loss, said, whole
from layout_cases import ROUNDING, off
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from numden import dist, pure
from numden.dist import run_local

WINDOWS = [WINDOW[:3], WINDOW[3:]]
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}

TABLE = """\
parameter  number  summed over dp by        summed over tp by
*.bias     2       window_grad, all-reduce  DTensor, same data
*.weight   2       window_grad, all-reduce  DTensor, same data"""

WITH_FSDP = """\
parameter  number  summed over dp by      summed over tp by
*.bias     2       FSDP2, reduce-scatter  DTensor, same data
*.weight   2       FSDP2, reduce-scatter  DTensor, same data"""


def even_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), Copy()).double()


class Copy(nn.Module):
    """FSDP2 warns of modules whose output is a view, as that of a row-wise layer is."""

    def forward(self, x):
        return x.clone()


def of_one_process():
    return pure.window_grad(mean_loss)(even_net(), [whole(WINDOW)])


def parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh, parallelize_module(even_net(), mesh["tp"], PLAN)


def test_tensor_parallel():
    def on_rank():
        expected, (mesh, module) = of_one_process(), parallel()
        grad = dist.window_grad(mean_loss, mesh=mesh["dp"])
        result = grad(module, WINDOWS[mesh["dp"].get_local_rank()])
        counted = float(result.terms.den / expected.terms.den)
        numbers = off(result, expected.loss, expected.grads)
        return str(dist.explain_reduction(module, mesh["dp"])), counted, numbers

    for table, counted, numbers in run_local(on_rank, 4):
        assert table == TABLE
        assert counted == 1.0
        assert max(numbers) < ROUNDING


def test_tensor_parallel_and_fsdp():
    def on_rank():
        expected, (mesh, module) = of_one_process(), parallel()
        fully_shard(module, mesh=mesh["dp"])
        grad = dist.window_grad(mean_loss, mesh=mesh["dp"])
        result = grad(module, WINDOWS[mesh["dp"].get_local_rank()])
        numbers = off(result, expected.loss, expected.grads)
        return str(dist.explain_reduction(module, mesh["dp"])), numbers

    for table, numbers in run_local(on_rank, 4):
        assert table == WITH_FSDP
        assert max(numbers) < ROUNDING


def test_tensor_parallel_ranks_are_no_data():
    def on_rank():
        mesh, module = parallel()
        window = WINDOWS[mesh["dp"].get_local_rank()]
        return said(lambda: dist.window_grad(mean_loss, mesh=mesh)(module, window))

    for message in run_local(on_rank, 4):
        assert "window_grad: DTensors of a module must lie across the ranks of the win" in message
        assert "Give window_grad the mesh of the data dimensions alone" in message
