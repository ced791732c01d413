"""Draft the tokens behind a position with a DSpine drafter, as speculative decoding needs them."""

from typing import Any

import torch
from torch import Tensor

from . import injection
from .block_drafter import Draft, one_block, output_head
from .dspine_candidates import candidates, scores
from .dspine_config import Config
from .dspine_network import States, apply, refine
from .layers import linear

__all__ = ["Draft", "draft"]


def draft(params: Any, captured: Tensor, token: Tensor, config: Config, target: Any) -> Draft:
    """The Q - 1 tokens behind ``token``: each the best of its slot's candidates, given the last.

    The token stands at position a and is the last that is known; the target has run on what is
    before it, and only on that.

    Args:
        params: of the drafter.
        captured: ``[B, a, K * H]``, hidden states of the target at positions before a.
        token: ``[B]`` int64.
        config: the drafter.
        target: the frozen embedding, head and codes.

    Returns:
        Tokens for positions ``a + 1`` to ``a + Q - 1``.

    Examples:
        >>> from numden.models.dspine import init
        >>> from numden.models.transfer_space import transfer_space
        >>> from numden.pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3,
        ...                 transfer_rank=4, message_size=5, top_k=3, block_size=4)
        >>> target = {"embed": random.normal(random.key(0), (9, 8))}
        >>> target["codes"], basis = transfer_space(target["embed"], 4)
        >>> params = init(config, random.key(1), basis)
        >>> draft(params, torch.ones(1, 5, 24), torch.tensor([3]), config, target).tokens.shape
        torch.Size([1, 3])
    """
    states = _states(params, captured, token, config, target)
    head, codes = output_head(target), target["codes"]
    chosen = candidates(linear(states.hidden, head), config.top_k)
    tokens = []
    for slot in range(config.num_drafted):
        before = states.before[:, slot]
        previous = injection.token_features(codes, token, before.dtype)
        refined = refine(params, before, previous, config)
        best = scores(refined, chosen[:, slot], head).argmax(-1, keepdim=True)
        token = chosen[:, slot].gather(-1, best).squeeze(-1)
        tokens.append(token)
    return Draft(torch.stack(tokens, 1))


def _states(params: Any, captured: Tensor, token: Tensor, config: Config, target: Any) -> States:
    """Those of the one block behind the last known token, ``[B, Q - 1, ...]``."""
    states = apply(params, one_block(captured, token), config, target)
    hidden, before = states.hidden[:, 0], states.before[:, 0]
    return States(hidden, before, tuple(each[:, 0] for each in states.features))
