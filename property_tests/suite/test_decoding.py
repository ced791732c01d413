import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.models import decoder, dflash, dflash_draft, domino, domino_draft, dspark, dspark_draft
from numden.models.decoding import Decoded, Target, cached_decoder, greedy, speculative_greedy
from numden.pure import random

VOCAB = 11
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5).map(torch.tensor)
lengths = st.integers(0, 12)


def chain(seed):
    """A target whose logits are drawn anew for each prefix; its state is the prefix itself."""

    def step(tokens, state):
        whole = torch.cat([state, tokens[0]])
        prefixes = itertools.accumulate(whole.tolist(), lambda code, token: 31 * code + token + 1)
        codes = torch.tensor([code % 2**31 for code in prefixes][len(state) :])
        scores = random.uniform(random.fold_in(random.key(seed), codes), (VOCAB,))
        # What a drafter reads of a token here: its position and the token.
        positions = torch.arange(len(state), len(whole))
        return scores[None], torch.stack([positions, tokens[0]], -1)[None], whole

    return Target(lambda: torch.tensor([], dtype=torch.long), step, lambda state, n: state[:n])


@given(st.integers(0, 99), prompts, lengths, st.integers(1, 4), st.data())
def test_equivalent_speculative_greedy_whatever_is_drafted(seed, prompt, length, size, data):
    target = chain(seed)
    expected = greedy(target, prompt, length + size)

    def drafter(captured, token):
        # Right for a drawn number of tokens, then wrong.
        start = captured.shape[1] + 1 - len(prompt)
        right = expected[start : start + size]
        num_right = data.draw(st.integers(0, len(right)))
        drafts = (right + 1) % VOCAB
        drafts[:num_right] = right[:num_right]
        return torch.nn.functional.pad(drafts, (0, size - len(drafts)))[None]

    decoded = speculative_greedy(target, drafter, prompt, length)
    assert torch.equal(decoded.tokens, expected[:length])


@given(prompts, lengths)
def test_drafter_reads_what_is_before_the_last_token(prompt, length):
    target = chain(3)
    text = torch.cat([prompt, greedy(target, prompt, length + 3)])

    def drafter(captured, token):
        anchor = captured.shape[1]
        assert torch.equal(captured[0, :, 0], torch.arange(anchor))
        assert torch.equal(captured[0, :, 1], text[:anchor])
        assert torch.equal(token, text[anchor : anchor + 1])
        return torch.zeros(1, 2, dtype=torch.long)

    speculative_greedy(target, drafter, prompt, length)


@pytest.mark.parametrize(("num_right", "rounds"), [(3, 3), (2, 4), (0, 12)])
def test_tau_counts_tokens_for_each_target_step(num_right, rounds):
    target, prompt = chain(0), torch.tensor([4])
    expected = greedy(target, prompt, 20)
    steps = []

    def drafter(captured, token):
        start = captured.shape[1]
        drafts = expected[start : start + 3].clone()
        drafts[num_right:] += 1
        return drafts[None] % VOCAB

    def step(tokens, state):
        steps.append(tokens.shape[1])
        return target.step(tokens, state)

    decoded = speculative_greedy(target._replace(step=step), drafter, prompt, 13)
    assert torch.equal(decoded.tokens, expected[:13])
    assert decoded.accepted == [num_right] * rounds
    assert decoded.tau == 1 + num_right
    assert steps == [1] + [4] * rounds


def test_nothing_decoded_has_tau_one():
    decoded = speculative_greedy(
        chain(0), lambda captured, token: token[None], torch.tensor([1]), 0
    )
    assert decoded.tokens.shape == (0,)
    assert decoded.tau == Decoded(torch.tensor([3]), []).tau == 1


