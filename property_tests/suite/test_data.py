import pickle
from itertools import chain, islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numden.models.data import Position, collate, shard_window, windows
from numden.models.rows import Row, conversation_rows, text_rows
from numden.models.tokens import ByteTokenizer
from numden.pure import random

BYTES = ByteTokenizer()
KEY = random.key(11)
ids = BYTES.special_ids

texts = st.lists(st.text(st.characters(codec="ascii"), max_size=40), min_size=1, max_size=4)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)
limits = st.sampled_from(
    [{"num_rows": 1}, {"num_rows": 3}, {"num_tokens": 20}, {"num_rows": 2, "num_tokens": 12}]
)


def rows_of(lengths):
    return [
        Row(torch.arange(n) + 1, torch.arange(n) % 3 == 1, 100 + i) for i, n in enumerate(lengths)
    ]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def samples(window):
    return [batch["sample_id"].tolist() for batch in window]


@given(texts, st.integers(2, 9), st.booleans())
def test_text_rows_are_the_texts_cut_up(texts, max_length, random_lengths):
    options = {"min_length": 2, "key": KEY} if random_lengths else {}
    rows = text_rows(texts, BYTES, max_length=max_length, **options)
    joined = [i for text in texts for i in (ids["bos"], *BYTES.encode(text), ids["eos"])]
    kept = [i for row in rows for i in row.tokens.tolist()]
    left_out = len(joined) - len(kept)
    # A last piece of one token, an eos, is left out: at most one a text.
    assert 0 <= left_out <= len(texts)
    assert [i for i in kept if i != ids["eos"]] == [i for i in joined if i != ids["eos"]]
    assert [row.sample_id for row in rows] == list(range(len(rows)))
    for row in rows:
        assert 2 <= len(row.tokens) <= max_length
        assert torch.equal(row.loss_mask, torch.arange(len(row.tokens)) > 0)


def test_text_rows_fixed_lengths_fill_up():
    rows = text_rows(["abcdefg"], BYTES, max_length=4)
    assert [len(row.tokens) for row in rows] == [4, 4]  # 9 tokens, the last eos alone


def test_random_lengths_depend_on_the_key_and_the_text_alone():
    def pieces(texts, key):
        rows = text_rows(texts, BYTES, max_length=9, min_length=3, key=key)
        return [len(row.tokens) for row in rows]

    long, other = "x" * 100, "y" * 50
    alone = pieces([long], KEY)
    assert len(set(alone[:-1])) > 1
    assert set(alone[:-1]) <= set(range(3, 10))
    assert pieces([long, other], KEY)[: len(alone)] == alone
    assert pieces([long, long], KEY) != alone + alone
    assert pieces([long], random.key(12)) != alone


@given(st.integers(0, 8), st.integers(2, 20))
def test_supervised_share_is_a_suffix(eighths, length):
    (row,) = text_rows(["x" * (length - 2)], BYTES, max_length=length, supervised=eighths / 8)
    expected = min(round(eighths / 8 * length), length - 1)
    assert row.loss_mask.sum() == expected
    assert not row.loss_mask[: length - expected].any()


def test_rows_are_no_views():
    rows = text_rows(["x" * 10_000], BYTES, max_length=2)
    assert len(pickle.dumps(rows[0])) < 2000


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text("ab"))))
def test_conversation_labels_are_what_the_assistant_says(turns):
    talk = [{"role": role, "content": content} for role, content in turns]
    (row,) = conversation_rows([talk], BYTES, max_length=10_000)
    labels = row.tokens[row.loss_mask].tolist()
    said = [content for role, content in turns if role == "assistant"]
    assert labels == [i for content in said for i in (*BYTES.encode(content), ids["eos"])]
    assert BYTES.decode(row.tokens.tolist()) == "".join(content for _, content in turns)
    assert [i for i in row.tokens.tolist() if i in ids.values() and i != ids["eos"]] == [
        ids["bos"],
        *(ids[role] for role, _ in turns),
    ]
    assert not row.loss_mask[0]


def test_long_conversation():
    talk = [{"role": "assistant", "content": "abc"}]
    with pytest.raises(
        ValueError, match=r"a row may have max_length=4 tokens, conversation 1 has 6"
    ):
        conversation_rows([[], talk], BYTES, max_length=4)
    (row,) = conversation_rows([talk], BYTES, max_length=4, on_long="truncate")
    assert row.tokens.tolist() == [ids["bos"], ids["assistant"], *b"ab"]
    assert row.loss_mask.tolist() == [False, False, True, True]


