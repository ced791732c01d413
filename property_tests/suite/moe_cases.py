"""A small mixture-of-experts decoder, batches for it, and ranks that are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from numden.models import moe
from numden.pure import random, tree

SHAPE = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rope_theta": 500.0,
    "norm_eps": 1e-5,
    "num_experts": 4,
    "num_selected": 2,
    "expert_size": 6,
}


def make_config(**changes):
    return moe.Config(**SHAPE | changes)


def make_params(config, seed=0, dtype=torch.float64):
    """All params are draws, norms too, so that none can stand for another."""
    leaves, structure = tree.flatten(moe.shapes(config))
    keys = random.split(random.key(seed), len(leaves))
    draws = [random.normal(key, leaf.shape) / 2 for key, leaf in zip(keys, leaves, strict=True)]
    return tree.map(lambda x: x.to(dtype), tree.unflatten(structure, draws))


def make_batch(*, num_rows=2, size=5, seed=0, padding=True, vocab_size=13):
    generator = torch.Generator().manual_seed(seed)
    shape = num_rows, size
    lengths = torch.randint(1, size + 1, (num_rows, 1), generator=generator)
    lengths = lengths if padding else torch.full_like(lengths, size)
    token_mask = torch.arange(size) < lengths
    return {
        "tokens": torch.randint(vocab_size, shape, generator=generator),
        "loss_mask": (torch.rand(shape, generator=generator) < 0.7) & token_mask,
        "token_mask": token_mask,
    }


def cut(params, index, num_parts):
    """The params of rank ``index``: its part of the experts, and all else."""

    def of_layer(layer):
        if "experts" not in layer:
            return layer
        experts = {name: w.chunk(num_parts)[index] for name, w in layer["experts"].items()}
        return layer | {"experts": experts}

    return params | {"layers": [of_layer(layer) for layer in params["layers"]]}


class ThreadRanks:
    """Ranks that are threads of one autograd graph: ``exchange`` passes references."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.sent: list[Tensor] = [torch.empty(0)] * num_ranks

    def exchange(self, rank: int, parts: Tensor) -> Tensor:
        assert parts.shape[0] == self.num_ranks
        self.sent[rank] = parts
        self.barrier.wait()
        received = torch.stack([sent[rank] for sent in self.sent])
        self.barrier.wait()
        return received

    def run(self, fn):
        """``[fn(rank, exchange) for each rank]``."""
        ranks = range(self.num_ranks)
        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(fn, rank, partial(self.exchange, rank)) for rank in ranks]
        return [future.result() for future in futures]
