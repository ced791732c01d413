"""Replicated parameters: a pytree, a module, DDP. Each rank holds all of them.

Every gradient is partial over every dimension of the data, and `window_grad` sums it there by one
all-reduce at the end of the window. DDP's own reduction, which averages, never runs.
"""

import pytest
import torch.distributed as c10d
from dist_cases import DEALS, WINDOW, mean_loss, wrapped
from layout_cases import ROUNDING, of_whole_batch, off
from torch.distributed.device_mesh import init_device_mesh

from numden import dist
from numden.dist import run_local

TABLE = """\
parameter  number  summed over ranks by
*.bias     2       window_grad, all-reduce
*.weight   2       window_grad, all-reduce"""

TABLE_OF_TREE = """\
parameter     number  summed over ranks by
['*.bias']    2       window_grad, all-reduce
['*.weight']  2       window_grad, all-reduce"""


@pytest.mark.parametrize("kind", ["tree", "module", "ddp"])
def test_replicated(kind):
    def on_rank():
        params, on = wrapped(kind)
        result = dist.window_grad(on(mean_loss))(params, DEALS["ragged"][c10d.get_rank()])
        grads = {name.removeprefix("module."): g for name, g in result.grads.items()}
        table = str(dist.explain_reduction(params))
        return table, off(result._replace(grads=grads), *of_whole_batch())

    for table, numbers in run_local(on_rank, 2):
        assert table == (TABLE_OF_TREE if kind == "tree" else TABLE)
        assert max(numbers) < ROUNDING


def test_replicated_over_two_dimensions():
    """The sum over both is one all-reduce over their product."""
    windows = [WINDOW[:1], WINDOW[1:4], [], WINDOW[4:]]

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        params, on = wrapped("tree")
        grad = dist.window_grad(on(mean_loss), mesh=mesh)
        table = dist.explain_reduction(params, mesh)
        return table.rules[0].summed_by, off(
            grad(params, windows[c10d.get_rank()]), *of_whole_batch()
        )

    for summed_by, numbers in run_local(on_rank, 4):
        assert summed_by == {"dp": dist.By.WINDOW, "cp": dist.By.WINDOW}
        assert max(numbers) < ROUNDING
