"""A real model over ranks in each wrapping, and in low precision."""

from functools import partial

import pytest
import torch
import torch.distributed as c10d
from dist_cases import apart, plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from numden import dist
from numden.dist import run_local
from numden.models import as_module, call, decoder
from numden.pure import random, tree

CONFIG = decoder.Config(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


def decoder_params(dtype=torch.float64):
    return decoder.init(CONFIG, random.key(0), std=0.3, dtype=dtype)


def texts():
    """Ragged micro-batches of tokens, one of them without a supervised one."""
    generator = torch.Generator().manual_seed(3)
    window = []
    for num_rows, length in ((2, 5), (1, 9), (3, 4), (1, 2), (2, 7)):
        tokens = torch.randint(11, (num_rows, length), generator=generator)
        mask = torch.rand(num_rows, length, generator=generator) > 0.3
        window.append({"tokens": tokens, "loss_mask": mask})
    window[1]["loss_mask"][:] = False
    return window


decoder_loss = partial(call, partial(decoder.loss_terms, config=CONFIG))


def fully_sharded_decoder(params, **options):
    module = as_module(decoder.apply, params)
    for layer in module.layers:
        fully_shard(layer, **options)
    return fully_shard(module, **options)


def by_name(params, grads):
    names = [name for name, _ in as_module(decoder.apply, params).named_parameters()]
    module = as_module(decoder.apply, grads)
    return {name: module.get_parameter(name).detach() for name in names}


def decoder_grads(params):
    """The whole gradient, from the sum of the losses of all texts over the sum of their tokens."""
    leaves = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
    terms = [decoder_loss(leaves, batch) for batch in texts()]
    loss = sum(each.num for each in terms) / sum(each.den for each in terms)
    found, structure = tree.flatten(leaves)
    grads = tree.unflatten(structure, list(torch.autograd.grad(loss, found)))
    return by_name(params, grads)


@pytest.mark.parametrize(
    "ranks",
    [(0, 0, 1, 1, 1), (1, 0, 1, 1, 1), (1, 1, 1, 1, 1)],
    ids=["ragged", "unlearned", "empty"],
)
def test_equivalent_decoder_wrappings_whole_batch(ranks):
    pairs = list(zip(texts(), ranks, strict=True))
    windows = [[text for text, owner in pairs if owner == rank] for rank in (0, 1)]

    def on_rank():
        params, own = decoder_params(), windows[c10d.get_rank()]
        expected = decoder_grads(params)
        grad = dist.window_grad(decoder_loss)
        blocks = fully_sharded_decoder(params)
        found = [apart(plain(grad(blocks, own).grads), expected) for _ in range(2)]
        with torch.no_grad():  # evaluation leaves the root's parameters gathered
            decoder_loss(blocks, texts()[0])
        found.append(apart(plain(grad(blocks, own).grads), expected))
        dist.window_value(decoder_loss)(blocks, own)
        grads = grad(blocks, own).grads
        assert all(isinstance(each, DTensor) for each in grads.values())
        assert all(param.grad is None for param in blocks.parameters())
        found.append(apart(plain(grads), expected))
        ddp = DistributedDataParallel(as_module(decoder.apply, decoder_params()))
        found.append(apart(plain(grad(ddp, own).grads), expected))
        mesh = init_device_mesh("cpu", (2,))
        shards = grad(dist.shard(decoder_params(), mesh), own).grads
        for grads in (grad(decoder_params(), own).grads, dist.gather(shards)):
            found.append(apart(by_name(params, grads), expected))
        return found

    # Attention and norms add some ten times as many numbers as the small net.
    assert max(map(max, run_local(on_rank, 2, timeout=60))) < 1e-12


# --- low precision -------------------------------------------------------------------------------


def summed_by_hand(params, texts):
    """In float64 the sum of what a backward pass of each micro-step gives in the params' dtype."""
    total, den = None, 0
    for batch in texts:
        leaves = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
        terms = decoder_loss(leaves, batch)
        found, structure = tree.flatten(leaves)
        grads = [grad.double() for grad in torch.autograd.grad(terms.num, found)]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        den = den + terms.den
    return by_name(params, tree.unflatten(structure, [grad / den for grad in total]))


@pytest.mark.parametrize("kind", ["tree", "ddp", "shard"])
def test_bfloat16_params_with_float32_accumulation(kind):
    """The addends are those of bfloat16; their sum over micro-steps and ranks is of float32."""
    windows = [texts()[:2], texts()[2:]]

    def on_rank():
        params, own = decoder_params(torch.bfloat16), windows[c10d.get_rank()]
        expected = summed_by_hand(params, texts())
        model = params
        if kind == "ddp":
            model = DistributedDataParallel(as_module(decoder.apply, params))
        if kind == "shard":
            model = dist.shard(params, init_device_mesh("cpu", (2,)))
        found = []
        for dtype in (torch.float32, None):
            grads = dist.window_grad(decoder_loss, accumulate_dtype=dtype)(model, own).grads
            grads = plain(grads) if kind == "ddp" else by_name(params, dist.gather(grads))
            found.append(apart(grads, expected))
        return found

    for wide, narrow in run_local(on_rank, 2, timeout=30):
        # Sums of five addends, and one factor: some roundings of 2^-24.
        assert wide < 1e-6
        # bfloat16 rounds each of them by up to 2^-9: it could not pass for float32.
        assert 1e-4 < narrow < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp_mixed_precision_reduces_in_float32(dtype):
    """Compute in bfloat16, sum in float32; ``dtype`` is that of the shards and their gradients."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    windows = [texts()[:2], texts()[2:]]

    def on_rank():
        narrow = decoder_params(torch.bfloat16)
        expected = summed_by_hand(narrow, texts())
        params = tree.map(lambda leaf: leaf.to(dtype), narrow)
        module = fully_sharded_decoder(params, mp_policy=policy)
        grad = dist.window_grad(decoder_loss)
        found = [grad(module, windows[c10d.get_rank()]) for _ in range(2)]
        assert all(each.dtype == dtype for each in found[0].grads.values())
        return [apart(plain(result.grads), expected) for result in found]

    # float32 sums round by 2^-24 each; a gradient that is stored in bfloat16 by 2^-9.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert max(map(max, run_local(on_rank, 2, timeout=30))) < tolerance
