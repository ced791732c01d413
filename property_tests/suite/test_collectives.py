"""Collectives on real ranks against the same maps of the stacked values in one process."""

import warnings
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as c10d
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, jvp, vjp, vmap

from numden.dist import all_gather, all_to_all, ppermute, psum, psum_scatter, run_local
from numden.property_tests import count_collectives

with warnings.catch_warnings():
    # What torch imports at the first jvp of a process takes half a second, in each rank, and uses
    # what torch itself calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import_module("torch._decomp.decompositions_for_jvp")


def dyadic(*shape, seed=0):
    """Eighths: sums and products of a few of them are exact in float64."""
    draws = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    return draws.double() / 8


def message(error, fn):
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


# ---- the oracle: the definitions, on values stacked over ranks --------------------------------


def _everywhere(total, stack):
    return torch.stack([total] * len(stack))


def dense_psum(stack):
    return _everywhere(stack.sum(0), stack)


def dense_all_gather(stack, dim=0):
    return _everywhere(torch.cat(stack.unbind(), dim), stack)


def dense_psum_scatter(stack, dim=0):
    return torch.stack(stack.sum(0).tensor_split(len(stack), dim))


def dense_all_to_all(stack, split_dim=0, concat_dim=0):
    parts = [x.tensor_split(len(stack), split_dim) for x in stack.unbind()]
    ranks = range(len(stack))
    return torch.stack([torch.cat([parts[s][r] for s in ranks], concat_dim) for r in ranks])


def dense_ppermute(stack, perm):
    source = {dest: source for source, dest in perm}
    ranks = range(len(stack))
    return torch.stack([stack[source[r]] if r in source else 0 * stack[r] for r in ranks])


def _ring(num_ranks):
    return [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]


def _permuted(x, perm):
    return ppermute(x, None, perm)


def maps(num_ranks):
    """Names to pairs: the collective, and its definition. Shapes are ``[2 W, 3 W]``."""
    ring, gap = _ring(num_ranks), [(0, num_ranks - 1)]
    swap = {"split_dim": 1, "concat_dim": 0}
    return {
        "psum": (psum, dense_psum),
        "all_gather": (all_gather, dense_all_gather),
        "all_gather last": (partial(all_gather, dim=-1), partial(dense_all_gather, dim=-1)),
        "psum_scatter": (psum_scatter, dense_psum_scatter),
        "psum_scatter last": (partial(psum_scatter, dim=-1), partial(dense_psum_scatter, dim=-1)),
        "all_to_all": (all_to_all, dense_all_to_all),
        "all_to_all swap": (partial(all_to_all, **swap), partial(dense_all_to_all, **swap)),
        "ppermute ring": (partial(_permuted, perm=ring), partial(dense_ppermute, perm=ring)),
        "ppermute gap": (partial(_permuted, perm=gap), partial(dense_ppermute, perm=gap)),
    }


