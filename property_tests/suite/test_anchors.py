import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from numden.models.anchors import (
    anchor_width,
    block_mask,
    block_positions,
    block_tokens,
    candidates,
    sample_anchors,
    slot_weights,
    supervised_slots,
    take_slots,
)
from numden.pure import random


@st.composite
def loss_masks(draw, max_rows=4, max_size=12):
    shape = draw(st.integers(1, max_rows)), draw(st.integers(1, max_size))
    row = st.lists(st.booleans(), min_size=shape[1], max_size=shape[1])
    return torch.tensor(draw(st.lists(row, min_size=shape[0], max_size=shape[0])))


@st.composite
def anchored_masks(draw):
    """A loss mask with any anchors at all, kept or not: blocks may run beyond the row."""
    mask = draw(loss_masks(max_rows=2, max_size=6))
    num_anchors = draw(st.integers(1, 3))
    index = st.lists(st.integers(0, mask.shape[1] - 1), min_size=num_anchors, max_size=num_anchors)
    kept = st.lists(st.booleans(), min_size=num_anchors, max_size=num_anchors)
    rows = [(draw(index), draw(kept)) for _ in mask]
    anchors, keep = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    return mask, anchors, keep


GAP = torch.tensor([[True] * 5, [True, True, False, True, True]])
GAP_CASE = GAP, torch.tensor([[0, 3], [0, 3]]), torch.tensor([[True, True], [True, False]])
DENSE = torch.ones(3, 9, dtype=torch.bool)

seeds = st.integers(0, 2**40)
widths = st.integers(1, 15)


def row_keys(seed, mask):
    return random.split(random.key(seed), len(mask))


def sets(anchors, keep):
    return [set(row[kept].tolist()) for row, kept in zip(anchors, keep, strict=True)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1, 1, 0, 1, 0, 1, 1], {0, 5}),
        ([0, 0, 0, 0, 1, 1], {4}),
        ([0, 0, 1, 1], {2}),
        ([0, 0, 1, 1, 0, 0, 0], {2}),
        ([1, 0, 1, 0, 0, 0, 0], set()),
        ([1, 0, 1], set()),
        ([1], set()),
    ],
)
def test_rows_give_their_candidates(row, expected):
    anchors, keep = sample_anchors(random.key(7)[None], torch.tensor([row]), num_anchors=2)
    assert anchors.shape == keep.shape == (1, 2)
    assert sets(anchors, keep) == [expected]
    assert anchors[~keep].eq(0).all()


def test_half_is_not_supervised():
    assert candidates(torch.tensor([[0.5, 1.0, 0.6, 0.2]])).tolist() == [
        [False, True, False, False]
    ]


@given(loss_masks(), seeds, widths)
def test_anchors_are_sorted_distinct_candidates(mask, seed, num_anchors):
    anchors, keep = sample_anchors(row_keys(seed, mask), mask, num_anchors)
    for row, kept, eligible in zip(anchors, keep, candidates(mask), strict=True):
        count = min(num_anchors, int(eligible.sum()))
        assert kept.tolist() == [True] * count + [False] * (num_anchors - count)
        chosen = row[:count].tolist()
        assert chosen == sorted(set(chosen))
        assert eligible[chosen].all()
        assert row[count:].eq(0).all()


@given(loss_masks(), seeds, widths, st.integers(0, 9))
@example(DENSE, 0, 3, 4)
def test_invariant_anchors_padding(mask, seed, num_anchors, padding):
    keys = row_keys(seed, mask)
    padded = torch.nn.functional.pad(mask, (0, padding))
    for plain, wide in zip(
        sample_anchors(keys, mask, num_anchors),
        sample_anchors(keys, padded, num_anchors),
        strict=True,
    ):
        assert torch.equal(plain, wide)


@given(loss_masks(), seeds, widths)
@example(DENSE, 0, 3)
def test_invariant_anchors_companions(mask, seed, num_anchors):
    keys = row_keys(seed, mask)
    together = sample_anchors(keys, mask, num_anchors)
    alone = [sample_anchors(k[None], m[None], num_anchors) for k, m in zip(keys, mask, strict=True)]
    mapped = torch.func.vmap(lambda k, m: sample_anchors(k, m, num_anchors))(keys, mask)
    for i in (0, 1):
        assert torch.equal(together[i], torch.cat([each[i] for each in alone]))
        assert torch.equal(together[i], mapped[i])


