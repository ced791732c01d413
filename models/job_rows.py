"""The rows that ``numden train`` trains on, from text or conversations, as configured."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..pure import random
from .anchors import candidates
from .corpus import Conversation, read_conversations, read_texts, stdlib_sources
from .rows import Row, conversation_rows, text_rows
from .tokens import ByteTokenizer, Tokenizer, train_bpe
from .train_config import TrainConfig

__all__ = ["Corpus", "drafter_rows", "read_corpus", "stream_key"]

# Folded into the seed: one stream of draws for each purpose.
CUT, ORDER, TARGET, DRAFTER, ANSWERS = range(5)


def stream_key(config: TrainConfig, purpose: int) -> Tensor:
    """The key that all draws for one purpose start from."""
    return random.fold_in(random.key(config.run.seed), purpose)


class Corpus(NamedTuple):
    """Rows to train on, rows that are held out, and the tokenizer that made them."""

    tokenizer: Tokenizer
    rows: list[Row]
    held_out: list[Row]


def read_corpus(config: TrainConfig) -> Corpus:
    """Read the text, train a tokenizer on it if one is asked for, and cut it into rows.

    Rows that are too short, or in which no label follows another, teach nothing and are left out.
    """
    data, key = config.data, stream_key(config, CUT)
    if _are_conversations(data.files):
        conversations = _whole_within(data.max_bytes, read_conversations(data.files))
        said = (message["content"] for talk in conversations for message in talk)
        tokenizer = _tokenizer(said, data.vocab_size)
        rows = conversation_rows(
            conversations, tokenizer, max_length=data.max_length, on_long="truncate"
        )
    else:
        texts = _texts(data.files, data.max_bytes)
        tokenizer = _tokenizer(texts, data.vocab_size)
        lengths = {"min_length": data.min_length, "max_length": data.max_length}
        rows = text_rows(texts, tokenizer, key=key, **lengths)
    rows = [row for row in rows if _teaches(row, data.min_length)]
    if len(rows) <= data.held_out:
        raise ValueError(
            f"data: there must be more rows than are held out, got {len(rows)} rows and "
            f"data.held_out={data.held_out}. Give more text, or hold out fewer."
        )
    order = random.permutation(key, len(rows)).tolist()
    shuffled = [rows[i] for i in order]
    return Corpus(tokenizer, shuffled[data.held_out :], shuffled[: data.held_out])


def _are_conversations(files: Sequence[str]) -> bool:
    kinds = {name.endswith(".jsonl") for name in files}
    if len(kinds) > 1:
        raise ValueError(
            f"data: files must be all .jsonl or none, got {list(files)}. "
            "Train on text and on conversations one after the other."
        )
    return kinds == {True}


def _whole_within(max_bytes: int, conversations: list[Conversation]) -> list[Conversation]:
    """The first conversations, as many as ``max_bytes`` have room for."""
    sizes = (sum(len(each["content"].encode()) for each in talk) for talk in conversations)
    return [t for t, end in zip(conversations, accumulate(sizes), strict=True) if end <= max_bytes]


def _texts(files: tuple[str, ...], max_bytes: int) -> list[str]:
    if not files:
        return list(stdlib_sources(max_bytes=max_bytes))
    encoded = [text.encode() for text in read_texts(files)]
    starts = accumulate(map(len, encoded), initial=0)
    kept = [text[: max(0, max_bytes - start)] for text, start in zip(encoded, starts, strict=False)]
    return [text.decode(errors="ignore") for text in kept if text]  # the last may be cut


def _teaches(row: Row, min_length: int) -> bool:
    return len(row.tokens) >= min_length and bool(candidates(row.loss_mask).any())


def _tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    return train_bpe(texts, vocab_size=vocab_size) if vocab_size else ByteTokenizer()


def drafter_rows(config: TrainConfig, rows: list[Row]) -> list[Row]:
    """The rows with the labels that the drafter is trained on: the end of each text, as an answer.

    Each row draws its answer's share by its own key, as many between 1/8 and 1/4 as between 1/2
    and 1, down to ``min_answer``; an answer has two labels at least.
    """
    if _are_conversations(config.data.files):
        return rows
    ids = torch.tensor([row.sample_id for row in rows])
    drawn = random.uniform(random.fold_in(stream_key(config, ANSWERS), ids), ())
    least = config.drafter.min_answer
    return [_answer(row, least**u) for row, u in zip(rows, drawn.tolist(), strict=True)]


def _answer(row: Row, share: float) -> Row:
    length = len(row.tokens)
    start = length - max(2, round(share * length))
    return row._replace(loss_mask=row.loss_mask & (torch.arange(length) >= start))
