"""What the tests of EAGLE-3 and P-EAGLE share: batches, a target, and a layer for one query."""

import math

import torch
from block_cases import naive_rms_norm, naive_rope
from dspark_cases import TARGET as WHOLE_TARGET
from dspark_cases import VOCAB, WIDTH, normal

from numden.pure import random

DRAFT_IDS = torch.tensor([0, 1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 16])
TARGET = WHOLE_TARGET | {"draft_ids": DRAFT_IDS}
SHAPE = dict(
    vocab_size=VOCAB,
    draft_vocab_size=len(DRAFT_IDS),
    hidden_size=WIDTH,
    intermediate_size=13,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_target_layers=2,
    chunk_tokens=16,
)


def make_batch(prepare, config, num_rows=3, size=9, seed=4, supervised=0.8):
    keys = random.split(random.key(seed), num_rows)
    batch = {
        "tokens": random.choice(random.fold_in(keys, 0), VOCAB, (size,)),
        "loss_mask": random.bernoulli(random.fold_in(keys, 1), (size,), p=supervised),
        "key": random.fold_in(keys, 2),
        "captured": normal(seed, num_rows, size, 2 * WIDTH),
        "final": normal(seed + 1, num_rows, size, WIDTH),
    }
    return prepare(batch, config)


def naive_layer(layer, inputs, residual, positions, config):
    """The last position of a layer, which sees all of ``inputs`` [L, .]."""
    attn, dim = layer["attn"], config.head_dim
    attended = []
    for head in range(config.num_heads):
        own = slice(head * dim, (head + 1) * dim)
        group = head // (config.num_heads // config.num_kv_heads)
        kv = slice(group * dim, (group + 1) * dim)
        q = naive_rope(inputs[-1:] @ attn["q"][own].T, positions[-1:], config.rope_theta)
        k = naive_rope(inputs @ attn["k"][kv].T, positions, config.rope_theta)
        weights = (q @ k.T / math.sqrt(dim)).softmax(-1)
        attended.append(weights @ (inputs @ attn["v"][kv].T))
    hidden = residual + torch.cat(attended, -1)[0] @ attn["o"].T
    normed, mlp = naive_rms_norm(hidden, layer["mlp_norm"]), layer["mlp"]
    gate = mlp["gate"] @ normed
    return hidden + mlp["down"] @ (gate * torch.sigmoid(gate) * (mlp["up"] @ normed))


def naive_join(layer, embedded, hidden):
    normed = (
        naive_rms_norm(embedded, layer["embed_norm"]),
        naive_rms_norm(hidden, layer["attn_norm"]),
    )
    return torch.cat(normed, -1)


def naive_context(params, captured, config):
    if config.context_norm:
        parts = captured.chunk(config.num_target_layers, -1)
        weights = params["context"]["norm"].chunk(config.num_target_layers)
        captured = torch.cat(
            [naive_rms_norm(part, weight) for part, weight in zip(parts, weights, strict=True)], -1
        )
    return captured @ params["context"]["weight"].T


def naive_values(state, params, final):
    """``kl``, acceptance, whether right, and whether taught, of one state and its teacher's row."""
    teacher, log_q = TARGET["head"] @ final, (params["head"] @ state).log_softmax(-1)
    token, known = int(teacher.argmax()), DRAFT_IDS.tolist()
    p, t = teacher[DRAFT_IDS].softmax(-1), teacher.softmax(-1)[DRAFT_IDS]
    kl, acceptance = -(p @ log_q).item(), torch.minimum(t, log_q.exp()).sum().item()
    return kl, acceptance, known[int(log_q.argmax())] == token, token in known