@given(loss_masks(), seeds, widths, st.integers(0, 5))
@example(DENSE, 0, 3, 2)
def test_nested_anchors_width(mask, seed, num_anchors, more):
    keys = row_keys(seed, mask)
    narrow = sets(*sample_anchors(keys, mask, num_anchors))
    wide = sets(*sample_anchors(keys, mask, num_anchors + more))
    assert all(few <= many for few, many in zip(narrow, wide, strict=True))


def test_each_pair_of_candidates_is_as_likely():
    num_draws = 4000
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 1, 1]]).expand(num_draws, -1)
    anchors, keep = sample_anchors(random.split(random.key(1), num_draws), mask, num_anchors=2)
    assert keep.all()
    counts = Counter(map(tuple, anchors.tolist()))
    assert set(counts) == set(itertools.combinations([0, 3, 4, 5, 8], 2))
    # 400 expected of each of 10 pairs, with a deviation of 19: five of them.
    assert all(abs(count - 400) < 95 for count in counts.values())


def test_width_is_that_of_the_fullest_row():
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 1, 1]])
    assert anchor_width(mask, 512) == 3
    assert anchor_width(mask, 2) == 2
    assert anchor_width(torch.zeros(2, 6), 512) == 1
    assert anchor_width(torch.zeros(0, 6), 512) == 1


def brute_force_mask(anchors, keep, context_size, block_size, window):
    num_rows, num_blocks = anchors.shape
    num_slots = num_blocks * block_size
    mask = torch.zeros(num_rows, num_slots, context_size + num_slots, dtype=torch.bool)
    for b, n, q in itertools.product(range(num_rows), range(num_blocks), range(block_size)):
        if not keep[b, n]:
            continue
        row, a = mask[b, n * block_size + q], int(anchors[b, n])
        for t in range(context_size):
            row[t] = t < a and (window is None or t >= a + q - (window - 1))
        for other in range(block_size):
            row[context_size + n * block_size + other] = window is None or other <= q
    return mask


@given(anchored_masks(), st.integers(1, 4), st.none() | st.integers(1, 6))
@example(GAP_CASE, 3, 2)
def test_equivalent_block_mask_brute_force(case, block_size, window):
    mask, anchors, keep = case
    built = block_mask(anchors, keep, mask.shape[1], block_size, window=window)
    assert torch.equal(built, brute_force_mask(anchors, keep, mask.shape[1], block_size, window))


def test_window_of_the_block_mask_by_hand():
    mask = block_mask(torch.tensor([[6]]), torch.tensor([[True]]), 12, 4, window=4)
    visible = [row.nonzero().flatten().tolist() for row in mask[0]]
    assert visible == [[3, 4, 5, 12], [4, 5, 12, 13], [5, 12, 13, 14], [12, 13, 14, 15]]


@given(anchored_masks(), st.integers(1, 5))
@example(GAP_CASE, 4)
def test_equivalent_slots_loop(case, block_size):
    mask, anchors, keep = case
    size = mask.shape[1]
    values = torch.arange(mask.numel() * 2).reshape(*mask.shape, 2)
    taken = take_slots(values, anchors, block_size, offset=1)
    counted = supervised_slots(mask, anchors, keep, block_size)
    positions = block_positions(anchors, block_size)
    for (b, n), a in zip(
        itertools.product(*map(range, anchors.shape)), anchors.flatten(), strict=True
    ):
        alive = bool(keep[b, n])
        for j in range(block_size):
            label = int(a) + 1 + j
            alive = alive and label < size and bool(mask[b, label])
            assert counted[b, n, j] == alive
            assert positions[b, n, j] == label - 1
            assert torch.equal(taken[b, n, j], values[b, min(label, size - 1)])


def test_block_past_the_row_counts_its_labels_only():
    counted = supervised_slots(torch.ones(1, 4), torch.tensor([[2]]), torch.tensor([[True]]), 5)
    assert slot_weights(counted, None).sum() == 1


def test_weights_decay_by_the_slot():
    weights = slot_weights(torch.tensor([True, True, True, True, False]), 7.0)
    assert weights.dtype == torch.float64
    expected = [math.exp(-j / 7) for j in range(4)]
    assert weights.tolist() == pytest.approx([*expected, 0], rel=1e-15)
    assert weights.sum().item() == pytest.approx(3.269794, abs=5e-7)


def test_block_tokens_hide_all_but_the_anchor():
    tokens, keep = torch.tensor([[5, 6, 7]]), torch.tensor([[True, False]])
    blocks = block_tokens(tokens, torch.tensor([[1, 0]]), keep, 3, mask_token_id=9)
    assert blocks.tolist() == [[[6, 9, 9], [9, 9, 9]]]
