"""Rows of tokens with loss masks, from texts and conversations."""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..pure import random
from .corpus import Conversation
from .tokens import Tokenizer

__all__ = ["Row", "conversation_rows", "text_rows"]

_ROLES = ("system", "user", "assistant", "tool")


class Row(NamedTuple):
    """One sample.

    Attributes:
        tokens: int64 ``[S]``.
        loss_mask: bool ``[S]``: which tokens are labels, each for its predecessor; never the first.
        sample_id: the number that the row's random draws are keyed by, unique and not negative.
        features: further tensors ``[S, ...]`` by name, such as the target's hidden states.
    """

    tokens: Tensor
    loss_mask: Tensor
    sample_id: int
    features: dict[str, Tensor] | None = None


def text_rows(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    min_length: int | None = None,
    key: Tensor | None = None,
    supervised: float = 1.0,
) -> list[Row]:
    """Rows of texts: each text between bos and eos, cut into pieces without overlap.

    Args:
        texts: documents.
        tokenizer: see ``tokens``.
        max_length: the most tokens of a row.
        min_length: where given, the pieces' lengths are drawn from ``min_length`` to
            ``max_length``; a text's last piece is what is left of it. A piece of one token has
            nothing to predict and is left out.
        key: int64 ``[2]``, for the lengths; a text's lengths depend on the key and its place alone.
        supervised: the share of each row's tokens, from its end, that are labels.

    Returns:
        Rows whose ``sample_id`` is their place in the list.

    Raises:
        ValueError: a length or the share is out of range, a key is missing, or there is no text.

    Examples:
        >>> from .tokens import ByteTokenizer
        >>> [row.tokens.tolist() for row in text_rows(["abc"], ByteTokenizer(), max_length=3)]
        [[258, 97, 98], [99, 259]]
    """
    shortest = max_length if min_length is None else min_length
    if not (2 <= shortest <= max_length and 0 <= supervised <= 1):
        raise ValueError(
            "text_rows: lengths must be at least 2 and in order, the supervised share from 0 to 1, "
            f"got {min_length=}, {max_length=} and {supervised=}. A row predicts its second token."
        )
    if min_length is not None and key is None:
        raise ValueError("text_rows: random lengths need a key, got None. Give random.key(seed).")
    special = tokenizer.special_ids
    pieces: list[Tensor] = []
    for i, text in enumerate(texts):
        ids = torch.tensor([special["bos"], *tokenizer.encode(text), special["eos"]])
        pieces += ids.split(_lengths(key, i, len(ids), shortest, max_length))
    kept = [piece.clone() for piece in pieces if len(piece) > 1]  # not views of a whole text
    if not kept:
        raise ValueError("text_rows: there must be a text to make rows of, got none.")
    return [Row(piece, _suffix(len(piece), supervised), i) for i, piece in enumerate(kept)]


def conversation_rows(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    on_long: Literal["raise", "truncate"] = "raise",
) -> list[Row]:
    """Rows of conversations, one each; labels are what the assistant says and the eos after it.

    A row is bos and, for each message, the special token of its role, its content and eos.

    Args:
        conversations: lists of messages; see ``corpus.read_conversations``.
        tokenizer: see ``tokens``.
        max_length: the most tokens of a row.
        on_long: what to do with a longer one: "raise", or "truncate" it at its end.

    Returns:
        Rows whose ``sample_id`` is their conversation's place in the list.

    Raises:
        ValueError: a conversation is too long or empty, a role is unknown, or there is none.

    Examples:
        >>> from .tokens import ByteTokenizer
        >>> talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        >>> (row,) = conversation_rows([talk], ByteTokenizer(), max_length=9)
        >>> row.tokens.tolist(), row.loss_mask.int().tolist()
        ([258, 261, 97, 259, 262, 98, 259], [0, 0, 0, 0, 0, 1, 1])
    """
    rows = []
    for i, conversation in enumerate(conversations):
        tokens, mask = _encode(conversation, tokenizer, i)
        if len(tokens) > max_length and on_long == "raise":
            raise ValueError(
                f"conversation_rows: a row may have {max_length=} tokens, conversation {i} has "
                f"{len(tokens)}. Raise the limit, or give on_long='truncate'."
            )
        rows.append(Row(tokens[:max_length], mask[:max_length], i))
    if not rows:
        raise ValueError("conversation_rows: there must be a conversation, got none.")
    return rows


def _lengths(key: Tensor | None, i: int, total: int, shortest: int, longest: int) -> list[int]:
    """The lengths of the pieces of text ``i``, which add up to ``total``."""
    most = -(-total // shortest)
    if key is None or shortest == longest:
        drawn = [longest] * most
    else:
        choices = torch.arange(shortest, longest + 1)
        drawn = random.choice(random.fold_in(key, i), choices, (most,)).tolist()
    ends = [min(end, total) for end in accumulate(drawn)]
    return [end - start for start, end in pairwise([0, *ends]) if end > start]


def _suffix(length: int, share: float) -> Tensor:
    return torch.arange(length) >= max(1, length - round(share * length))


def _encode(conversation: Conversation, tokenizer: Tokenizer, i: int) -> tuple[Tensor, Tensor]:
    special = tokenizer.special_ids
    roles = {name: special[name] for name in _ROLES}
    tokens, mask = [special["bos"]], [False]
    for message in conversation:
        if message["role"] not in roles:
            raise ValueError(
                f"conversation_rows: a role must be one of {list(roles)}, conversation {i} has "
                f"{message['role']!r}. Rename it."
            )
        said = [*tokenizer.encode(message["content"]), special["eos"]]
        tokens += [roles[message["role"]], *said]
        mask += [False] + [message["role"] == "assistant"] * len(said)
    return torch.tensor(tokens), torch.tensor(mask)
