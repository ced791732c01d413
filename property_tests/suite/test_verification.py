"""Speculative sampling: whatever is drafted, the tokens have the distribution of the target."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.models.decoding import Target, sample, speculative_sample, without_sampling
from numden.models.verification import acceptance, acceptance_rate, draw, residual, verify
from numden.pure import random

VOCAB, SIZE = 3, 2
KEYS = random.split(random.key(7), 40_000)

# For n draws and k cells, sum (observed - n p)^2 / (n p) is about chi-square with k - 1 degrees of
# freedom: with 8 it exceeds 60 with probability 5e-10. The keys are fixed, so that this is the
# chance that a right implementation would have failed, and then always.
BOUND = 60.0


def distributions(*shape, seed):
    """Each a multiple of 1/16, some tokens without a chance."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, 17, (*shape, VOCAB - 1), generator=generator).sort(-1).values
    ends = torch.cat([cuts, torch.full_like(cuts[..., :1], 16)], -1)
    return torch.diff(ends, dim=-1, prepend=torch.zeros_like(ends[..., :1])).double() / 16


@given(st.integers(0, 10**6))
def test_rule_gives_the_target_exactly(seed):
    """``q · a + (1 - Σ q a) r = p`` for each pair of distributions, also equal ones."""
    target, draft = distributions(2, seed=seed)
    kept = draft * acceptance(target, draft)
    chance = acceptance_rate(target, draft)
    torch.testing.assert_close(kept.sum(), chance, rtol=0, atol=1e-15)  # one rounded division
    result = kept + (1 - chance) * residual(target, draft)
    torch.testing.assert_close(result, target, rtol=0, atol=1e-15)


@given(st.integers(0, 10**6))
def test_rate_is_one_minus_half_the_distance(seed):
    target, draft = distributions(2, seed=seed)
    assert acceptance_rate(target, draft) == 1 - (target - draft).abs().sum() / 2


def conditionals(seed):
    """Distributions of the next token behind each text of up to ``SIZE`` tokens."""
    texts = [t for n in range(SIZE + 1) for t in itertools.product(range(VOCAB), repeat=n)]
    return dict(zip(texts, distributions(len(texts), seed=seed), strict=True))


def along(tables, drafted):
    """The distributions before each token of a draft, and behind it, ``[..., Q + 1, V]``."""
    rows = [tuple(text[:n]) for text in drafted.tolist() for n in range(SIZE + 1)]
    return torch.stack([tables[row] for row in rows]).unflatten(0, (-1, SIZE + 1))


def test_all_drafts_of_a_toy_give_the_target_exactly():
    """Each draft with its probability, each outcome of the rule with its own: p(x) p(y | x)."""
    for seed in range(20):
        target, draft = conditionals(seed), conditionals(seed + 100)
        found = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        for x, y in itertools.product(range(VOCAB), repeat=2):
            chance = draft[()][x] * draft[x,][y]
            first = acceptance(target[()], draft[()])[x]
            second = acceptance(target[x,], draft[x,])[y]
            found[x, y] += chance * first * second
            found[x] += chance * first * (1 - second) * residual(target[x,], draft[x,])
            # A first token that was rejected is followed by one that the target draws alone.
            for other, part in enumerate(residual(target[()], draft[()])):
                found[other] += chance * (1 - first) * part * target[other,]
        expected = torch.stack([target[()][x] * target[x,] for x in range(VOCAB)])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def chi_square(counts, probs):
    expected = counts.sum() * probs
    assert (counts[expected == 0] == 0).all()
    at = expected > 0
    return float(((counts - expected)[at].square() / expected[at]).sum())


def test_verify_draws_from_the_target():
    """Pairs of tokens of many keys, by draft, rule and, where one is rejected, the target."""
    target, draft = conditionals(1), conditionals(2)
    draft_keys, verify_keys, next_keys = random.split(KEYS, 3).unbind(-2)
    first_key, second_key = random.split(draft_keys, 2).unbind(-2)
    first = draw(draft[()].expand(len(KEYS), -1), first_key)
    second = draw(torch.stack([draft[x,] for x in range(VOCAB)])[first], second_key)
    drafted = torch.stack([first, second], -1)
    found = verify(drafted, along(draft, drafted)[:, :-1], along(target, drafted), verify_keys)
    whole = torch.stack([first, torch.where(found.num_accepted == 1, found.token, second)], -1)
    rejected = found.num_accepted == 0
    followed = draw(torch.stack([target[x,] for x in range(VOCAB)])[found.token], next_keys)
    whole = torch.where(rejected[:, None], torch.stack([found.token, followed], -1), whole)
    counts = torch.bincount(whole @ torch.tensor([VOCAB, 1]), minlength=VOCAB**2)
    probs = torch.stack([target[()][x] * target[x,] for x in range(VOCAB)]).flatten()
    assert chi_square(counts.double(), probs) < BOUND


def test_draw_never_takes_what_has_no_chance():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    drawn = draw(probs.expand(len(KEYS), -1), KEYS)
    assert set(drawn.tolist()) == {1, 3}


def markov(scores):
    """A target whose next token depends on the last one; a drafter reads the tokens."""
    return Target(
        lambda: 0,
        lambda tokens, n: (scores[tokens], tokens[..., None].double(), n + tokens.shape[1]),
        lambda _, n: n,
    )


def frequencies(decode):
    """How often each two tokens come, of some keys."""
    texts = torch.stack([decode(key) for key in KEYS[:500]])
    return torch.bincount(texts @ torch.tensor([VOCAB, 1]), minlength=VOCAB**2).double()


@pytest.mark.slow
def test_speculative_sampling_has_the_distribution_of_sampling():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator)
    drafts = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator).softmax(-1)
    probs, prompt = (scores / 0.7).softmax(-1), torch.tensor([0])
    expected = probs[0][:, None] * probs

    def drafter(captured, token, key):
        tokens, rows = [token], []
        for each in random.split(key, SIZE):
            rows.append(drafts[tokens[-1]])
            tokens.append(draw(rows[-1], each[None]))
        return torch.stack(tokens[1:], -1), torch.stack(rows, 1)

    likeliest = without_sampling(lambda _, token: token[None].expand(1, SIZE), VOCAB)
    for each in (drafter, likeliest):
        found = frequencies(
            lambda key, each=each: (
                speculative_sample(markov(scores), each, prompt, 2, key, temperature=0.7).tokens
            )
        )
        assert chi_square(found, expected.flatten()) < BOUND
    found = frequencies(lambda key: sample(markov(scores), prompt, 2, key, temperature=0.7))
    assert chi_square(found, expected.flatten()) < BOUND
