"""Draft the tokens behind a position with a DSpark drafter, as speculative decoding needs them."""

from typing import Any

import torch
from torch import Tensor

from . import markov
from .block_drafter import Draft, draft_states
from .dspark import Config, Slots, confidence_logits, logits
from .layers import embed, linear

__all__ = ["Draft", "draft"]


def draft(params: Any, captured: Tensor, token: Tensor, config: Config, target: Any) -> Draft:
    """The Q most probable tokens behind ``token``, each given the one before it.

    The token stands at position a and is the last that is known; the target has run on what is
    before it, and only on that.

    Args:
        params: of the drafter.
        captured: ``[B, a, K * H]``, hidden states of the target at positions before a.
        token: ``[B]`` int64.
        config: the drafter.
        target: the frozen embedding and head.

    Returns:
        Tokens for positions ``a + 1`` to ``a + Q``.

    Examples:
        >>> from numden.models.dspark import init
        >>> from numden.pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3)
        >>> params, target = init(config, random.key(0)), {"embed": torch.zeros(9, 8)}
        >>> draft(params, torch.ones(1, 5, 24), torch.tensor([3]), config, target).tokens
        tensor([[0, 0, 0, 0, 0, 0, 0]])
    """
    hidden = draft_states(params, captured, token, config, target)
    return _greedy(params, hidden, token, config, target)


def _greedy(params: Any, hidden: Tensor, token: Tensor, config: Config, target: Any) -> Draft:
    """Choose token after token of ``[B, Q, H]``, which is where the Markov head is sequential."""
    base = logits(params, Slots(hidden, None, None), target)
    state = markov.initial_state(params["markov"], hidden[:, 0]) if config.markov_rank else None
    tokens, scores = [], []
    for slot in range(config.block_size):
        previous, scored = None, base[:, slot]
        if state is not None:
            head = params["markov"]
            previous = embed(token, head["embed"])
            state, vector = markov.step(head, config.markov_head, state, previous, hidden[:, slot])
            scored = scored + linear(vector, head["out"])
        token = scored.argmax(-1)
        tokens.append(token)
        scores.append(confidence_logits(params, hidden[:, slot], previous, config))
    confidence = torch.stack(scores, 1).sigmoid() if config.confidence_alpha else None
    return Draft(torch.stack(tokens, 1), confidence)
