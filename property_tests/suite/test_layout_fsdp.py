"""FSDP2: each rank holds shards, which FSDP2 gathers layer by layer.

FSDP2 sums over the dimensions of the mesh that it was given, in the backward pass of the last
micro-step. `window_grad` sums what it leaves: parameters that it was told to ignore, such as those
that are kept in float32, and dimensions of the data that it does not know.
"""

import pytest
import torch.distributed as c10d
from dist_cases import DEALS, WINDOW, fully_sharded, mean_loss, net
from layout_cases import ROUNDING, of_whole_batch, off
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from numden import dist
from numden.dist import layout, run_local

ONE_DIMENSION = """\
parameter  number  summed over fsdp by
*.bias     2       FSDP2, reduce-scatter
*.weight   2       FSDP2, reduce-scatter"""

IGNORED = """\
parameter  number  summed over ranks by
*.bias     1       FSDP2, reduce-scatter
*.weight   2       FSDP2, reduce-scatter
*.bias     1       window_grad, all-reduce"""

HYBRID = """\
parameter  number  summed over dp by  summed over fsdp by
*.bias     2       FSDP2, all-reduce  FSDP2, reduce-scatter
*.weight   2       FSDP2, all-reduce  FSDP2, reduce-scatter"""

TWO_REDUCERS = """\
parameter  number  summed over dp by        summed over fsdp by
*.bias     2       window_grad, all-reduce  FSDP2, reduce-scatter
*.weight   2       window_grad, all-reduce  FSDP2, reduce-scatter"""

FOUR_WINDOWS = [WINDOW[:1], WINDOW[1:4], WINDOW[4:5], WINDOW[5:]]


@pytest.mark.parametrize("deal", ["ragged", "first rank without a batch"])
def test_fsdp_one_dimension(deal):
    def on_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        module = fully_sharded(net(), mesh)
        result = dist.window_grad(mean_loss, mesh=mesh)(module, DEALS[deal][c10d.get_rank()])
        return str(dist.explain_reduction(module, mesh)), off(result, *of_whole_batch())

    for table, numbers in run_local(on_rank, 2):
        assert table == ONE_DIMENSION
        assert max(numbers) < ROUNDING


def test_fsdp_ignored_parameters():
    """They are replicated, FSDP2 does not know of them, and nobody but the window sums them."""

    def on_rank():
        module = net()
        ignored = {module[2].bias}
        fully_shard(module[0])
        fully_shard(module, ignored_params=ignored)
        grad = dist.window_grad(mean_loss)
        results = [grad(module, DEALS["ragged"][c10d.get_rank()]) for _ in range(2)]
        numbers = [number for each in results for number in off(each, *of_whole_batch())]
        return str(dist.explain_reduction(module)), numbers

    for table, numbers in run_local(on_rank, 2):
        assert table == IGNORED
        assert max(numbers) < ROUNDING


@pytest.mark.parametrize("say", ["mesh", "group", "nothing"])
def test_hybrid_shards(say):
    """FSDP2 sums over both dimensions, although one has the placement Replicate: not again."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        ranks = {"mesh": {"mesh": mesh}, "group": {"group": c10d.group.WORLD}, "nothing": {}}[say]
        module = fully_sharded(net(), mesh)
        result = dist.window_grad(mean_loss, **ranks)(module, FOUR_WINDOWS[c10d.get_rank()])
        return str(dist.explain_reduction(module, **ranks)), off(result, *of_whole_batch())

    for table, numbers in run_local(on_rank, 4):
        if say == "mesh":
            assert table == HYBRID
        assert max(numbers) < ROUNDING


def test_shards_over_one_of_two_dimensions():
    """Where FSDP2 knows one dimension alone, the window sums the shards over the other."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        module = fully_sharded(net(), mesh["fsdp"])
        result = dist.window_grad(mean_loss, mesh=mesh)(module, FOUR_WINDOWS[c10d.get_rank()])
        return str(dist.explain_reduction(module, mesh)), off(result, *of_whole_batch())

    for table, numbers in run_local(on_rank, 4):
        assert table == TWO_REDUCERS
        assert max(numbers) < ROUNDING


def test_hybrid_shards_are_not_summed_over_a_part_of_their_ranks():
    """FSDP2 would sum gradients over four ranks, for a loss that is summed over two."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        module = fully_sharded(net(), mesh)
        messages = []
        for ranks in ({"mesh": mesh["fsdp"]}, {"group": mesh["fsdp"].get_group()}):
            with pytest.raises(ValueError, match="must be on the ranks of the window") as info:
                dist.window_grad(mean_loss, **ranks)(module, WINDOW)
            messages.append(str(info.value))
        return messages

    for messages in run_local(on_rank, 4):
        for message in messages:
            assert message.startswith("window_grad: an FSDP2 module must be on the ranks of the")


def test_rules_are_found_for_each_layout_and_not_for_each_parameter(monkeypatch):
    """Each window asks for them, so that the meshes of a thousand parameters would be felt."""

    def on_rank():
        mesh, counts = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), []
        for depth in (1, 9):
            calls = []
            module = fully_shard(nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)]), mesh=mesh)
            along = layout.ranks_along
            monkeypatch.setattr(layout, "ranks_along", lambda *a: calls.append(a) or along(*a))  # noqa: B023
            assert len(dist.explain_reduction(module, mesh).rules) == 2 * depth
            monkeypatch.undo()
            counts.append(len(calls))
        return counts

    for few, many in run_local(on_rank, 2):
        assert few == many > 0