@given(lengths, st.integers(0, 3), st.integers(0, 3))
def test_batch_is_its_rows_and_padding(lengths, more, epoch):
    rows = rows_of(lengths)
    size = max(lengths) + more
    batch = collate(rows, key=KEY, epoch=epoch, pad_id=77, length=size)
    assert batch["tokens"].shape == batch["loss_mask"].shape == (len(rows), size)
    labels = []
    for b, row in enumerate(rows):
        n = len(row.tokens)
        assert torch.equal(batch["tokens"][b, :n], row.tokens)
        assert (batch["tokens"][b, n:] == 77).all()
        assert torch.equal(batch["loss_mask"][b, :n], row.loss_mask)
        assert not batch["loss_mask"][b, n:].any()
        labels += row.tokens[row.loss_mask].tolist()
    # The successors of the supervised positions are the labels, in order.
    assert batch["tokens"].flatten()[batch["supervised"] + 1].tolist() == labels
    if more == 0:
        assert equal(batch, collate(rows, key=KEY, epoch=epoch, pad_id=77))


@given(lengths, st.integers(0, 3))
def test_row_keys_do_not_depend_on_the_batch(lengths, epoch):
    rows = rows_of(lengths)
    together = collate(rows, key=KEY, epoch=epoch)["key"]
    for row, key in zip(rows, together, strict=True):
        expected = random.fold_in(random.fold_in(KEY, row.sample_id), epoch)
        assert torch.equal(key, expected)
        assert torch.equal(key, collate([row], key=KEY, epoch=epoch)["key"][0])


@given(lengths, st.integers(1, 4), limits)
def test_an_epoch_has_each_row_once(lengths, num_micro_steps, limits):
    rows = rows_of(lengths)
    stream = list(windows(rows, key=KEY, num_micro_steps=num_micro_steps, num_epochs=2, **limits))
    seen = {0: [], 1: []}
    epoch = 0
    for window, position in stream:
        assert 1 <= len(window) <= num_micro_steps
        for batch in window:
            num, size = batch["tokens"].shape
            assert num <= limits.get("num_rows", num)
            assert num * size <= limits.get("num_tokens", num * size)
        seen[epoch] += chain.from_iterable(samples(window))
        assert position.cursor == (0 if position.epoch > epoch else len(seen[epoch]))
        epoch = position.epoch
    assert epoch == 2
    assert sorted(seen[0]) == sorted(seen[1]) == [row.sample_id for row in rows]


@given(lengths, limits)
def test_micro_batches_are_full(lengths, limits):
    stream = windows(rows_of(lengths), key=KEY, num_micro_steps=1, num_epochs=1, **limits)
    batches = [window[0] for window, _ in stream]
    for batch, following in pairwise(batches):
        first = int((following["tokens"][0] > 0).sum())  # tokens of these rows are positive
        num, size = batch["tokens"].shape
        full = num == limits.get("num_rows")
        assert full or (num + 1) * max(size, first) > limits["num_tokens"]


@given(lengths, st.integers(1, 3), limits, st.integers(0, 5))
def test_a_resumed_stream_goes_on(lengths, num_micro_steps, limits, stop):
    rows = rows_of(lengths)
    options = {"key": KEY, "num_micro_steps": num_micro_steps, **limits}
    whole = list(islice(windows(rows, **options), stop + 4))
    saved = [Position()._asdict(), *(position._asdict() for _, position in whole)][stop]
    resumed = list(islice(windows(rows, position=Position(**saved), **options), 4))
    for (window, position), (again, position_again) in zip(whole[stop:], resumed, strict=True):
        assert position == position_again
        assert all(equal(a, b) for a, b in zip(window, again, strict=True))


@given(lengths, limits)
def test_the_end_of_an_epoch_is_the_start_of_the_next(lengths, limits):
    rows = rows_of(lengths)
    options = {"key": KEY, "num_micro_steps": 2, **limits}
    at_end = next(windows(rows, position=Position(3, len(rows)), **options))
    at_start = next(windows(rows, position=Position(4, 0), **options))
    assert at_end[1] == at_start[1]
    assert samples(at_end[0]) == samples(at_start[0])


