import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.models.chunking import map_chunks, recompute
from numden.pure import tree

chunk_sizes = st.integers(0, 9)


def dyadic(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).double() / 8


def polynomial(params, items, constants):
    scores = items["x"] @ params["w"] * constants
    return {"sum": scores.sum(-1), "square": scores.square().sum(-1)}, scores.argmax(-1)


PARAMS, ITEMS = {"w": dyadic(3, 4, seed=0)}, {"x": dyadic(7, 3, seed=1)}
CONSTANTS = dyadic(7, 4, seed=2)


def loss(params, items, chunk_size):
    outputs, _ = map_chunks(polynomial, params, items, CONSTANTS, chunk_size=chunk_size)
    return (outputs["sum"] * torch.arange(7)).sum() + outputs["square"].sum()


@given(chunk_sizes)
def test_equivalent_values_chunked_whole(chunk_size):
    chunked = map_chunks(polynomial, PARAMS, ITEMS, CONSTANTS, chunk_size=chunk_size)
    whole = polynomial(PARAMS, ITEMS, CONSTANTS)
    assert all(map(torch.equal, tree.leaves(chunked), tree.leaves(whole)))


@given(chunk_sizes)
def test_equivalent_gradients_chunked_whole(chunk_size):
    grads = torch.func.grad(loss, argnums=(0, 1))(PARAMS, ITEMS, chunk_size)
    whole = torch.func.grad(loss, argnums=(0, 1))(PARAMS, ITEMS, 0)
    assert all(map(torch.equal, tree.leaves(grads), tree.leaves(whole)))


@given(chunk_sizes)
def test_equivalent_backward_func_grad(chunk_size):
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), (PARAMS, ITEMS))
    loss(leaves[0], leaves[1], chunk_size).backward()
    grads = torch.func.grad(loss, argnums=(0, 1))(PARAMS, ITEMS, chunk_size)
    assert all(
        torch.equal(a.grad, b) for a, b in zip(*map(tree.leaves, (leaves, grads)), strict=True)
    )


# torch's own jvp rules are still scripted.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 8])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.jvp(f, (PARAMS["w"],), (PARAMS["w"] + 1,)),
        lambda f: torch.func.hessian(f)(PARAMS["w"]),
        lambda f: torch.func.jacrev(torch.func.jacrev(f))(PARAMS["w"]),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([PARAMS["w"], -PARAMS["w"]])),
    ],
    ids=["jvp", "hessian", "jacrev of jacrev", "vmap of grad"],
)
def test_equivalent_transforms_chunked_whole(transform, chunk_size):
    chunked = transform(lambda w: loss({"w": w}, ITEMS, chunk_size))
    whole = transform(lambda w: loss({"w": w}, ITEMS, 0))
    # All sums are of small dyadic numbers, exact in whatever order.
    assert all(map(torch.equal, tree.leaves(chunked), tree.leaves(whole)))


def test_constants_and_aux_carry_no_gradient():
    constant = torch.ones(2, requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    outputs, aux = recompute(lambda x, c: (x * c, x * c + 1), x, constant)
    assert not aux.requires_grad
    grads = torch.autograd.grad(outputs.sum(), (x, constant), allow_unused=True)
    assert torch.equal(grads[0], torch.ones(2))
    assert grads[1] is None


def test_inside_of_a_slice_is_dropped_and_made_again():
    calls, saved = [], []

    def fn(params, items, constants):
        calls.append(len(items))
        return (items * params).exp().square(), ()

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    params, items = torch.ones((), requires_grad=True), torch.ones(5, 1000)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs, _ = map_chunks(fn, params, items, torch.zeros(5), chunk_size=2)
    assert calls == [2, 2, 1]
    # The arguments of each slice: its items and constants, and params.
    assert sum(saved) == items.numel() + 5 + 3
    outputs.sum().backward()
    assert sorted(calls) == [1, 1, 2, 2, 2, 2]
