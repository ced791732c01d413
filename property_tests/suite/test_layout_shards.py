"""Functional shards: a pytree cut by `shard`, gathered once per window or in each micro-step.

A step is the gradient of loss ∘ all_gather, and the sum over ranks is its transpose, psum_scatter.
Gathered once, a rank holds whole parameters and whole gradients for the time of a window; gathered
in each micro-step, whole parameters for the time of a micro-step and never a whole gradient.
"""

import pytest
import torch
import torch.distributed as c10d
from dist_cases import CASES, DEALS, WINDOW, mean_loss, on_tree, options, whole_params
from layout_cases import ROUNDING, of_whole_batch, off
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from numden import dist
from numden.dist import run_local
from numden.property_tests.counters import count_collectives
from numden.pure import LossTerms, PlanError, tree

GATHERS = ("window", "micro-step")

TABLE = """\
parameter     number  summed over fsdp by
['*.bias']    2       window_grad, reduce-scatter
['*.weight']  2       window_grad, reduce-scatter"""

HYBRID = """\
parameter     number  summed over dp by        summed over fsdp by
['*.bias']    2       window_grad, all-reduce  window_grad, reduce-scatter
['*.weight']  2       window_grad, all-reduce  window_grad, reduce-scatter"""

BOTH = """\
parameter     number  summed over dp by            summed over fsdp by
['*.bias']    1       window_grad, all-reduce      window_grad, all-reduce
['*.weight']  1       window_grad, all-reduce      window_grad, all-reduce
['*.bias']    1       window_grad, reduce-scatter  window_grad, reduce-scatter
['*.weight']  1       window_grad, reduce-scatter  window_grad, reduce-scatter"""


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("case", CASES)
def test_shards(case, gather):
    """For each objective, with plans that it can have."""
    loss, objective, plans, _ = CASES[case]

    def on_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        params, expected = dist.shard(whole_params(), mesh), of_whole_batch(case)
        window = DEALS["ragged"][c10d.get_rank()]
        numbers = []
        for plan in plans:
            more = options(CASES[case], plan)
            grad = dist.window_grad(on_tree(loss), objective, mesh=mesh, gather=gather, **more)
            numbers += off(grad(params, window), *expected)
        return str(dist.explain_reduction(params, mesh)), numbers

    for table, numbers in run_local(on_rank, 2, timeout=90):
        assert table == TABLE
        assert max(numbers) < ROUNDING


@pytest.mark.parametrize("gather", GATHERS)
def test_shards_over_one_of_two_dimensions(gather):
    windows = [WINDOW[:1], WINDOW[1:4], [], WINDOW[4:]]

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        params = dist.shard(whole_params(), mesh["fsdp"])
        grad = dist.window_grad(on_tree(mean_loss), mesh=mesh, gather=gather)
        result = grad(params, windows[c10d.get_rank()])
        return str(dist.explain_reduction(params, mesh)), off(result, *of_whole_batch())

    for table, numbers in run_local(on_rank, 4):
        assert table == HYBRID
        assert max(numbers) < ROUNDING


@pytest.mark.parametrize("gather", GATHERS)
def test_shards_over_both_of_two_dimensions(gather):
    """A leaf is cut along each where it divides evenly; five rows of three are replicated."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        params = dist.shard(whole_params(), mesh)
        grad = dist.window_grad(on_tree(mean_loss), mesh=mesh, gather=gather)
        window = WINDOW[2 * c10d.get_rank() :][:2]
        sizes = {name: list(p.to_local().shape) for name, p in params.items()}
        table = str(dist.explain_reduction(params, mesh))
        return sizes, table, off(grad(params, window), *of_whole_batch())

    for sizes, table, numbers in run_local(on_rank, 4):
        assert sizes == {"0.bias": [5], "0.weight": [5, 3], "2.bias": [1], "2.weight": [1, 5]}
        assert table == BOTH
        assert max(numbers) < ROUNDING


def test_collectives_of_gathering():
    """Of each leaf once per window, or once forth and once back in each micro-step."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        params, counts = dist.shard(whole_params(), mesh), {}
        for gather in GATHERS:
            grad = dist.window_grad(on_tree(mean_loss), mesh=mesh, gather=gather, equal_steps=True)
            grad(params, WINDOW[:1])
            for window in (WINDOW[:1], WINDOW[:4]):
                with count_collectives() as calls:
                    grad(params, window)
                counts[gather, len(window)] = calls.total()
        return counts

    for counts in run_local(on_rank, 2):
        assert counts["window", 1] == counts["window", 4]
        assert counts["micro-step", 4] - counts["micro-step", 1] == 3 * 2 * len(whole_params())