def derivatives(op, weights, x, tangent, batch):
    """Of ``op`` and of a loss of its result, one way and the other; ``batch`` has x in columns.

    The same lines are run on a rank, where the loss is its addend, and on the stack of all ranks,
    where it is the sum of the addends.
    """

    def loss(x):
        return (weights * op(x) ** 3).sum()

    def slope(x):
        return (grad(loss)(x) * tangent).sum()

    columns = partial(vmap, in_dims=-1, out_dims=-1)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * tangent).sum(), leaf)
    return {
        "value": op(x),
        "vjp": vjp(op, x)[1](weights)[0],
        "jvp": jvp(op, (x,), (tangent,))[1],
        "grad": grad(loss)(x),
        "grad of grad": grad(slope)(x),
        "jvp of grad": jvp(grad(loss), (x,), (tangent,))[1],
        "grad of jvp": grad(lambda x: (weights * jvp(op, (x,), (tangent * x**2,))[1]).sum())(x),
        "autograd": first.detach(),
        "autograd twice": second,
        "vmap": columns(op)(batch),
        "vmap of vmap": columns(columns(op))(torch.stack([batch, 2 * batch], -1)),
        "vmap of grad": columns(grad(loss))(batch),
        "vmap of jvp": columns(lambda x: jvp(op, (x,), (tangent,))[1])(batch),
        "grad of vmap": grad(lambda b: vmap(loss, in_dims=-1)(b).sum())(batch),
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equivalent_ranks_dense(num_ranks):
    shape = (num_ranks, 2 * num_ranks, 3 * num_ranks)
    x, tangent, batch = dyadic(*shape), dyadic(*shape, seed=1), dyadic(*shape, 2, seed=2)
    table = maps(num_ranks)
    weights = {name: dyadic(*dense(x).shape, seed=3) for name, (_, dense) in table.items()}

    def on_a_rank():
        r = c10d.get_rank()
        return {
            name: derivatives(op, weights[name][r], x[r], tangent[r], batch[r])
            for name, (op, _) in table.items()
        }

    results = run_local(on_a_rank, num_ranks)
    for name, (_, dense) in table.items():
        expected = derivatives(dense, weights[name], x, tangent, batch)
        for rank, result in enumerate(results):
            for kind, value in result[name].items():
                assert torch.equal(value, expected[kind][rank]), (name, kind, rank)


@settings(max_examples=12)
@given(st.data())
def test_equivalent_ranks_dense_at_any_dim(data):
    num_ranks = data.draw(st.integers(1, 3), "num_ranks")
    one = st.lists(st.integers(1, 2), min_size=1, max_size=1)  # torch.cat drops shape (0,) in vmap
    more = st.lists(st.integers(0, 2), min_size=2, max_size=3)
    sizes = data.draw(one | more, "sizes")
    dims = st.integers(-len(sizes), len(sizes) - 1)
    dim, concat_dim = data.draw(dims, "dim"), data.draw(dims, "concat_dim")
    batch_dim = data.draw(st.integers(-len(sizes) - 1, len(sizes)), "batch_dim")
    sizes[dim] *= num_ranks
    stack = dyadic(num_ranks, 2, *sizes)
    pairs = [
        (partial(all_gather, dim=dim), partial(dense_all_gather, dim=dim)),
        (partial(psum_scatter, dim=dim), partial(dense_psum_scatter, dim=dim)),
        (
            partial(all_to_all, split_dim=dim, concat_dim=concat_dim),
            partial(dense_all_to_all, split_dim=dim, concat_dim=concat_dim),
        ),
    ]

    def on_a_rank():
        x = stack[c10d.get_rank()].movedim(0, batch_dim)
        return [vmap(op, in_dims=batch_dim)(x) for op, _ in pairs]

    results = run_local(on_a_rank, num_ranks)
    for index, (_, dense) in enumerate(pairs):
        expected = vmap(dense, in_dims=1, out_dims=1)(stack)
        assert all(torch.equal(each[index], expected[r]) for r, each in enumerate(results))


# ---- laws ---------------------------------------------------------------------------------------


def test_transpose_inner_products_agree():
    """<A x, y> = <x, Aᵀ y>, with each transpose by its public name."""
    ring = _ring(3)
    back = [(dest, source) for source, dest in ring]
    pairs = [
        (psum, psum, (6, 3), (6, 3)),
        (partial(all_gather, dim=1), partial(psum_scatter, dim=1), (6, 3), (6, 9)),
        (partial(psum_scatter, dim=0), partial(all_gather, dim=0), (6, 3), (2, 3)),
        (
            partial(all_to_all, split_dim=0, concat_dim=1),
            partial(all_to_all, split_dim=1, concat_dim=0),
            (6, 3),
            (2, 9),
        ),
        (partial(_permuted, perm=ring), partial(_permuted, perm=back), (6, 3), (6, 3)),
    ]

    def on_a_rank():
        r = c10d.get_rank()
        xs = [dyadic(*x_shape, seed=r) for _, _, x_shape, _ in pairs]
        ys = [dyadic(*y_shape, seed=10 + r) for _, _, _, y_shape in pairs]
        left = [(op(x) * y).sum() for (op, *_), x, y in zip(pairs, xs, ys, strict=True)]
        right = [(x * back(y)).sum() for (_, back, *_), x, y in zip(pairs, xs, ys, strict=True)]
        inverse = all_to_all(all_to_all(xs[0], concat_dim=1), split_dim=1)
        ring_and_back = ppermute(ppermute(xs[0], None, ring), None, back)
        return left, right, torch.equal(inverse, xs[0]) and torch.equal(ring_and_back, xs[0])

    results = run_local(on_a_rank, 3)
    for index in range(len(pairs)):
        left, right = (sum(result[side][index] for result in results) for side in (0, 1))
        assert left == right != 0
    assert all(inverted for *_, inverted in results)


def test_grad_of_loss_of_all_gather_is_a_shard_of_the_whole_batch_gradient():
    params = {"w": dyadic(4, 6), "b": dyadic(6, seed=1)}
    batch = {"x": dyadic(7, 4, seed=2), "y": dyadic(7, 6, seed=3)}
    rows = [slice(0, 5), slice(5, 7)]  # ragged: five and two
    direction = {"w": dyadic(4, 6, seed=4), "b": dyadic(6, seed=5)}

    def loss(params, batch):
        errors = (batch["x"] @ params["w"] + params["b"]) ** 2 - batch["y"]
        return (errors**2).sum()

    def curvature(loss, params, direction):
        """The product of the Hessian with ``direction``, by double differentiation."""
        return grad(lambda p: sum((grad(loss)(p)[k] * direction[k]).sum() for k in p))(params)

    def step():
        def shards(tree):
            return {k: v.chunk(2, -1)[c10d.get_rank()] for k, v in tree.items()}

        def addend(shards):
            own = {k: v[rows[c10d.get_rank()]] for k, v in batch.items()}
            return loss(all_gather(shards, dim=-1), own)

        with count_collectives() as calls:
            gradient = grad(addend)(shards(params))
        return gradient, curvature(addend, shards(params), shards(direction)), calls.total()

    whole = grad(partial(loss, batch=batch))(params)
    whole_curvature = curvature(partial(loss, batch=batch), params, direction)
    for rank, (gradient, curved, num_collectives) in enumerate(run_local(step, 2)):
        for name in params:
            assert torch.equal(gradient[name], whole[name].chunk(2, -1)[rank])
            assert torch.equal(curved[name], whole_curvature[name].chunk(2, -1)[rank])
        assert num_collectives == 2  # one gather of all leaves, one scatter of their gradients


def test_tree_keeps_structure_and_dtypes_and_travels_by_dtype():
    def on_a_rank():
        one = c10d.get_rank() + 1
        tree = {
            "a": (torch.full((2, 2), one / 8), None),
            "b": [torch.tensor(2**60 + one), torch.tensor([True, one == 1])],
            "c": torch.tensor(float(one)),
            "d": torch.full((2,), one, dtype=torch.bfloat16),
            "e": torch.zeros(0, 3),
        }
        before = [tree["a"][0].clone(), tree["c"].clone()]
        with count_collectives() as calls:
            result = psum(tree)
        assert torch.equal(before[0], tree["a"][0])
        assert torch.equal(before[1], tree["c"])
        return result, calls.total()

    for result, num_collectives in run_local(on_a_rank, 2):
        assert num_collectives == 3  # float32, int64, bfloat16
        assert torch.equal(result["a"][0], torch.full((2, 2), 3 / 8))
        assert result["a"][1] is None
        assert torch.equal(result["b"][0], torch.tensor(2**61 + 3))
        assert torch.equal(result["b"][1], torch.tensor([2, 1]))
        assert torch.equal(result["c"], torch.tensor(3.0))
        assert torch.equal(result["d"], torch.full((2,), 3, dtype=torch.bfloat16))
        assert result["e"].shape == (0, 3)


def test_integers_and_booleans_move_as_they_are_and_pass_through_grad():
    def on_a_rank():
        r = c10d.get_rank()
        flags, ids = torch.tensor([r == 0, True]), torch.tensor([[r, 7]])

        def loss(x):
            return (all_gather(ids) * psum(x)).sum() + ppermute(flags, None, [(0, 1)]).sum()

        moved = all_gather(flags), all_to_all(flags), ppermute(ids, None, [(0, 1), (1, 0)])
        return *moved, grad(loss)(torch.tensor(1.0))

    for r, (gathered, exchanged, permuted, gradient) in enumerate(run_local(on_a_rank, 2)):
        assert torch.equal(gathered, torch.tensor([True, True, False, True]))
        assert torch.equal(exchanged, torch.tensor([[True, False], [True, True]][r]))
        assert torch.equal(permuted, torch.tensor([[1 - r, 7]]))
        assert gradient == 2 * (0 + 7 + 1 + 7)  # on two ranks, the sum of ids


def test_axis_is_a_mesh_a_slice_of_it_or_a_group():
    def on_a_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        rank = torch.tensor([c10d.get_rank()])
        axes = [mesh["dp"], mesh["cp"], mesh["dp", "cp"], mesh, mesh.get_group("cp"), None]
        x = rank.double()
        gradient = grad(lambda x: (c10d.get_rank() * psum(x, mesh["dp"])).sum())(x)
        shifted = ppermute(rank, mesh["cp"], [(0, 1), (1, 0)])
        return [all_gather(rank, axis).tolist() for axis in axes], gradient.item(), shifted.item()

    for r, (gathered, gradient, shifted) in enumerate(run_local(on_a_rank, 4)):
        dp, cp = [r % 2, r % 2 + 2], [r // 2 * 2, r // 2 * 2 + 1]
        assert gathered == [dp, cp, [0, 1, 2, 3], [0, 1, 2, 3], cp, [0, 1, 2, 3]]
        assert gradient == sum(dp)
        assert shifted == r ^ 1


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [psum, all_gather, psum_scatter, all_to_all, partial(ppermute, axis=None, perm=[])],
    ids=["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_ranks_need_a_process_group(call):
    with pytest.raises(ValueError, match=r"ranks need a process group, got none.* run_local"):
        call(torch.ones(2))


def test_misuse_names_function_leaf_and_values():
    def on_a_rank():
        x = torch.ones(2, 3)
        return [
            message(ValueError, lambda: psum_scatter({"w": x}, dim=1)),
            message(ValueError, lambda: all_to_all([x, x.T])),
            message(ValueError, lambda: all_to_all(x, concat_dim=2)),
            message(ValueError, lambda: all_gather({"s": torch.tensor(1.0)})),
            message(TypeError, lambda: psum({"n": 3})),
            message(TypeError, lambda: psum(x, "dp")),  # pyright: ignore[reportArgumentType]
            message(ValueError, lambda: ppermute(x, None, [(0, 1), (0, 0)])),
            message(ValueError, lambda: ppermute(x, None, [(0, 2)])),
        ]

    starts = [
        "psum_scatter: tree['w'] must be divisible by the number of ranks, got size 3 for 2 ranks",
        "all_to_all: tree[1] must be divisible by the number of ranks, got size 3 for 2 ranks",
        "all_to_all: tree must have the dimension to work on, got dim=2 for shape (2, 3)",
        "all_gather: tree['s'] must have the dimension to work on, got dim=0 for shape ()",
        "psum: tree['n'] must be a tensor, got 3",
        "psum: axis must be a ProcessGroup, a DeviceMesh or None, got 'dp'",
        "ppermute: perm must name each of the ranks at most once",
        "ppermute: perm must name each of the ranks at most once",
    ]
    for messages in run_local(on_a_rank, 2):
        assert all(m.startswith(start) for m, start in zip(messages, starts, strict=True)), messages


def test_a_rank_outside_of_axis_is_told_so():
    def on_a_rank():
        group = c10d.new_group([0])
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))["dp"]
        assert psum(torch.tensor(2), mesh) == 2
        if c10d.get_rank() == 0:
            return psum(torch.tensor(5), group).item()
        return message(ValueError, lambda: psum(torch.tensor(5), group))

    inside, outside = run_local(on_a_rank, 2)
    assert inside == 5
    assert "psum: this rank must belong to axis, got rank 1 outside of it" in outside