CONFIG = decoder.Config(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
LAYERS = (0, 2)


def model(seed=0):
    # Weights of this size make the choices of tokens lively.
    return decoder.init(CONFIG, random.key(seed), std=0.7, dtype=torch.float64)


def cacheless(params):
    """The same decoder, run on the whole text each time."""

    def step(tokens, state):
        whole = torch.cat([state, tokens[0]])
        captured, final = decoder.hidden_states(params, whole[None], CONFIG, layers=LAYERS)
        new = slice(len(state), None)
        return decoder.logits(params, final[:, new], CONFIG), captured[:, new], whole

    return Target(lambda: torch.tensor([], dtype=torch.long), step, lambda state, n: state[:n])


def drafter_config(markov_head="vanilla", **changes):
    shape = dict(
        vocab_size=VOCAB,
        mask_token_id=VOCAB - 1,
        hidden_size=8,
        intermediate_size=12,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        num_target_layers=len(LAYERS),
        num_layers=2,
        block_size=4,
        markov_rank=3,
        markov_head=markov_head,
    )
    return dspark.Config(**(shape | changes))


def drafter_params(config):
    params = dspark.init(config, random.key(1), std=0.5, dtype=torch.float64)
    if config.markov_rank:
        params["markov"]["out"] = random.normal(random.key(2), (VOCAB, 3), dtype=torch.float64)
    return params


def test_equivalent_greedy_cached_cacheless():
    params, prompt = model(), torch.tensor([3, 1, 4])
    cached = cached_decoder(params, CONFIG, capacity=40, layers=LAYERS)
    tokens = greedy(cached, prompt, 30)
    assert torch.equal(tokens, greedy(cacheless(params), prompt, 30))
    assert len(set(tokens.tolist())) > 3


@pytest.mark.parametrize("markov_head", ["vanilla", "gated", "rnn"])
def test_equivalent_speculative_greedy_dspark(markov_head):
    target_params, prompt = model(), torch.tensor([3, 1, 4])
    config = drafter_config(markov_head)
    params = drafter_params(config)

    def drafter(captured, token):
        return dspark_draft.draft(params, captured, token, config, target_params).tokens

    cached = cached_decoder(target_params, CONFIG, capacity=64, layers=LAYERS)
    expected = greedy(cached, prompt, 40)
    for target in (cached, cacheless(target_params)):
        decoded = speculative_greedy(target, drafter, prompt, 40)
        assert torch.equal(decoded.tokens, expected)
        assert all(0 <= kept <= 4 for kept in decoded.accepted)


PARALLEL = dict(
    vocab_size=VOCAB,
    mask_token_id=VOCAB - 1,
    hidden_size=8,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_target_layers=len(LAYERS),
    num_layers=2,
    block_size=4,
)
SMALL = {"gru_size": 5, "correction_rank": 3}


@pytest.mark.parametrize(
    ("model_of", "draft", "config"),
    [
        (dflash, dflash_draft.draft, dflash.Config(**PARALLEL)),
        (domino, domino_draft.draft, domino.Config(**PARALLEL, **SMALL)),
        (domino, domino_draft.draft, domino.Config(**PARALLEL, **SMALL, shift_label=True)),
    ],
    ids=["dflash", "domino", "domino, shifted"],
)
def test_equivalent_speculative_greedy_parallel_drafters(model_of, draft, config):
    target_params, prompt = model(), torch.tensor([3, 1, 4])
    params = model_of.init(config, random.key(1), std=0.5, dtype=torch.float64)
    if "correction" in params:
        params["correction"]["out"] = random.normal(random.key(2), (VOCAB, 3), dtype=torch.float64)

    def drafter(captured, token):
        return draft(params, captured, token, config, target_params).tokens

    cached = cached_decoder(target_params, CONFIG, capacity=64, layers=LAYERS)
    expected = greedy(cached, prompt, 40)
    decoded = speculative_greedy(cached, drafter, prompt, 40)
    assert torch.equal(decoded.tokens, expected)
    assert all(0 <= kept <= config.num_drafted for kept in decoded.accepted)


@pytest.mark.parametrize(
    "config",
    [
        drafter_config("vanilla"),
        drafter_config("gated", confidence_with_markov=False),
        drafter_config("rnn", sliding_layers=(1,), sliding_window=3),
        drafter_config(markov_rank=0),
        drafter_config(confidence_alpha=0.0),
    ],
    ids=["vanilla", "gated", "rnn, sliding", "no markov", "no confidence"],
)
def test_draft_is_what_training_would_predict(config):
    """In a text that goes on with the draft, each slot of training predicts the drafted token."""
    target_params, params = model(), drafter_params(config)
    prefix = random.choice(random.key(5), VOCAB, (2, 6))
    captured, _ = decoder.hidden_states(target_params, prefix, CONFIG, layers=LAYERS)
    last = torch.tensor([7, 2])
    drafted = dspark_draft.draft(params, captured, last, config, target_params)
    text = torch.cat([prefix, last[:, None], drafted.tokens], 1)
    later = torch.full((2, text.shape[1] - 6, captured.shape[-1]), 1e3, dtype=torch.float64)
    batch = {
        "tokens": text,
        "captured": torch.cat([captured, later], 1),  # from the anchor on it must not be read
        "anchors": torch.tensor([[6], [6]]),
        "keep": torch.tensor([[True], [True]]),
    }
    slots = dspark.apply(params, batch, config, target_params)
    scores = dspark.logits(params, slots, target_params)
    assert torch.equal(scores[:, 0].argmax(-1), drafted.tokens)
    if config.confidence_alpha:
        torch.testing.assert_close(slots.confidence[:, 0].sigmoid(), drafted.confidence)
    else:
        assert slots.confidence is drafted.confidence is None


def test_draft_chooses_each_token_given_the_one_before():
    """Another last token changes later slots of a drafter that knows it by its Markov head only."""
    config = drafter_config(markov_rank=VOCAB, confidence_alpha=0.0, block_size=3)
    params, target_params = dspark.init(config, random.key(1), dtype=torch.float64), model()
    successor = torch.roll(torch.eye(VOCAB, dtype=torch.float64), 1, dims=1)
    # With a rank of V the head is a table: token t is followed by t + 1, at any price.
    params["markov"] = {"embed": 1e4 * successor, "out": torch.eye(VOCAB, dtype=torch.float64)}
    captured = random.normal(random.key(6), (2, 5, 16), dtype=torch.float64)
    draft = functools.partial(dspark_draft.draft, config=config, target=target_params)
    tokens = draft(params, captured, torch.tensor([3, 9]))
    assert tokens.tokens.tolist() == [[4, 5, 6], [10, 0, 1]]
