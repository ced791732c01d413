"""Decoding of a target model, plain and speculative: the same tokens, in fewer steps.

A speculative round drafts Q tokens behind the last known one, runs the target once on all of them,
and keeps those that the target would have chosen itself, plus the target's next choice. Sampling
keeps them by the rule of ``verification``, and the tokens have the target's distribution.

The target scores a token alone in plain decoding and among others in speculative decoding, and
rounds differently: where its two best logits are closer than that, the two may differ. In float64
that does not happen in practice; float32 and below are compared up to such ties.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pure import random
from . import decoder
from .verification import draw, verify

__all__ = [
    "Decoded",
    "Drafter",
    "SamplingDrafter",
    "Target",
    "cached_decoder",
    "greedy",
    "sample",
    "speculative_greedy",
    "speculative_sample",
    "without_sampling",
]

Drafter = Callable[[Tensor, Tensor], Tensor]
"""``(captured [1, a, C], token [1]) -> tokens [1, Q]``: what may follow the token at position a,
from what the target computed before it."""

SamplingDrafter = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(captured, token, key) -> (tokens [1, Q], probs [1, Q, V])``: a ``Drafter`` that draws each
token from a distribution, and tells which."""


class Target(NamedTuple):
    """A model to decode with, as three pure functions of a state.

    Attributes:
        init: ``() -> state``, that of no tokens.
        step: ``(tokens [1, L], state) -> (logits [1, L, V], captured [1, L, C], state)``; captured
            is what a drafter reads of the model, one row a token.
        rollback: ``(state, length) -> state``, that of the first ``length`` tokens.
    """

    init: Callable[[], Any]
    step: Callable[[Tensor, Any], tuple[Tensor, Tensor, Any]]
    rollback: Callable[[Any, int], Any]


class Decoded(NamedTuple):
    """What decoding gave.

    Attributes:
        tokens: int64 ``[T]``, those behind the prompt.
        accepted: drafted tokens that were kept, one number for each round, from 0 to Q.
    """

    tokens: Tensor
    accepted: list[int]

    @property
    def tau(self) -> float:
        """Tokens for each target step behind the prompt: ``1 + mean(accepted)``; 1 if no rounds.

        Examples:
            >>> Decoded(torch.tensor([5, 6, 7, 8]), accepted=[2, 0]).tau
            2.0
        """
        return 1 + sum(self.accepted) / max(1, len(self.accepted))


def cached_decoder(
    params: Any, config: decoder.Config, *, capacity: int, layers: Sequence[int] = ()
) -> Target:
    """A ``decoder`` with a cache as a ``Target``.

    Args:
        params: of the decoder.
        config: of the decoder.
        capacity: tokens that the cache can hold: prompt, new tokens and a drafted block.
        layers: indices of the layers whose outputs the drafter reads.
    """

    def init() -> decoder.Cache:
        like = params["embed"]
        return decoder.init_cache(config, 1, capacity, dtype=like.dtype, device=like.device)

    def step(tokens: Tensor, cache: decoder.Cache) -> tuple[Tensor, Tensor, decoder.Cache]:
        captured, final, cache = decoder.step(params, tokens, cache, config, layers=layers)
        return decoder.logits(params, final, config), captured, cache

    return Target(init, step, lambda cache, length: cache._replace(length=length))


@torch.no_grad()
def greedy(target: Target, prompt: Tensor, num_tokens: int) -> Tensor:
    """The most probable token, ``num_tokens`` times, one target step each.

    Args:
        target: the model.
        prompt: int64 ``[P]``, P at least 1.
        num_tokens: how many to decode.

    Returns:
        int64 ``[num_tokens]``.

    Examples:
        >>> scores = 2 * torch.eye(10).roll(1, dims=1)  # t is followed by t + 1
        >>> counter = Target(lambda: None, lambda t, _: (scores[t], t[..., None], None), print)
        >>> greedy(counter, torch.tensor([7]), 4)
        tensor([8, 9, 0, 1])
    """
    tokens = prompt[:0]
    state, following = target.init(), prompt
    for _ in range(num_tokens):
        logits, _, state = target.step(following[None], state)
        following = logits[0, -1:].argmax(-1)
        tokens = torch.cat([tokens, following])
    return tokens


