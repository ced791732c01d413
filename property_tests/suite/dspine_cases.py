"""A small DSpine drafter, its params and its batches, for the tests of it and of its parts."""

import torch

from numden.models import dspine
from numden.models.transfer_space import transfer_space
from numden.pure import random

VOCAB, WIDTH, RANK, MASK_TOKEN = 32, 16, 8, 31
SHAPE = dict(
    vocab_size=VOCAB,
    mask_token_id=MASK_TOKEN,
    hidden_size=WIDTH,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_target_layers=2,
    num_layers=3,
    block_size=4,
    num_anchors=4,
    chunk_blocks=3,
    transfer_rank=RANK,
    message_size=4,
    top_k=3,
    replacement_layers=2,
)


def make_config(**changes):
    return dspine.Config(**(SHAPE | changes))


def normal(seed, *shape):
    return random.normal(random.key(seed), shape, dtype=torch.float64)


SPACE = transfer_space(normal(3, VOCAB, WIDTH), RANK)
TARGET = {"embed": normal(2, VOCAB, WIDTH), "head": normal(3, VOCAB, WIDTH), "codes": SPACE.codes}


def make_params(config, seed=0, written=0.3):
    """Params of which all parts matter; with ``written`` 0 those of the start."""
    params = dspine.init(config, random.key(seed), SPACE.basis, std=0.4, dtype=torch.float64)
    shared = params["injection"]
    for i, layer in enumerate(shared["layers"]):
        layer["write"] = written * normal(10 + i, *layer["write"].shape)
    for i, name in enumerate(("predecessor", "bias")):
        shared[name] = written * normal(20 + i, *shared[name].shape)
    return params


def make_texts(num_rows=2, size=12, seed=4, supervised=0.8):
    keys = random.split(random.key(seed), num_rows)
    return {
        "tokens": random.choice(random.fold_in(keys, 0), MASK_TOKEN, (size,)),
        "loss_mask": random.bernoulli(random.fold_in(keys, 1), (size,), p=supervised),
        "key": random.fold_in(keys, 2),
        "captured": normal(seed, num_rows, size, 2 * WIDTH),
        "final": normal(seed + 1, num_rows, size, WIDTH),
    }


def make_batch(config, replacement=0.5, **texts):
    return dspine.prepare(make_texts(**texts), config, replacement=replacement)


def rows(batch, config, which, replacement=0.5):
    """The same texts as another batch, whose blocks are drawn anew."""
    drawn = ("anchors", "keep", "replaced")
    kept = {name: value[which] for name, value in batch.items() if name not in drawn}
    return dspine.prepare(kept, config, replacement=replacement)


def place(batch, anchors):
    """The batch with one block a row, none replaced."""
    at = torch.tensor(anchors)[:, None]
    keep = torch.ones_like(at, dtype=torch.bool)
    return batch | {"anchors": at, "keep": keep, "replaced": ~keep}
