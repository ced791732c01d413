import pytest
import torch
from block_cases import naive_block
from dspark_cases import MASK_TOKEN, TARGET, make_batch, make_config, make_params, normal

from numden.models import backbone, dspark, markov
from numden.models.anchors import block_tokens
from numden.pure import random, tree

HEADS = ["vanilla", "gated", "rnn"]


@pytest.mark.parametrize("kind", HEADS)
def test_equivalent_markov_scan_loop(kind):
    rank, width = 3, 5
    params = markov.init(
        kind,
        random.key(0),
        vocab_size=9,
        hidden_size=width,
        rank=rank,
        std=0.5,
        dtype=torch.float64,
    )
    if kind != "vanilla":
        params["bias"] = normal(1, len(params["bias"]))
    previous, hidden = normal(2, 2, 4, rank), normal(3, 2, 4, width)
    vectors = markov.scan_slots(params, kind, previous, hidden)
    for block in range(2):
        state = torch.zeros(rank, dtype=torch.float64)
        for slot in range(4):
            e, o = previous[block, slot], hidden[block, slot]
            if kind == "vanilla":
                u = e
            elif kind == "gated":
                u = torch.sigmoid(params["weight"] @ torch.cat([o, e]) + params["bias"]) * e
            else:
                joint = params["weight"] @ torch.cat([state, e, o]) + params["bias"]
                g, c, h = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
                state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                u = torch.tanh(h)
            torch.testing.assert_close(vectors[block, slot], u)


@pytest.mark.parametrize("kind", HEADS)
def test_untrained_markov_head_corrects_nothing(kind):
    config = make_config(markov_head=kind)
    params, batch = dspark.init(config, random.key(0), dtype=torch.float64), make_batch(config)
    slots = dspark.apply(params, batch, config, TARGET)
    plain = dspark.logits(params, slots._replace(markov=None), TARGET)
    assert torch.equal(dspark.logits(params, slots, TARGET), plain)


@pytest.mark.parametrize("sliding", [{}, {"sliding_layers": (1,), "sliding_window": 3}])
def test_equivalent_backbone_block_alone(sliding):
    config = make_config(**sliding)
    params = make_params(config)
    params = tree.map(lambda leaf: leaf + 0.1 * normal(leaf.numel(), *leaf.shape), params)
    batch = make_batch(config)
    ids = block_tokens(
        batch["tokens"],
        batch["anchors"],
        batch["keep"],
        config.block_size,
        mask_token_id=MASK_TOKEN,
    )
    slots = TARGET["embed"][ids]
    hidden = backbone.apply(
        params, batch["captured"], slots, batch["anchors"], batch["keep"], config
    )
    num_compared = 0
    for b, n in batch["keep"].nonzero().tolist():
        anchor = int(batch["anchors"][b, n])
        alone = naive_block(params, batch["captured"][b], slots[b, n], anchor, config)
        # Angles are float32 in the tables and float64 here.
        torch.testing.assert_close(hidden[b, n], alone, rtol=1e-5, atol=1e-5)
        num_compared += 1
    assert num_compared > 5
