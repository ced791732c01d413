"""Draft tokens with a multi-token-prediction head, as speculative decoding needs them."""

from typing import Any

import torch
from torch import Tensor

from . import decoder
from .block_drafter import Draft, output_head
from .decoding import Target, cached_decoder
from .layers import embed, linear
from .mtp_config import Config
from .mtp_layer import Chain, advance

__all__ = ["Draft", "cached_target", "draft"]


def cached_target(params: Any, config: decoder.Config, *, capacity: int) -> Target:
    """``decoding.cached_decoder`` that captures what ``draft`` reads of a token.

    That is its final state, the input of the head, and its embedding, side by side.

    Args:
        params: of the decoder.
        config: of the decoder.
        capacity: tokens that the cache can hold: prompt, new tokens and a draft.
    """

    def step(tokens: Tensor, cache: decoder.Cache) -> tuple[Tensor, Tensor, decoder.Cache]:
        _, final, cache = decoder.step(params, tokens, cache, config)
        read = torch.cat([final, embed(tokens, params["embed"])], -1)
        return decoder.logits(params, final, config), read, cache

    return cached_decoder(params, config, capacity=capacity)._replace(step=step)


def draft(params: Any, captured: Tensor, token: Tensor, config: Config, target: Any) -> Draft:
    """The K most probable tokens behind ``token``, each given the ones before it.

    The token stands at position a and is the last that is known; the target has run on what is
    before it, and only on that.

    Args:
        params: of the head.
        captured: ``[B, a, 2 H]``, final states and embeddings of the target at positions before a.
        token: ``[B]`` int64.
        config: the head.
        target: the frozen embedding and output head.

    Returns:
        Tokens for positions ``a + 1`` to ``a + K``.

    Examples:
        >>> from numden.models.mtp import init
        >>> from numden.pure import random
        >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
        ...                 num_kv_heads=1, head_dim=4, num_steps=3)
        >>> params, target = init(config, random.key(0)), {"embed": torch.zeros(9, 8)}
        >>> draft(params, torch.ones(1, 5, 16), torch.tensor([3]), config, target).tokens
        tensor([[0, 0, 0]])
    """
    final, embedded = captured.chunk(2, dim=-1)
    table, head = target["embed"], output_head(target)
    positions = torch.arange(captured.shape[1], device=token.device)
    chain, tokens = Chain(final), []
    for step in range(config.num_steps):
        following = embed(token, table)[:, None]
        if step > 0 and config.chain_context == "prefix":
            # The chain of the last position sees the prefix and itself; no other chain goes on.
            chain = chain._replace(hidden=chain.hidden[:, -1:])
            chain = advance(params, chain, following, positions[-1:] + step + 1, config)
        else:
            embedded = torch.cat([embedded[:, 1:], following], 1)
            chain = advance(params, chain, embedded, positions + step + 1, config, causal=True)
        token = linear(chain.hidden[:, -1], head).argmax(-1)
        tokens.append(token)
    return Draft(torch.stack(tokens, 1))
