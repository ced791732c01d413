"""Tokenizers behind one small protocol: bytes, and byte-level BPE trained on your own text.

Text never turns into a special token: what looks like one is encoded like any other text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ._extras import require

__all__ = [
    "SPECIALS",
    "BpeTokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "save_tokenizer",
    "train_bpe",
]

SPECIALS = ("pad", "mask", "bos", "eos", "system", "user", "assistant", "tool")
"""Names of the special tokens: fillers, document and turn ends, and the speakers of turns."""

_NUM_BYTES = 256
_BYTES_FILE = {"type": "numden.bytes"}


class Tokenizer(Protocol):
    """What the functions of this package ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of ``SPECIALS`` by name; no text is encoded to them."""
        ...

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, none of them special."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens have none, broken UTF-8 becomes U+FFFD."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Each UTF-8 byte is a token; the special tokens come after the 256 bytes.

    Examples:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né")
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169, tokenizer.special_ids["eos"]])
        'né'
    """

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special tokens."""
        return _NUM_BYTES + len(SPECIALS)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of ``SPECIALS`` by name, from 256 on."""
        return {name: _NUM_BYTES + i for i, name in enumerate(SPECIALS)}

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes among ``ids``."""
        return bytes(i for i in ids if i < _NUM_BYTES).decode(errors="replace")


@dataclass(frozen=True)
class BpeTokenizer:
    """Byte-level BPE of the package ``tokenizers``; any text is encoded and comes back the same.

    Attributes:
        inner: a ``tokenizers.Tokenizer`` that has ``SPECIALS``, such as ``train_bpe`` makes.
    """

    inner: Any

    def __post_init__(self) -> None:
        self.inner.encode_special_tokens = True  # as text; it is kept in no file

    def __reduce__(self) -> tuple[Any, ...]:
        return BpeTokenizer, (self.inner,)

    @property
    def vocab_size(self) -> int:
        """Special tokens, bytes and merges."""
        return self.inner.get_vocab_size()

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of ``SPECIALS`` by name."""
        return {name: self.inner.token_to_id(_written(name)) for name in SPECIALS}

    def encode(self, text: str) -> list[int]:
        """The token ids of the text."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens that are not special."""
        special = set(self.special_ids.values())
        return self.inner.decode([i for i in ids if i not in special], skip_special_tokens=False)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> BpeTokenizer:
    """Learn byte-level BPE: merges of the most frequent pairs until ``vocab_size`` is reached.

    Args:
        texts: what to learn from.
        vocab_size: the most tokens there may be, special tokens and the 256 bytes among them.

    Raises:
        ImportError: ``tokenizers`` is not installed.
        ValueError: ``vocab_size`` leaves no room for the bytes and special tokens.

    Examples:
        >>> tokenizer = train_bpe(["the cat and the hat"] * 9, vocab_size=266)
        >>> tokenizer.decode(tokenizer.encode("the cat")), len(tokenizer.encode("the cat"))
        ('the cat', 5)

    References:
        Sennrich, Haddow, Birch, "Neural machine translation of rare words with subword units",
        ACL 2016.
    """
    smallest = _NUM_BYTES + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(
            f"train_bpe: vocab_size must be at least {smallest}, the bytes and the special tokens, "
            f"got {vocab_size=}. Give more, or use ByteTokenizer."
        )
    tokenizers = require("tokenizers", "train_bpe")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_written(name) for name in SPECIALS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return BpeTokenizer(inner)


def save_tokenizer(tokenizer: ByteTokenizer | BpeTokenizer, path: str | Path) -> None:
    """Write a tokenizer to a JSON file; one of BPE is a ``tokenizer.json`` of ``tokenizers``."""
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.inner.save(str(path))
    else:
        Path(path).write_text(json.dumps(_BYTES_FILE), encoding="utf-8")


def load_tokenizer(path: str | Path) -> ByteTokenizer | BpeTokenizer:
    """Read what ``save_tokenizer`` wrote.

    Raises:
        ImportError: ``tokenizers`` is not installed, and the file needs it.
        ValueError: the tokenizer lacks one of ``SPECIALS``.
    """
    if json.loads(Path(path).read_text(encoding="utf-8")) == _BYTES_FILE:
        return ByteTokenizer()
    inner = require("tokenizers", "load_tokenizer").Tokenizer.from_file(str(path))
    missing = [_written(name) for name in SPECIALS if inner.token_to_id(_written(name)) is None]
    if missing:
        raise ValueError(
            f"load_tokenizer: a tokenizer must have the special tokens, {path} lacks {missing}. "
            "Use one that train_bpe made, or add them to it."
        )
    return BpeTokenizer(inner)


def _written(name: str) -> str:
    return f"<|{name}|>"
