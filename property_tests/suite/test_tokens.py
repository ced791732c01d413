import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numden.models.tokens import (
    SPECIALS,
    BpeTokenizer,
    ByteTokenizer,
    load_tokenizer,
    save_tokenizer,
    train_bpe,
)

TEXT = "def add(a, b):\n    return a + b  # höher → 高\n" * 5
TOKENIZERS = {"bytes": ByteTokenizer(), "bpe": train_bpe([TEXT], vocab_size=300)}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
# Lone surrogates have no UTF-8.
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["", " ", "\r\n\t", "<|pad|>", "a<|eos|>b<|mask|>", "🎉 é", TEXT]
)


@each_tokenizer
@given(text=texts)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert not set(ids) & set(tokenizer.special_ids.values())


@each_tokenizer
def test_special_tokens_are_distinct_and_silent(tokenizer):
    ids = tokenizer.special_ids
    assert tuple(ids) == SPECIALS
    assert len(set(ids.values())) == len(SPECIALS)
    assert max(ids.values()) < tokenizer.vocab_size
    framed = [ids["bos"], *tokenizer.encode("<|pad|>"), ids["eos"], ids["pad"], ids["mask"]]
    assert tokenizer.decode(framed) == "<|pad|>"


@each_tokenizer
def test_broken_utf8_is_replaced(tokenizer):
    assert tokenizer.decode(tokenizer.encode("é")[:1]) in ("\ufffd", "é")  # BPE may have merged it
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


@each_tokenizer
@pytest.mark.parametrize("copied", ["file", "pickle"])
def test_equivalent_copy(tokenizer, copied, tmp_path):
    if copied == "file":
        save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
        again = load_tokenizer(tmp_path / "tokenizer.json")
    else:
        again = pickle.loads(pickle.dumps(tokenizer))
    assert type(again) is type(tokenizer)
    assert again.vocab_size == tokenizer.vocab_size
    assert again.special_ids == tokenizer.special_ids
    for text in (TEXT, "<|eos|> new words"):
        assert again.encode(text) == tokenizer.encode(text)


def test_bpe_merges_what_is_frequent_and_repeats_itself():
    bpe = TOKENIZERS["bpe"]
    assert len(bpe.encode(TEXT)) < len(ByteTokenizer().encode(TEXT)) / 2
    assert isinstance(bpe, BpeTokenizer)
    assert train_bpe([TEXT], vocab_size=300).inner.to_str() == bpe.inner.to_str()


def test_bad_values(tmp_path):
    with pytest.raises(
        ValueError, match=r"vocab_size must be at least 264, .*, got vocab_size=263"
    ):
        train_bpe([TEXT], vocab_size=263)
    foreign = tmp_path / "tokenizer.json"
    sys.modules["tokenizers"].Tokenizer(sys.modules["tokenizers"].models.BPE()).save(str(foreign))
    with pytest.raises(ValueError, match=r"must have the special tokens, .* lacks \['<\|pad\|>'"):
        load_tokenizer(foreign)


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"train_bpe: needs .* pip install 'numden\[train\]'"):
        train_bpe([TEXT], vocab_size=300)
