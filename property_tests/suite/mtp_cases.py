"""A small multi-token-prediction head, its params and its batches, for the tests of it."""

import torch

from numden.models import mtp
from numden.pure import random, tree

VOCAB, WIDTH = 13, 8
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_steps=3,
    chunk_size=7,
)


def make_config(**changes):
    return mtp.Config(**(SHAPE | changes))


def normal(seed, *shape):
    return random.normal(random.key(seed), shape, dtype=torch.float64)


TARGET = {"embed": normal(2, VOCAB, WIDTH), "head": normal(3, VOCAB, WIDTH)}


def make_params(config, seed=0):
    params = mtp.init(config, random.key(seed), std=0.4, dtype=torch.float64)
    # Norms of weight zero would hide where a weight is forgotten.
    return tree.map(lambda leaf: leaf if leaf.any() else 0.3 * normal(1, *leaf.shape), params)


def make_batch(num_rows=3, size=9, seed=4, supervised=0.7, num_samples=None):
    keys = random.split(random.key(seed), num_rows)
    batch = {
        "tokens": random.choice(random.fold_in(keys, 0), VOCAB, (size,)),
        "loss_mask": random.bernoulli(random.fold_in(keys, 1), (size,), p=supervised),
        "final": normal(seed + 1, num_rows, size, WIDTH),
    }
    if num_samples:
        drawn = random.choice(random.fold_in(keys, 2), num_samples, (size,))
        batch["sample_ids"] = drawn.sort(-1).values
    return batch


def take(batch, which):
    return {name: value[which] for name, value in batch.items()}
