"""Block drafters on two ranks, replicated, sharded and in FSDP2: the gradient of one process."""

from functools import partial

import block_cases
import dspark_cases
import pytest
import torch
import torch.distributed as c10d
from dist_cases import apart, plain
from dspark_cases import TARGET
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from numden import dist, pure
from numden.dist import run_local
from numden.models import as_module, call, dflash, domino, dspark
from numden.pure import random, tree

SIZES = {"gru_size": 3, "correction_rank": 2}
DRAFTERS = {
    "dspark by D-PARD": (
        dspark,
        dspark_cases.make_config(ce_alpha=0.0, l1_alpha=0.0, dpard_alpha=0.5),
    ),
    "dflash by D-PACE": (dflash, dflash.Config(**block_cases.SHAPE, dpace="full")),
    "domino": (domino, domino.Config(**block_cases.SHAPE, **SIZES)),
}


def make_window(model, config):
    """Ragged micro-steps, the second with nothing to learn from."""
    prepare = partial(model.prepare, step=1, num_steps=4) if model is domino else model.prepare
    window = [
        block_cases.make_batch(prepare, config, num_rows, size, seed, supervised)
        for seed, (num_rows, size, supervised) in enumerate(
            [(2, 9, 0.8), (1, 5, 0.0), (3, 6, 0.9), (1, 12, 0.7)]
        )
    ]
    for seed, batch in enumerate(window):
        batch["final"] = dspark_cases.normal(seed, *batch["tokens"].shape, config.hidden_size)
    return window


def make_params(model, config):
    drawn = model.init(config, random.key(0), std=0.4, dtype=torch.float64)
    return tree.map(lambda leaf: leaf + block_cases.sines(leaf.shape, 0.3, 0.1) / 8, drawn)


def by_name(apply, params):
    return {name: leaf.detach() for name, leaf in as_module(apply, params).named_parameters()}


@pytest.mark.parametrize(("model", "config"), list(DRAFTERS.values()), ids=list(DRAFTERS))
def test_equivalent_wrappings_single_process(model, config):
    window, objective = make_window(model, config), model.objective(config)
    loss_fn = partial(call, partial(model.loss_terms, config=config, target=TARGET))
    options = {"den_fn": partial(model.den, config=config)}
    expected = pure.window_grad(loss_fn, objective, **options)(make_params(model, config), window)
    expected = by_name(model.apply, expected.grads)

    def on_rank():
        own = [window[:3], window[3:]][c10d.get_rank()]
        grad = dist.window_grad(loss_fn, objective, **options)
        module = as_module(model.apply, make_params(model, config))
        for layer in module.layers:
            fully_shard(layer)
        sharded = plain(grad(fully_shard(module), own).grads)
        tree_grads = grad(make_params(model, config), own).grads
        shards = dist.shard(make_params(model, config), init_device_mesh("cpu", (2,)))
        gathered = dist.gather(grad(shards, own).grads)
        found = [sharded, by_name(model.apply, tree_grads), by_name(model.apply, gathered)]
        return [apart(each, expected) for each in found]

    # Sums of a few hundred float64 addends in another order.
    assert max(map(max, run_local(on_rank, 2, timeout=60))) < 1e-11
