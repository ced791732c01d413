"""What the tests of block drafters share: batches, known numbers, and a network without masks."""

import math

import torch
from dspark_cases import MASK_TOKEN, WIDTH, normal
from dspark_cases import SHAPE as DSPARK_SHAPE

from numden.pure import random, tree

SHAPE = {name: size for name, size in DSPARK_SHAPE.items() if name != "markov_rank"}


def make_batch(prepare, config, num_rows=3, size=11, seed=4, supervised=0.8):
    keys = random.split(random.key(seed), num_rows)
    batch = {
        "tokens": random.choice(random.fold_in(keys, 0), MASK_TOKEN, (size,)),
        "loss_mask": random.bernoulli(random.fold_in(keys, 1), (size,), p=supervised),
        "key": random.fold_in(keys, 2),
        "captured": normal(seed, num_rows, size, 2 * WIDTH),
    }
    return prepare(batch, config)


def rows(prepare, batch, config, which):
    """The same texts as another batch, whose anchors are drawn anew."""
    kept = {k: v[which] for k, v in batch.items() if k not in ("anchors", "keep")}
    return prepare(kept, config)


def value_and_grads(loss_terms, objective, params, batch):
    """Terms, metrics, and the gradients of the objective's numerator."""

    def loss(params):
        terms, metrics = loss_terms(params, batch)
        return objective(terms._replace(den=tree.map(torch.ones_like, terms.den))), (terms, metrics)

    grads, (terms, metrics) = torch.func.grad(loss, has_aux=True)(params)
    return {"grads": grads, "terms": terms, "metrics": metrics}


def assert_close(a, b, **tolerance):
    assert tree.structure(a) == tree.structure(b)
    for name, x, y in zip(tree.names(a), tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# Known numbers: logits from a closed form, two rows, three blocks.


def sines(shape, a, b):
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return 2 * torch.sin(a * index + b).reshape(shape)


def known_batch():
    loss_mask = torch.ones(2, 9)
    loss_mask[0, 7] = loss_mask[1, 6] = 0
    return {
        "tokens": torch.tensor([[1, 4, 2, 8, 3, 7, 5, 6, 9], [2, 5, 1, 4, 7, 3, 8, 10, 11]]),
        "loss_mask": loss_mask,
        "anchors": torch.tensor([[0, 3], [1, 4]]),
        "keep": torch.tensor([[True, True], [True, False]]),
        "captured": torch.zeros(2, 9, 1),
    }


# The network of one block.


def naive_rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def naive_rope(x, positions, theta=1e6):
    """x [L, D] by pairs (i, i + D/2), as complex numbers."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-2.0 * torch.arange(half) / x.shape[-1])
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def naive_block(params, captured, slots, anchor, config):
    """One block alone, attending to a context that is cut before its anchor: no mask is needed."""
    dim = config.head_dim
    context = naive_rms_norm(
        captured[:anchor] @ params["context"]["weight"].T, params["context"]["norm"]
    )
    hidden = slots
    slot_positions = anchor + torch.arange(len(slots), dtype=torch.float64)
    positions = torch.cat([torch.arange(anchor, dtype=torch.float64), slot_positions])
    for i, layer in enumerate(params["layers"]):
        attn, normed = layer["attn"], naive_rms_norm(hidden, layer["attn_norm"])
        source = torch.cat([context, normed])
        heads = []
        for head in range(config.num_heads):
            own = slice(head * dim, (head + 1) * dim)
            group = head // (config.num_heads // config.num_kv_heads)
            kv = slice(group * dim, (group + 1) * dim)
            q = naive_rope(
                naive_rms_norm(normed @ attn["q"][own].T, attn["q_norm"]), slot_positions
            )
            k = naive_rope(naive_rms_norm(source @ attn["k"][kv].T, attn["k_norm"]), positions)
            scores = q @ k.T / math.sqrt(dim)
            if i in config.sliding_layers:
                hides = positions <= slot_positions[:, None] - config.sliding_window
                hides[:, anchor:] = False
                scores = scores.masked_fill(
                    hides | (positions > slot_positions[:, None]), -math.inf
                )
            heads.append(scores.softmax(-1) @ (source @ attn["v"][kv].T))
        hidden = hidden + torch.cat(heads, -1) @ attn["o"].T
        normed, mlp = naive_rms_norm(hidden, layer["mlp_norm"]), layer["mlp"]
        gate = normed @ mlp["gate"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * (normed @ mlp["up"].T)) @ mlp["down"].T
    return naive_rms_norm(hidden, params["norm"])
