import pickle
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as c10d
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from numden.dist import run_local
from numden.models import as_module, as_params, call
from numden.pure import LossTerms, random, tree


def init(num_layers=2, width=4):
    keys = iter(random.split(random.key(0), 2 * num_layers + 2))
    return {
        "embed": random.normal(next(keys), (5, width), dtype=torch.float64),
        "layers": [
            {
                "mlp": {
                    "up": random.normal(next(keys), (3, width), dtype=torch.float64),
                    "down": random.normal(next(keys), (width, 3), dtype=torch.float64),
                },
                "scale": torch.ones(width, dtype=torch.float64),
            }
            for _ in range(num_layers)
        ],
        "order": torch.tensor([4, 3, 2, 1, 0]),
    }


def block(layer, x):
    mlp = layer["mlp"]
    return x + layer["scale"] * (torch.tanh(x @ mlp["up"].T) @ mlp["down"].T)


def apply(params, tokens):
    x = params["embed"][params["order"][tokens]]
    for layer in params["layers"]:
        x = call(block, layer, x)
    return x


def loss_terms(params, tokens):
    return LossTerms(apply(params, tokens).square().sum(), tokens.numel())


def at(params, name):
    for key in name.split("."):
        params = params[int(key)] if isinstance(params, list) else params[key]
    return params


@st.composite
def trees(draw, depth=3):
    keys = st.sampled_from(["a", "b", "q_norm", "layers", "0"])
    tensors = st.sampled_from([torch.ones(2), torch.zeros(0), torch.tensor([1, 2]), torch.ones(())])
    if depth == 0:
        return draw(tensors)
    inner = trees(depth=depth - 1)
    nodes = st.dictionaries(keys, inner, max_size=3)
    lists = st.lists(st.dictionaries(keys, inner, max_size=2), max_size=2)
    weights = st.lists(st.sampled_from([torch.ones(2), torch.zeros(3)]), min_size=1, max_size=2)
    return draw(nodes if depth == 3 else st.one_of(nodes, lists, weights, tensors))


@given(trees())
def test_roundtrip_params_module_params(params):
    back = as_params(as_module(print, params))
    assert tree.structure(back) == tree.structure(params)
    pairs = zip(tree.leaves(back), tree.leaves(params), strict=True)
    assert all(a.dtype == b.dtype and a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert str(back) == str(params)  # keys in their order


def test_names_are_paths():
    module = as_module(apply, init())
    names = [name for name, _ in module.named_parameters()]
    assert sorted(names) == [
        "embed",
        "layers.0.mlp.down",
        "layers.0.mlp.up",
        "layers.0.scale",
        "layers.1.mlp.down",
        "layers.1.mlp.up",
        "layers.1.scale",
    ]
    assert sorted(module.state_dict()) == sorted([*names, "order"])


def test_equivalent_module_pure():
    params, tokens = init(), torch.tensor([[0, 3, 1], [4, 4, 2]])
    module = as_module(loss_terms, params)
    terms = module(tokens)
    terms.num.backward()
    leaves = tree.map(lambda x: x.clone().requires_grad_(x.is_floating_point()), params)
    expected = loss_terms(leaves, tokens)
    expected.num.backward()
    assert torch.equal(terms.num, expected.num)
    for name, param in module.named_parameters():
        assert torch.equal(param.grad, at(leaves, name).grad), name


def test_module_reads_like_its_dict():
    params = init()
    module = as_module(apply, params)
    assert list(module) == list(module.keys()) == list(params)
    assert "embed" in module
    assert "head" not in module
    assert "training" not in module
    assert dict(module)["order"].tolist() == [4, 3, 2, 1, 0]
    assert len(module["layers"][:1]) == 1
    with pytest.raises(KeyError, match="training"):
        module["training"]


def test_call_runs_hooks_of_a_part_alone():
    module, seen = as_module(apply, init()), []
    for index, layer in enumerate(module.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: seen.append(index))
    module(torch.tensor([[1]]))
    assert seen == [0, 1]
    x = torch.ones(1, 1, 4, dtype=torch.float64)
    assert torch.equal(call(block, module.layers[0], x), block(init()["layers"][0], x))


def test_one_loss_fn_serves_params_and_module():
    loss_fn, tokens = partial(call, loss_terms), torch.tensor([[2, 0]])
    on_params = loss_fn(init(), tokens)
    assert torch.equal(loss_fn(as_module(apply, init()), tokens).num, on_params.num)


def test_functional_call_reads_the_given_params():
    module, tokens = as_module(apply, init()), torch.tensor([[2, 0]])
    doubled = {name: 2 * value.detach() for name, value in module.named_parameters()}
    expected = apply({**tree.map(lambda x: 2 * x, init()), "order": init()["order"]}, tokens)
    assert torch.equal(torch.func.functional_call(module, doubled, (tokens,)), expected)


@pytest.mark.parametrize("copy", [deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copy_is_independent(copy):
    module, tokens = as_module(apply, init()), torch.tensor([[2, 0]])
    other, expected = copy(module), module(tokens)
    with torch.no_grad():
        module.embed.zero_()
    assert torch.equal(other(tokens), expected)


@pytest.mark.parametrize("key", ["type", "a.b", "", "forward"])
def test_refuses_keys_that_cannot_be_names(key):
    with pytest.raises(ValueError, match=rf"as_module: a key of params must not.*got '{key}'"):
        as_module(apply, {key: torch.ones(1)})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([torch.ones(1)], "params must be a dict, got list"),
        ({0: torch.ones(1)}, "keys of params must be strings, got 0"),
        ({"eps": 1e-6}, "nested dicts and lists of tensors, got eps=float"),
        ({"a": [{"b": None}]}, "nested dicts and lists of tensors, got b=NoneType"),
        ({"a": [torch.ones(1), {}]}, "nested dicts and lists of tensors, got a.0=Tensor"),
    ],
)
def test_refuses_other_nodes(params, message):
    with pytest.raises(TypeError, match=f"as_module: .*{message}"):
        as_module(apply, params)


def test_part_without_function_says_how_to_call_it():
    with pytest.raises(TypeError, match=r"no function of its own. Use call\(fun, part"):
        as_module(apply, init()).layers[0](torch.ones(4))


def fsdp_window(windows):
    """Two micro-steps on this rank, blocks sharded, gradients summed over ranks."""
    module = as_module(apply, init())
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    for tokens in windows[c10d.get_rank()]:
        assert isinstance(module["layers"][0]["mlp"]["up"], DTensor)
        call(loss_terms, module, tokens).num.backward()
    return {name: param.grad.full_tensor() for name, param in module.named_parameters()}


def test_blocks_gather_under_fully_shard():
    windows = random.choice(random.key(1), 5, (2, 2, 3, 4))
    module = as_module(loss_terms, init())
    module(windows.flatten(0, 2)).num.backward()
    for grads in run_local(fsdp_window, 2, windows):
        for name, param in module.named_parameters():
            # Sums of about 100 addends in another order.
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-12)