def test_no_rank_holds_a_whole_gradient():
    """Gathered in each micro-step, what accumulates are shards."""

    def on_rank():
        params = dist.shard(whole_params(), init_device_mesh("cpu", (2,)))
        grad = dist.window_grad(on_tree(mean_loss), gather="micro-step")
        grads = grad(params, WINDOW).grads
        return all(
            isinstance(g, DTensor) and g.to_local().untyped_storage().nbytes() == p_bytes(p)
            for g, p in zip(tree.leaves(grads), tree.leaves(params), strict=True)
        )

    def p_bytes(p):
        return p.to_local().numel() * p.element_size()

    assert all(run_local(on_rank, 2))


def test_second_order_gradients():
    """Hessian-vector products through all_gather equal those of one process."""
    vector = tree.map(torch.sin, whole_params())

    def on_rank():
        group = c10d.group.WORLD
        rank, window = c10d.get_rank(), DEALS["even"][c10d.get_rank()]

        def whole(parts):
            gathered = dist.all_gather(parts, group)
            return {name: rows[: len(vector[name])] for name, rows in gathered.items()}

        def addend(parts):
            params = {
                k: dist.all_gather(part, group)[: len(vector[k])] for k, part in parts.items()
            }
            return sum(on_tree(mean_loss)(params, batch)[0].num for batch in window)

        def cut(whole):
            size = -(-len(whole) // 2)
            padded = torch.cat([whole, whole.new_zeros(2 * size - len(whole), *whole.shape[1:])])
            return padded[rank * size :][:size]

        parts, directions = tree.map(cut, whole_params()), tree.map(cut, vector)
        gradient = torch.func.grad(addend)

        def along(parts):
            grads = gradient(parts)
            return sum((grads[k] * directions[k]).sum() for k in parts)

        return whole(torch.func.grad(along)(parts))

    def loss(params):
        return sum(on_tree(mean_loss)(params, batch)[0].num for batch in WINDOW)

    _, expected = torch.func.jvp(torch.func.grad(loss), (whole_params(),), (vector,))
    for products in run_local(on_rank, 2):
        for name, product in products.items():
            torch.testing.assert_close(product, expected[name], rtol=1e-11, atol=1e-11)


def test_float16_shards():
    """Ranks that add in each micro-step cannot scale sums after the window, each by its own den."""
    windows = [[torch.ones(4, 8).half()], [torch.full((64, 8), 0.5).half()]]

    def loss(params, x):
        return LossTerms((params["w"] * x).float().sum(), x.numel())

    def on_rank():
        rank, params = c10d.get_rank(), {"w": torch.ones(8).half()}
        shards = dist.shard(params, init_device_mesh("cpu", (2,)))
        for plan in ("after", "columns", "auto"):
            grad = dist.window_grad(loss, plan=plan, gather="micro-step")
            with pytest.raises(PlanError, match=r"where a micro-step has collectives, .*float16"):
                grad(shards, windows[rank])
        return [
            dist.window_grad(loss, plan=plan, gather=gather)(shards, windows[rank])
            .grads["w"]
            .full_tensor()
            for plan, gather in (("after", "window"), ("replay", "micro-step"))
        ]

    exact = torch.full((8,), (4 + 32) / (4 * 8 + 64 * 8))
    for grads in run_local(on_rank, 2):
        for grad in grads:
            # Sums are exact; 1/D and a product round by 2^-11 each.
            torch.testing.assert_close(grad.float(), exact, rtol=2**-10, atol=0)


def test_gather_is_one_of_two():
    with pytest.raises(ValueError, match=r"window_grad: gather must be one of .*, got gather='ste"):
        dist.window_grad(mean_loss, gather="step")
