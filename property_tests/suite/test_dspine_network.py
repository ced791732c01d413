import dataclasses
import functools
import math

import pytest
import torch
from block_cases import naive_rms_norm, naive_rope
from dspine_cases import (
    MASK_TOKEN,
    RANK,
    SPACE,
    TARGET,
    VOCAB,
    WIDTH,
    make_batch,
    make_config,
    make_params,
    normal,
    place,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from numden.models import block_drafter, decoder, dspine, dspine_draft, injection
from numden.models.anchors import take_slots
from numden.models.decoding import cached_decoder, greedy, speculative_greedy
from numden.models.dspine_candidates import candidates, refinement, scores
from numden.models.dspine_network import refine
from numden.models.transfer_space import transfer_space
from numden.pure import random, tree

few_examples = settings(max_examples=4)
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


# The transfer space.


@pytest.mark.parametrize("chunk_size", [1, 5, 4096])
def test_codes_are_whitened_directions(chunk_size):
    """By a singular value decomposition, whose left vectors are the whitened rows themselves."""
    head = TARGET["head"]
    codes, basis = transfer_space(head, RANK, chunk_size=chunk_size)
    unit = head / head.norm(dim=-1, keepdim=True)
    left, _, right = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    white = left[:, :RANK]
    close(white.T @ white, torch.eye(RANK, dtype=torch.float64))
    expected = white / white.norm(dim=-1, keepdim=True)
    # Up to the signs and the order of directions, which the products of codes do not see.
    close(codes @ codes.T, expected @ expected.T)
    close(basis.T @ basis, right[:RANK].T @ right[:RANK])
    close(codes.norm(dim=-1), torch.ones(VOCAB, dtype=torch.float64))


def test_codes_of_low_precision_heads_are_wide():
    codes, basis = transfer_space(TARGET["head"].bfloat16(), RANK)
    assert codes.dtype == basis.dtype == torch.float32


@pytest.mark.parametrize("rank", [0, WIDTH + 1])
def test_transfer_space_refuses_ranks(rank):
    with pytest.raises(ValueError, match=rf"rank must be from 1 to min\(H, V - 1\).*{rank=}"):
        transfer_space(TARGET["head"], rank)


def test_transfer_space_refuses_heads_without_variance():
    """What eigh leaves of a direction without variance may be above 0 by rounding."""
    head = TARGET["head"][:, :4] @ normal(5, 4, WIDTH)
    with pytest.raises(ValueError, match=r"vary in rank=8 directions, got [34]\. Take a smaller"):
        transfer_space(head, RANK)
    head[0, 0] = math.nan
    with pytest.raises(ValueError, match="head must be finite"):
        transfer_space(head, RANK)


# The network.


def naive_layer(context, layer, captured, hidden, anchor, config):
    """One layer on one block, head by head; the context is cut before the anchor."""
    dim, attn = config.head_dim, layer["attn"]
    read = naive_rms_norm(captured[:anchor] @ context["weight"].T, context["norm"])
    normed = naive_rms_norm(hidden, layer["attn_norm"])
    source, heads = torch.cat([read, normed]), []
    positions = torch.arange(anchor + len(hidden), dtype=torch.float64)
    hides = positions > positions[anchor:, None]
    for head in range(config.num_heads):
        group = head // (config.num_heads // config.num_kv_heads)
        own, kv = (slice(i * dim, (i + 1) * dim) for i in (head, group))
        q = naive_rms_norm(normed @ attn["q"][own].T, attn["q_norm"])
        k = naive_rms_norm(source @ attn["k"][kv].T, attn["k_norm"])
        dots = naive_rope(q, positions[anchor:]) @ naive_rope(k, positions).T / math.sqrt(dim)
        heads.append(dots.masked_fill(hides, -math.inf).softmax(-1) @ (source @ attn["v"][kv].T))
    hidden = hidden + torch.cat(heads, -1) @ attn["o"].T
    normed, mlp = naive_rms_norm(hidden, layer["mlp_norm"]), layer["mlp"]
    gate = normed @ mlp["gate"].T
    return hidden + (gate * torch.sigmoid(gate) * (normed @ mlp["up"].T)) @ mlp["down"].T


def naive_write(shared, own, hidden, p):
    z = naive_read(own, hidden)
    gate = torch.sigmoid(shared["receiver"] @ z + shared["predecessor"] @ p + shared["bias"])
    change = own["write"] @ (gate * (shared["message"] @ p))
    return hidden + hidden.norm() / math.sqrt(WIDTH) * change


def naive_read(own, hidden):
    read = own["readout"] @ hidden
    return math.sqrt(RANK) * read / read.norm()


def naive_states(params, batch, config, b, n):
    """Hidden states, those before the last injection, and features, of all slots of a block."""
    shared, anchor = params["injection"], int(batch["anchors"][b, n])
    row, last = batch["tokens"][b], batch["tokens"].shape[1] - 1
    codes = [math.sqrt(RANK) * TARGET["codes"][row[min(anchor + i, last)]] for i in range(4)]
    hidden = TARGET["embed"][[int(row[anchor]), *[MASK_TOKEN] * (config.block_size - 1)]]
    features = []
    for i, layer in enumerate(params["layers"]):
        own, captured = shared["layers"][i], batch["captured"][b]
        before = naive_layer(params["context"], layer, captured, hidden, anchor, config)
        told = [before[0]]
        for slot in range(1, config.block_size):
            p = codes[0] if slot == 1 else naive_read(own, before[slot - 1])
            if batch["replaced"][b, n] and i < config.replacement_layers:
                p = codes[slot - 1]
            told.append(naive_write(shared, own, before[slot], p))
        hidden = torch.stack(told)
        features.append(torch.stack([naive_read(own, each) for each in hidden[1:]]))
    return naive_rms_norm(hidden, params["norm"])[1:], before[1:], features


def test_equivalent_network_slot_by_slot():
    config = make_config()
    params, batch = make_params(config), make_batch(config, num_rows=3)
    states = dspine.apply(params, batch, config, TARGET)
    kinds = set()
    for b, n in batch["keep"].nonzero().tolist():
        hidden, before, features = naive_states(params, batch, config, b, n)
        # Angles are float32 in the tables and float64 here.
        near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
        near(states.hidden[b, n], hidden)
        near(states.before[b, n], before)
        for found, feature in zip(states.features, features, strict=True):
            near(found[b, n], feature)
        kinds.add(bool(batch["replaced"][b, n]))
    assert kinds == {True, False}


@pytest.mark.parametrize("window", [None, 4])
def test_equivalent_backbone_before_it_has_learned(window):
    """Without writes it is the causal network of the family, every bit."""
    slides = {} if window is None else {"sliding_layers": (0, 1, 2), "sliding_window": window}
    config = make_config(**slides)
    params, batch = make_params(config, written=0.0), make_batch(config, num_rows=3)
    causal = make_config(sliding_layers=(0, 1, 2), sliding_window=window or 99)
    hidden = block_drafter.hidden_states(params, batch, causal, TARGET)
    assert torch.equal(dspine.apply(params, batch, config, TARGET).hidden, hidden[..., 1:, :])


def test_a_sliding_layer_sees_less():
    config = make_config()
    params, batch = make_params(config), place(make_batch(config, num_rows=3), [1, 2, 3])
    slides = dataclasses.replace(config, sliding_layers=(1,), sliding_window=6)
    full, less = (dspine.apply(params, batch, each, TARGET).hidden for each in (config, slides))
    # Slot 3 of the block at 3 is the first that has position 0 beyond its window of six.
    assert torch.equal(full[:2], less[:2])
    assert torch.equal(full[2, 0, :2], less[2, 0, :2])
    assert not torch.equal(full[2, 0, 2], less[2, 0, 2])


def test_equivalent_replaced_block_refined():
    """Refinement is the last injection with the true token: that of slot 1, and of replaced."""
    config = make_config(replacement_layers=3)
    params, batch = make_params(config), make_batch(config, num_rows=4)
    states = dspine.apply(params, batch, config, TARGET)
    tokens = take_slots(batch["tokens"], batch["anchors"], config.num_drafted)
    previous = injection.token_features(TARGET["codes"], tokens, torch.float64)
    refined = refine(params, states.before, previous, config)
    close(refined[..., 0, :], states.hidden[..., 0, :])
    replaced = batch["replaced"]
    assert replaced.any()
    close(refined[replaced], states.hidden[replaced])
    others = batch["keep"] & ~replaced
    assert (refined - states.hidden)[others][..., 1:, :].abs().amin(-1).max() > 1e-3


@few_examples
@given(st.integers(0, 99), st.integers(1, 3))
def test_slots_know_only_what_is_before_them(seed, changed):
    """A token behind the anchor reaches the slots after it in a replaced block, and no others."""
    config = make_config()
    params = make_params(config)
    batch = place(make_batch(config, seed=seed), [2, 5])
    batch["replaced"] = torch.tensor([[False], [True]])
    other = batch["tokens"].clone()
    for row, anchor in enumerate((2, 5)):
        other[row, anchor + changed :] = (other[row, anchor + changed :] + 1) % MASK_TOKEN
    before, after = (
        dspine.apply(params, batch | {"tokens": tokens}, config, TARGET)
        for tokens in (batch["tokens"], other)
    )
    assert torch.equal(before.hidden[0], after.hidden[0])
    assert torch.equal(before.hidden[1, 0, :changed], after.hidden[1, 0, :changed])
    # Slot i is told token i - 1: the last slot alone has nobody that its token is told.
    assert torch.equal(before.hidden, after.hidden) == (changed == config.num_drafted)


@pytest.mark.parametrize("num_layers", [0, 1, 2, 3])
def test_replacement_reaches_the_first_layers_alone(num_layers):
    config = make_config(replacement_layers=num_layers)
    params, batch = make_params(config), make_batch(config, num_rows=3)
    replaced = batch["replaced"]
    without = {name: value for name, value in batch.items() if name != "replaced"}
    plain, told = (dspine.apply(params, each, config, TARGET) for each in (without, batch))
    assert torch.equal(plain.hidden[~replaced], told.hidden[~replaced])
    assert torch.equal(plain.features[0][replaced], told.features[0][replaced]) == (num_layers == 0)
    one = dataclasses.replace(config, replacement_layers=1)
    only_first = dspine.apply(params, batch, one, TARGET)
    assert torch.equal(only_first.features[1], told.features[1]) == (num_layers == 1)


def test_gradients_are_finite_at_zero():
    config = make_config()
    params = tree.map(lambda leaf: leaf.requires_grad_(), make_params(config))
    before = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
    refine(params, before, normal(0, 2, RANK), config).sum().backward()
    assert before.grad is not None
    assert before.grad.isfinite().all()


def test_codes_are_scaled_before_they_are_rounded():
    codes = torch.tensor([[0.6004, 0.7997]])
    feature = injection.token_features(codes, torch.tensor([0]), torch.bfloat16)
    assert torch.equal(feature[0], (math.sqrt(2) * codes[0]).bfloat16())
    assert not torch.equal(feature[0], math.sqrt(2) * codes[0].bfloat16())


def test_basis_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"basis must be \[r, H\] = \[8, 16\], got \[16, 8\]"):
        dspine.init(make_config(), random.key(0), SPACE.basis.T)


