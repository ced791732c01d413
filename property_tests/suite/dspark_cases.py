"""A small drafter, its params and its batches, for the tests of it and of its parts."""

import torch

from numden.models import dspark
from numden.pure import random

VOCAB, WIDTH, MASK_TOKEN = 17, 8, 16
SHAPE = dict(
    vocab_size=VOCAB,
    mask_token_id=MASK_TOKEN,
    hidden_size=WIDTH,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_target_layers=2,
    num_layers=2,
    block_size=4,
    num_anchors=5,
    markov_rank=3,
    chunk_blocks=8,
)


def make_config(**changes):
    return dspark.Config(**(SHAPE | changes))


def normal(seed, *shape):
    return random.normal(random.key(seed), shape, dtype=torch.float64)


def make_params(config, seed=0):
    params = dspark.init(config, random.key(seed), std=0.4, dtype=torch.float64)
    if config.markov_rank:
        params["markov"]["out"] = normal(1, VOCAB, config.markov_rank)
    return params


TARGET = {"embed": normal(2, VOCAB, WIDTH), "head": normal(3, VOCAB, WIDTH)}


def make_batch(config, num_rows=3, size=11, seed=4, supervised=0.8):
    keys = random.split(random.key(seed), num_rows)
    batch = {
        "tokens": random.choice(random.fold_in(keys, 0), MASK_TOKEN, (size,)),
        "loss_mask": random.bernoulli(random.fold_in(keys, 1), (size,), p=supervised),
        "key": random.fold_in(keys, 2),
        "captured": normal(seed, num_rows, size, 2 * WIDTH),
        "final": normal(seed + 1, num_rows, size, WIDTH),
    }
    return dspark.prepare(batch, config)


def rows(batch, config, which):
    """The same texts as another batch, whose anchors are drawn anew."""
    kept = {k: v[which] for k, v in batch.items() if k not in ("anchors", "keep")}
    return dspark.prepare(kept, config)