@given(lengths, st.integers(1, 3), st.integers(1, 5), limits)
def test_ranks_share_the_same_windows(lengths, num_micro_steps, num_ranks, limits):
    rows = rows_of(lengths)
    options = {"key": KEY, "num_micro_steps": num_micro_steps, "num_epochs": 1, **limits}
    shares = [
        list(windows(rows, rank=rank, num_ranks=num_ranks, **options)) for rank in range(num_ranks)
    ]
    for i, (window, position) in enumerate(windows(rows, **options)):
        for rank in range(num_ranks):
            share, position_of_rank = shares[rank][i]
            assert position_of_rank == position
            dealt = shard_window(window, rank, num_ranks)
            assert all(equal(a, b) for a, b in zip(share, dealt, strict=True))
        together = [group for share in shares for group in samples(share[i][0])]
        assert sorted(together) == sorted(samples(window))


def test_order_differs_between_epochs_and_keys():
    rows = rows_of([2] * 30)
    options = {"num_micro_steps": 30, "num_rows": 1, "num_epochs": 2}
    first, second = (samples(window) for window, _ in windows(rows, key=KEY, **options))
    other = samples(next(windows(rows, key=random.key(0), **options))[0])
    # Equal by chance with probability 1/30!.
    assert first != second
    assert first != other
    assert first != [[row.sample_id] for row in rows]


def test_pure():
    rows = rows_of([3, 4, 5])
    state = torch.get_rng_state()
    next(windows(rows, key=KEY, num_micro_steps=2, num_rows=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(KEY, random.key(11))


def test_bad_rows():
    with pytest.raises(ValueError, match=r"lengths must be at least 2 .* max_length=1 and"):
        text_rows(["a"], BYTES, max_length=1)
    with pytest.raises(ValueError, match=r"lengths must be .* got min_length=5, max_length=4"):
        text_rows(["a"], BYTES, max_length=4, min_length=5, key=KEY)
    with pytest.raises(ValueError, match=r"share from 0 to 1, .* supervised=1.5"):
        text_rows(["a"], BYTES, max_length=4, supervised=1.5)
    with pytest.raises(ValueError, match=r"random lengths need a key, got None"):
        text_rows(["a"], BYTES, max_length=4, min_length=2)
    with pytest.raises(ValueError, match=r"text_rows: there must be a text"):
        text_rows([], BYTES, max_length=4)
    with pytest.raises(ValueError, match=r"conversation_rows: there must be a conversation"):
        conversation_rows([], BYTES, max_length=4)
    with pytest.raises(ValueError, match=r"one of \['system', .*\], conversation 0 has 'human'"):
        conversation_rows([[{"role": "human", "content": ""}]], BYTES, max_length=4)


def test_bad_batches():
    rows = rows_of([3, 4])
    with pytest.raises(ValueError, match=r"collate: a batch must have a row, got none"):
        collate([], key=KEY)
    with pytest.raises(ValueError, match=r"rows must fit into length=3, got one of 4 tokens"):
        collate(rows, key=KEY, length=3)
    with pytest.raises(ValueError, match=r"row 101 has loss_mask\[0\] = True"):
        collate([rows[0], rows[1]._replace(loss_mask=torch.ones(4, dtype=torch.bool))], key=KEY)
    with pytest.raises(ValueError, match=r"row 101 has \['x'\] and row 100 has \[\]"):
        collate([rows[0], rows[1]._replace(features={"x": torch.zeros(4)})], key=KEY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"got num_micro_steps=2, num_rows=None and num_tokens=None. Give num_rows or"),
        ({"num_rows": 0}, r"must be positive, .* num_rows=0"),
        ({"num_rows": 1, "num_micro_steps": 0}, r"must be positive, .* num_micro_steps=0"),
        ({"num_tokens": 3}, r"each row must fit into num_tokens=3, got one of 4 tokens"),
        ({"num_rows": 1, "position": Position(0, 3)}, r"the 2 rows, got Position\(epoch=0, cur"),
        ({"num_rows": 1, "rank": 2, "num_ranks": 2}, r"shard_window: rank must be .* got rank=2"),
    ],
)
def test_bad_windows(options, message):
    # Refused when called, not when the first window is asked for.
    with pytest.raises(ValueError, match=message):
        windows(rows_of([3, 4]), key=KEY, **{"num_micro_steps": 2, **options})


def test_windows_of_no_rows():
    with pytest.raises(ValueError, match=r"windows: there must be rows"):
        windows([], key=KEY, num_micro_steps=2, num_rows=1)
