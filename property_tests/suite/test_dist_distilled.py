"""EAGLE-3 and P-EAGLE on two ranks, replicated, sharded and in FSDP2: as in one process."""

from functools import partial

import eagle_cases
import pytest
import torch
import torch.distributed as c10d
from dist_cases import apart, plain
from eagle_cases import TARGET
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from numden import dist, pure
from numden.dist import run_local
from numden.models import as_module, call, eagle3, peagle
from numden.pure import random

STEPS = {"num_steps": 3, "chunk_queries": 4}
DRAFTERS = {
    "eagle3": (eagle3, eagle3.Config(**eagle_cases.SHAPE, **STEPS)),
    "eagle3 by lk_lambda": (
        eagle3,
        eagle3.Config(**eagle_cases.SHAPE, **STEPS, loss="lk_lambda", normed_steps=True),
    ),
    "peagle": (peagle, peagle.Config(**eagle_cases.SHAPE, mask_token_id=16, num_layers=2)),
}


def make_window(model, config):
    """Ragged micro-steps, the second with nothing to learn from."""
    prepare = peagle.prepare if model is peagle else lambda batch, config: batch
    sizes = [(2, 9, 0.8), (1, 5, 0.0), (3, 6, 0.9), (1, 12, 0.7)]
    return [
        eagle_cases.make_batch(prepare, config, num_rows, size, seed, supervised)
        for seed, (num_rows, size, supervised) in enumerate(sizes)
    ]


def by_name(apply, params):
    return {name: leaf.detach() for name, leaf in as_module(apply, params).named_parameters()}


@pytest.mark.parametrize(("model", "config"), list(DRAFTERS.values()), ids=list(DRAFTERS))
def test_equivalent_wrappings_single_process(model, config):
    window, objective = make_window(model, config), model.objective(config)
    loss_fn = partial(call, partial(model.loss_terms, config=config, target=TARGET))
    make_params = partial(model.init, config, random.key(0), std=0.4, dtype=torch.float64)
    late = model is eagle3 and config.loss == "lk_lambda"
    options = {"plan": "replay"}
    if not late:
        options = {"den_fn": partial(model.den, config=config, target=TARGET)}
    expected = pure.window_grad(loss_fn, objective, **options)(make_params(), window)
    expected = by_name(model.apply, expected.grads)

    def on_rank():
        own = [window[:3], window[3:]][c10d.get_rank()]
        grad = dist.window_grad(loss_fn, objective, **options)
        module = as_module(model.apply, make_params())
        for layer in module.layers:
            fully_shard(layer)
        sharded = plain(grad(fully_shard(module), own).grads)
        replicated = grad(make_params(), own).grads
        shards = dist.shard(make_params(), init_device_mesh("cpu", (2,)))
        gathered = dist.gather(grad(shards, own).grads)
        found = [sharded, by_name(model.apply, replicated), by_name(model.apply, gathered)]
        return [apart(each, expected) for each in found]

    # Sums of a few hundred float64 addends in another order.
    assert max(map(max, run_local(on_rank, 2, timeout=60))) < 1e-11