# Refinement.


def test_label_that_is_no_candidate_counts_zero():
    """And so does a teacher that gives the candidates no mass; all is finite."""
    teacher = torch.full((5,), -math.inf)
    teacher[4] = 0.0
    logits, chosen = torch.zeros(2, requires_grad=True), torch.tensor([1, 0])
    found = refinement(logits, chosen, torch.tensor(4), teacher, threshold=1e-4)
    assert (found.ce, found.l1, bool(found.covered)) == (0, 0, False)
    (found.ce + found.l1).backward()
    assert torch.equal(logits.grad, torch.zeros(2))


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.3])
def test_refinement_by_hand(threshold):
    teacher, label = torch.tensor([0.15, 0.05, 0.3, 0.5]).log(), torch.tensor(1)
    logits, chosen = torch.tensor([0.75, 0.25]).log(), torch.tensor([0, 1])
    found = refinement(logits, chosen, label, teacher, threshold)
    assert found.ce.item() == pytest.approx(math.log(4))
    # The target has 3/4 and 1/4 of its mass of 0.2 on the two: no distance.
    assert found.l1.item() == pytest.approx(0, abs=1e-6)
    assert (bool(found.covered), bool(found.correct)) == (True, False)
    tilted = refinement(logits.flip(-1), chosen, label, teacher, threshold)
    assert tilted.l1.item() == pytest.approx(1.0 if threshold < 0.2 else 0.0, abs=1e-6)
    assert bool(tilted.correct)


