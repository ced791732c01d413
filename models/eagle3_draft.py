"""Draft the tokens behind a position with an EAGLE-3 drafter, for speculative decoding."""

from typing import Any

import torch
from torch import Tensor

from .block_drafter import Draft
from .decoding import Target
from .eagle3 import Config, logits, unroll
from .layers import embed

__all__ = ["Draft", "draft", "known_inputs", "with_embeddings"]


def with_embeddings(target: Target, table: Tensor) -> Target:
    """A target that captures each token's embedding behind its hidden states.

    Drafters of the EAGLE kind read the tokens of the text beside what the target makes of them.

    Args:
        target: see ``decoding.Target``.
        table: ``[V, H]``, the embedding that the drafter reads.

    Returns:
        The target with ``captured`` ``[1, L, C + H]``.
    """

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        scores, captured, state = target.step(tokens, state)
        return scores, torch.cat([captured, embed(tokens, table)], -1), state

    return target._replace(step=step)


def known_inputs(captured: Tensor, token: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """What a drafter of the EAGLE kind reads at each known position: of it, and of the next token.

    Args:
        captured: ``[B, a, L * H + H]``, hidden states of the target at positions before a, and the
            embeddings of their tokens, see ``with_embeddings``.
        token: ``[B]`` int64, the token at position a.
        table: ``[V, H]``, the embedding.

    Returns:
        ``[B, a, L * H]``, and ``[B, a, H]``, the embeddings of the tokens at 1 to a.
    """
    width = table.shape[1]
    later = captured[:, 1:, -width:].to(table.dtype)
    return captured[..., :-width], torch.cat([later, embed(token[:, None], table)], 1)


def draft(params: Any, captured: Tensor, token: Tensor, config: Config, target: Any) -> Draft:
    """The K most probable tokens behind ``token``, each given those before it.

    The token stands at position a and is the last that is known; the target has run on what is
    before it, and only on that.

    Args:
        params: of the drafter.
        captured: ``[B, a, L * H + H]``, a at least 1, see ``known_inputs``.
        token: ``[B]`` int64.
        config: the drafter.
        target: the frozen embedding and, if it has some, ``draft_ids``.

    Returns:
        Tokens of the target's vocabulary for positions ``a + 1`` to ``a + K``.

    Examples:
        >>> from numden.models.eagle3 import init
        >>> from numden.pure import random
        >>> config = Config(vocab_size=9, draft_vocab_size=2, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_steps=3)
        >>> params = init(config, random.key(0)) | {"head": torch.zeros(2, 8)}
        >>> target = {"embed": torch.zeros(9, 8), "draft_ids": torch.tensor([4, 7])}
        >>> draft(params, torch.ones(1, 5, 32), torch.tensor([3]), config, target).tokens
        tensor([[4, 4, 4]])
    """
    table, draft_ids = target["embed"].detach(), target.get("draft_ids")
    states, following = known_inputs(captured, token, table)
    tokens: list[Tensor] = []

    def likeliest(state: Tensor) -> Tensor:
        index = logits(params, state[:, -1]).argmax(-1)
        return index if draft_ids is None else draft_ids[index]

    def inputs(step: int, state: Tensor | None) -> Tensor:
        if state is None:
            return following
        tokens.append(likeliest(state))
        # Only the last position is read: what the others would draft does not matter to it.
        return embed(tokens[-1][:, None], table).expand_as(following)

    last = unroll(params, states, inputs, config)[-1]
    return Draft(torch.stack([*tokens, likeliest(last)], 1))
