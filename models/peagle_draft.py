"""Draft the tokens behind a position with a P-EAGLE drafter, for speculative decoding."""

from typing import Any

import torch
from torch import Tensor

from .block_drafter import Draft
from .eagle3_draft import known_inputs, with_embeddings
from .peagle_config import Config
from .peagle_network import logits, states

__all__ = ["Draft", "draft", "with_embeddings"]


def draft(params: Any, captured: Tensor, token: Tensor, config: Config, target: Any) -> Draft:
    """The D most probable tokens behind ``token``, all at once.

    The token stands at position a and is the last that is known; the target has run on what is
    before it, and only on that.

    Args:
        params: of the drafter.
        captured: ``[B, a, L * H + H]``, a at least 1: hidden states of the target at positions
            before a, and the drafter's embeddings of their tokens; see ``with_embeddings``.
        token: ``[B]`` int64.
        config: the drafter.
        target: its ``draft_ids``, if it has some.

    Returns:
        Tokens of the target's vocabulary for positions ``a + 1`` to ``a + D``.

    Examples:
        >>> from numden.models.peagle import init
        >>> from numden.pure import random
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_depths=3)
        >>> params = init(config, random.key(0)) | {"head": torch.zeros(9, 8)}
        >>> draft(params, torch.ones(1, 5, 32), torch.tensor([3]), config, {}).tokens
        tensor([[0, 0, 0]])
    """
    known, following = known_inputs(captured, token, params["embed"])
    num_rows, length = known.shape[:2]
    text = torch.arange(length, device=token.device)
    deep = torch.arange(1, config.num_depths, device=token.device)
    # The guesses of the last known position are deep; the others have depth 0.
    anchors = torch.cat([text, torch.full_like(deep, length - 1)]).expand(num_rows, -1)
    depths = torch.cat([torch.zeros_like(text), deep]).expand(num_rows, -1)
    guesses = {"anchors": anchors, "depths": depths}
    guesses["keep"] = torch.ones_like(anchors, dtype=torch.bool)
    found = states(params, following, known, guesses, config)[:, length - 1 :]
    tokens, draft_ids = logits(params, found).argmax(-1), target.get("draft_ids")
    return Draft(tokens if draft_ids is None else draft_ids[tokens])