# Drafting.


@few_examples
@given(st.integers(0, 99), st.integers(1, 6))
def test_equivalent_draft_transition_table(seed, length):
    """All pairs of candidates of neighbouring slots scored at once, then the best path followed."""
    config, num_rows = make_config(), 5
    params = make_params(config, written=1.0)
    # Blocks in longer rows, whose ends they do not see.
    batch = place(make_batch(config, num_rows=num_rows, seed=seed), [length] * num_rows)
    states = dspine.apply(params, batch, config, TARGET)
    tokens = batch["tokens"][:, length]
    captured = batch["captured"][:, :length]
    drafted = dspine_draft.draft(params, captured, tokens, config, TARGET)
    assert drafted.confidence is None
    for row, token in enumerate(tokens):
        chosen = candidates(states.hidden[row, 0] @ TARGET["head"].T, config.top_k)
        path, place_of = [], 0
        for slot in range(config.num_drafted):
            known = token.expand(config.top_k) if slot == 0 else chosen[slot - 1]
            previous = injection.token_features(TARGET["codes"], known, torch.float64)
            before = states.before[row, 0, slot].expand(config.top_k, -1)
            refined = refine(params, before, previous, config)
            table = refined @ TARGET["head"][chosen[slot]].T
            close(scores(refined, chosen[slot].expand(config.top_k, -1), TARGET["head"]), table)
            place_of = int(table[place_of].argmax())
            path.append(int(chosen[slot, place_of]))
        assert drafted.tokens[row].tolist() == path


def test_equivalent_speculative_greedy_with_it():
    shape = decoder.Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    model = decoder.init(shape, random.key(0), std=0.4, dtype=torch.float64)
    target = cached_decoder(model, shape, capacity=40, layers=(0, 1))
    codes, basis = transfer_space(model["head"], RANK)
    config = make_config()
    params = dspine.init(config, random.key(1), basis, std=0.4, dtype=torch.float64)
    borrowed = {"embed": model["embed"], "head": model["head"], "codes": codes}
    drafter = lambda captured, token: (
        dspine_draft.draft(params, captured, token, config, borrowed).tokens
    )
    prompt = torch.tensor([3, 1, 4])
    decoded = speculative_greedy(target, drafter, prompt, 24)
    assert torch.equal(decoded.tokens, greedy(target, prompt, 24))
