"""Functional sharding: leaves cut over ranks, gathered when used, gradients summed into shards."""

import pytest
import torch
import torch.distributed as c10d
from dist_cases import (
    CASES,
    DEALS,
    WINDOW,
    apart,
    mean_loss,
    on_tree,
    reference,
    whole,
    whole_params,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from numden import dist
from numden.dist import run_local
from numden.pure import LossTerms, cotangent, optim, term_mean, tree

ROUNDING = 1e-13


def params():
    """Leaves that the ranks do not divide evenly, one with fewer rows than ranks, and scalars."""
    values = torch.arange(30, dtype=torch.float64)
    return {
        "uneven": values[:15].reshape(5, 3),
        "short": values[:2].reshape(1, 2),
        "list": [values[:4], torch.tensor(2.5, dtype=torch.float64)],
        "transposed": values[:12].reshape(3, 4).T,
        "half": values[:6].bfloat16(),
    }


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks,))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_roundtrip_shard_gather(num_ranks):
    def on_rank():
        shards = dist.shard(params(), mesh_of(num_ranks))
        rows = [leaf.to_local().shape[:1] for leaf in tree.leaves(shards)]
        assert all(isinstance(leaf, DTensor) for leaf in tree.leaves(shards))
        return rows, dist.gather(shards)

    found = run_local(on_rank, num_ranks)
    for _, back in found:
        assert tree.structure(back) == tree.structure(params())
        assert all(map(torch.equal, tree.leaves(back), tree.leaves(params())))
        assert [leaf.dtype for leaf in tree.leaves(back)] == [
            leaf.dtype for leaf in tree.leaves(params())
        ]
    for leaf, *rows in zip(tree.leaves(params()), *(rows for rows, _ in found), strict=True):
        if leaf.dim():
            assert sum(each[0] for each in rows) == len(leaf)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shards_share_no_memory_with_params(num_ranks):
    """The whole leaf can go, and what updates the shards in place leaves it alone."""

    def on_rank():
        whole = {"w": torch.ones(4, 3), "b": torch.tensor(1.0)}
        shards = dist.shard(whole, mesh_of(num_ranks))
        assert shards["w"].placements == (Shard(0),)
        assert shards["b"].placements == (Replicate(),)
        for leaf in shards.values():
            leaf.to_local().zero_()
        assert all(bool((leaf == 1).all()) for leaf in whole.values())
        return shards["w"].to_local().untyped_storage().nbytes()

    assert run_local(on_rank, num_ranks) == [4 * 3 * 4 // num_ranks] * num_ranks


def test_gather_leaves_other_tensors_alone():
    plain = {"a": torch.ones(2), "n": 3}
    assert dist.gather(plain)["a"] is plain["a"]
    assert dist.gather(plain)["n"] == 3


def test_gradient_has_the_shards_of_params():
    def on_rank():
        shards = dist.shard(params(), mesh_of(3))

        def loss(params, batch):
            wide = tree.map(lambda leaf: leaf.double().square().sum(), params)
            return LossTerms(sum(tree.leaves(wide)) * batch, 1)

        grads = dist.window_grad(loss)(shards, [torch.tensor(1.0 + c10d.get_rank())]).grads
        pairs = zip(tree.leaves(grads), tree.leaves(shards), strict=True)
        for grad, leaf in pairs:
            assert grad.placements == leaf.placements
            assert grad.to_local().shape == leaf.to_local().shape
            assert grad.dtype == leaf.dtype
        assert all(leaf.grad is None for leaf in tree.leaves(shards))
        return dist.gather(grads)

    for grads in run_local(on_rank, 3):
        expected = tree.map(lambda leaf: leaf * 2 * (1 + 2 + 3) / 3, params())
        for grad, each in zip(tree.leaves(grads), tree.leaves(expected), strict=True):
            # The sum of three addends in bfloat16 rounds by 2^-9 a few times.
            torch.testing.assert_close(
                grad, each, rtol=2e-2 if each.dtype.itemsize < 4 else 1e-12, atol=0
            )


def test_trees_of_shards_and_whole_leaves():
    """A leaf that is no DTensor is replicated: its gradient is summed, and whole."""

    def on_rank():
        mixed = whole_params()
        names = [*mixed][:2]
        mixed |= dist.shard({name: mixed[name] for name in names}, mesh_of(2))
        grad = dist.window_grad(on_tree(mean_loss))
        grads = grad(mixed, DEALS["ragged"][c10d.get_rank()]).grads
        assert [isinstance(each, DTensor) for each in grads.values()] == [True, True, False, False]
        return apart(dist.gather(grads), reference(CASES["mean"])[1])

    assert max(run_local(on_rank, 2)) < ROUNDING


def even_params():
    """Two layers whose rows two ranks divide, as ``all_gather`` needs it."""
    values = torch.arange(18, dtype=torch.float64)
    return {
        "in": torch.sin(values).reshape(6, 3),
        "out": torch.cos(values).repeat(2)[:24].reshape(4, 6),
    }


def even_loss(params, batch):
    return mean_loss(lambda x: torch.tanh(x @ params["in"].T) @ params["out"].T, batch)[0]


def by_chain_rule(shards, batch):
    """``grad`` of loss ∘ all_gather, each rank of its own addend; the chain rule sums them."""
    totals = dist.psum(tree.map(torch.Tensor.double, even_loss(dist.all_gather(shards), batch)))
    weights = cotangent(term_mean(), totals)[1]
    return torch.func.grad(
        lambda shards: even_loss(dist.all_gather(shards), batch).num * weights.num
    )(shards)


def test_equivalent_window_grad_chain_rule():
    rows = [whole(WINDOW[:3]), whole(WINDOW[3:])]

    def on_rank():
        rank, mesh = c10d.get_rank(), mesh_of(2)
        shards = tree.map(lambda leaf: leaf.chunk(2)[rank], even_params())
        expected = by_chain_rule(shards, rows[rank])
        grads = dist.window_grad(even_loss)(dist.shard(even_params(), mesh), [rows[rank]]).grads
        return apart({name: grad.to_local() for name, grad in grads.items()}, expected)

    assert max(run_local(on_rank, 2)) < ROUNDING


def test_equivalent_steps_on_shards_and_on_whole_params():
    """Training on shards takes the same steps as on replicated params, optimizer and all."""

    def on_rank():
        optimizer = optim.from_torch(torch.optim.AdamW, lr=0.01)
        step = dist.train_step(dist.window_grad(on_tree(mean_loss)), optimizer)
        found = []
        for params in (whole_params(), dist.shard(whole_params(), mesh_of(2))):
            state = dist.init_state(params, optimizer)
            for deal in ("ragged", "first rank without a batch", "even"):
                state, _ = step(state, DEALS[deal][c10d.get_rank()])
            found.append(dist.gather(state.params))
        return apart(found[1], found[0]), apart(found[0], whole_params())

    for off, moved in run_local(on_rank, 2):
        assert off < 1e-10  # Adam divides by roots of squares, which magnifies roundings
        assert moved > 1e-3
