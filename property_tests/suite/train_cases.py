"""A small decoder in float64 and ragged windows, to train on one rank and on several."""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from numden.models import as_module, call, decoder
from numden.models.data import Row, windows
from numden.pure import LossTerms, random, tree

CONFIG = decoder.Config(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


def loss_fn(params, batch):
    """The decoder's terms, and as a metric their nats over rows in place of tokens."""
    terms = call(partial(decoder.loss_terms, config=CONFIG), params, batch)
    return terms, {"nats_per_row": LossTerms(terms.num.detach(), len(batch["tokens"]))}


def params():
    return decoder.init(CONFIG, random.key(0), std=0.3, dtype=torch.float64)


def sharded(params):
    """An FSDP2 module: each block on its own, embedding, norm and head at the root."""
    module = as_module(lambda params: params, tree.map(Tensor.clone, params))
    for layer in module["layers"]:
        fully_shard(layer)
    return fully_shard(module)


def row(i):
    length = 2 + 3 * i % 11
    tokens = random.choice(random.fold_in(random.key(1), i), CONFIG.vocab_size, (length,))
    return Row(tokens, torch.arange(length) > i % 2, i)


ROWS = [row(i) for i in range(20)]


def windows_of(rank=0, num_ranks=1):
    """Three windows of three ragged micro-batches, and one of a single one: rank 1 has none."""
    stream = windows(
        ROWS,
        key=random.key(2),
        num_micro_steps=3,
        num_rows=2,
        num_epochs=1,
        rank=rank,
        num_ranks=num_ranks,
    )
    return [window for window, _ in stream]
