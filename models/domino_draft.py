"""Draft the tokens behind a position with a Domino drafter, as speculative decoding needs them."""

from typing import Any

import torch
from torch import Tensor

from . import gru
from .block_drafter import Draft, draft_states, output_head
from .domino import Config, correct
from .layers import embed, linear

__all__ = ["draft"]


def draft(params: Any, captured: Tensor, token: Tensor, config: Config, target: Any) -> Draft:
    """The D most probable tokens behind ``token``, each corrected by those before it.

    The token stands at position a and is the last that is known; the target has run on what is
    before it, and only on that.

    Args:
        params: of the drafter.
        captured: ``[B, a, K * H]``, hidden states of the target at positions before a.
        token: ``[B]`` int64.
        config: the drafter.
        target: the frozen embedding and head.

    Returns:
        Tokens ``[B, D]`` for positions ``a + 1`` to ``a + D``.

    Examples:
        >>> from numden.models.domino import init
        >>> from numden.pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3,
        ...                 block_size=4, shift_label=True)
        >>> params, target = init(config, random.key(0)), {"embed": torch.zeros(9, 8)}
        >>> draft(params, torch.ones(1, 5, 24), torch.tensor([3]), config, target).tokens
        tensor([[0, 0, 0, 0]])
    """
    hidden = draft_states(params, captured, token, config, target)[:, config.first_slot :]
    base = linear(hidden, output_head(target))
    state = gru.initial_state(params["gru"], hidden[:, 0])
    tokens = []
    for slot in range(config.num_drafted):
        state = gru.step(params["gru"], state, embed(token, target["embed"]))
        scored = base[:, slot]
        if slot >= config.prefix_size:
            vector = correct(params, hidden[:, slot], state)
            scored = scored + linear(vector, params["correction"]["out"])
        token = scored.argmax(-1)
        tokens.append(token)
    return Draft(torch.stack(tokens, 1))