@torch.no_grad()
def speculative_greedy(
    target: Target, drafter: Drafter, prompt: Tensor, num_tokens: int
) -> Decoded:
    """``greedy``, with the help of a drafter: the same tokens whatever it drafts.

    The prompt's step gives the first token. Then each round drafts Q tokens and runs the target
    on the last token and the draft at once; the drafter reads only what the target has computed
    before the last token. The last round may go beyond ``num_tokens``, and is cut.

    Args:
        target: the model.
        drafter: see ``Drafter``.
        prompt: int64 ``[P]``, P at least 1.
        num_tokens: how many to decode.

    Returns:
        The tokens, and how many of each draft were kept.

    Examples:
        >>> scores = 2 * torch.eye(10).roll(1, dims=1)  # t is followed by t + 1
        >>> target = Target(lambda: 0, lambda t, _: (scores[t], t[..., None], 0), lambda s, n: s)
        >>> drafter = lambda captured, token: torch.stack([token + 1, token + 3], -1)
        >>> speculative_greedy(target, drafter, torch.tensor([1]), 5)
        Decoded(tokens=tensor([2, 3, 4, 5, 6]), accepted=[1, 1])

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
    """
    logits, captured, state = target.step(prompt[None], target.init())
    tokens, accepted = logits[0, -1:].argmax(-1), []
    while len(tokens) < num_tokens:
        drafted = drafter(captured, tokens[-1:])[0]
        logits, extra, state = target.step(torch.cat([tokens[-1:], drafted])[None], state)
        chosen = logits[0].argmax(-1)
        kept = int((drafted == chosen[:-1]).long().cumprod(0).sum())
        # What was computed for rejected tokens is dropped; the last of the new ones is not run yet.
        captured = torch.cat([captured, extra[:, : kept + 1]], 1)
        state = target.rollback(state, captured.shape[1])
        tokens = torch.cat([tokens, chosen[: kept + 1]])
        accepted.append(kept)
    return Decoded(tokens[:num_tokens], accepted)


def without_sampling(drafter: Drafter, vocab_size: int) -> SamplingDrafter:
    """A drafter that always drafts its likeliest tokens, for ``speculative_sample``.

    Examples:
        >>> drafter = without_sampling(lambda captured, token: token[None] + 1, vocab_size=3)
        >>> drafter(torch.ones(1, 1, 1), torch.tensor([1]), random.key(0))
        (tensor([[2]]), tensor([[[0., 0., 1.]]]))
    """

    def draft(captured: Tensor, token: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        tokens = drafter(captured, token)
        return tokens, torch.nn.functional.one_hot(tokens, vocab_size).to(captured.dtype)

    return draft


def _probs(logits: Tensor, temperature: float) -> Tensor:
    return (logits.double() / temperature).softmax(-1)


@torch.no_grad()
def sample(
    target: Target, prompt: Tensor, num_tokens: int, key: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Tokens drawn one by one from the target's distribution.

    Args:
        target: the model.
        prompt: int64 ``[P]``, P at least 1.
        num_tokens: how many to decode.
        key: int64 ``[2]``.
        temperature: logits are divided by it.

    Returns:
        int64 ``[num_tokens]``.
    """
    tokens = prompt[:0]
    state, following = target.init(), prompt
    for place in range(num_tokens):
        logits, _, state = target.step(following[None], state)
        following = draw(_probs(logits[0, -1:], temperature), random.fold_in(key, place)[None])
        tokens = torch.cat([tokens, following])
    return tokens


@torch.no_grad()
def speculative_sample(
    target: Target,
    drafter: SamplingDrafter,
    prompt: Tensor,
    num_tokens: int,
    key: Tensor,
    *,
    temperature: float = 1.0,
) -> Decoded:
    """Tokens with the distribution of ``sample``, whatever the drafter drafts.

    They are other tokens than those of ``sample`` with the same key. Rounds go as in
    ``speculative_greedy``.

    Args:
        target: the model.
        drafter: see ``SamplingDrafter``; ``without_sampling`` makes one of a ``Drafter``.
        prompt: int64 ``[P]``, P at least 1.
        num_tokens: how many to decode.
        key: int64 ``[2]``.
        temperature: the target's logits are divided by it; the drafter sees to its own.

    Returns:
        The tokens, and how many of each draft were kept.
    """
    logits, captured, state = target.step(prompt[None], target.init())
    first_key, key = random.split(key, 2)
    tokens = draw(_probs(logits[0, -1:], temperature), first_key[None])
    accepted: list[int] = []
    while len(tokens) < num_tokens:
        draft_key, verify_key = random.split(random.fold_in(key, len(accepted)), 2)
        drafted, draft_probs = drafter(captured, tokens[-1:], draft_key)
        logits, extra, state = target.step(torch.cat([tokens[-1:], drafted[0]])[None], state)
        probs = _probs(logits[0], temperature)
        found = verify(drafted[0], draft_probs[0].double(), probs, verify_key)
        kept = int(found.num_accepted)
        captured = torch.cat([captured, extra[:, : kept + 1]], 1)
        state = target.rollback(state, captured.shape[1])
        tokens = torch.cat([tokens, drafted[0, :kept], found.token[None]])
        accepted.append(kept)
    return Decoded(tokens[:num_tokens], accepted)
