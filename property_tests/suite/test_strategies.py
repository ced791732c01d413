"""Strategies keep to their domain, reach its corners, and refuse a domain without members."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from numden.property_tests import strategies
from numden.property_tests.rows import join_rows, num_rows

# The smallest example would take a minute to find.
ANY_EXAMPLE = settings(max_examples=2000, phases=[Phase.generate], database=None)


@given(st.lists(strategies.dyadic(min_value=-3, max_value=3, denominator=16)))
def test_sums_and_products_of_dyadic_numbers_are_exact(numbers):
    assert all(-3 <= number <= 3 and float(16 * number).is_integer() for number in numbers)
    assert Fraction(sum(numbers)) == sum(map(Fraction, numbers))
    assert Fraction(sum(x * x for x in numbers)) == sum(Fraction(x) ** 2 for x in numbers)


@given(strategies.dyadic_tensors((2, 3), min_value=0, max_value=1, dtype=torch.float32))
def test_dyadic_tensors(x):
    assert x.shape == (2, 3)
    assert x.dtype == torch.float32
    assert ((x >= 0) & (x <= 1)).all()
    assert torch.equal(x.sum(), x.flip(0, 1).T.sum())


@given(st.data(), st.integers(0, 6), st.booleans())
def test_partitions_cover_each_row_once(data, n, allow_empty):
    if not allow_empty and n == 0:
        n = 1
    cut = data.draw(strategies.partitions(n, max_size=4, allow_empty=allow_empty))
    assert [row for rows in cut for row in rows] == list(range(n))
    assert 1 <= len(cut) <= 4
    assert allow_empty or all(cut)


@given(st.data(), st.integers(0, 6), st.booleans())
def test_worlds_deal_each_micro_step_once(data, n, allow_idle):
    if not allow_idle and n == 0:
        n = 1
    world = data.draw(strategies.worlds(n, max_ranks=3, allow_idle=allow_idle))
    assert sorted(step for rank in world for step in rank) == list(range(n))
    assert all(rank == sorted(rank) for rank in world)
    assert allow_idle or all(world)


@given(strategies.ragged_counts(min_size=2, max_size=3, max_value=5, min_total=4))
def test_ragged_counts(counts):
    assert 2 <= len(counts) <= 3
    assert all(0 <= count <= 5 for count in counts)
    assert sum(counts) >= 4


@given(st.data(), st.integers(0, 3))
def test_masks(data, most):
    mask = data.draw(strategies.masks((3, 2), min_true=most, max_true=most + 1))
    assert mask.dtype == torch.bool
    assert most <= mask.sum() <= most + 1


@given(strategies.token_batches(min_rows=0, max_vocabulary=3))
def test_token_batches(batch):
    labels, ids = batch["labels"], batch["sample_ids"]
    vocabulary = batch["logits"].shape[-1]
    assert ((labels == -100) | ((labels >= 0) & (labels < vocabulary))).all()
    assert batch["logits"].shape[:-1] == labels.shape == batch["where"].shape == ids.shape
    rows_of = [{(int(i), row) for i in ids[row]} for row in range(len(ids))]
    seen = [i for row in rows_of for i, _ in row]
    assert len(seen) == len(set(seen))


@given(st.data())
def test_windows_are_the_rows_of_a_batch(data):
    batch = data.draw(strategies.token_batches())
    window = data.draw(strategies.windows(st.just(batch), max_size=3))
    joined = join_rows(window)
    assert all(torch.equal(joined[name], batch[name]) for name in batch)


@pytest.mark.parametrize(
    ("strategy", "corner"),
    [
        (strategies.dyadic(), lambda x: x == -4),
        (strategies.ragged_counts(), lambda counts: len(counts) > 2 and counts[1] == 0 < counts[0]),
        (strategies.partitions(3), lambda cut: len(cut) > 3),
        (strategies.partitions(3, allow_empty=False), lambda cut: len(cut) == 3),
        (strategies.worlds(3), lambda world: len(world) == 4 and not world[0]),
        (strategies.worlds(2, allow_idle=False), lambda world: world == [[1], [0]]),
        (strategies.masks((2,)), lambda mask: mask.all()),
        (strategies.token_batches(), lambda b: len(b["sample_ids"][0].unique()) == 2),
        (
            strategies.token_batches(),
            lambda b: (b["labels"] == -100).all() and b["labels"].numel() > 2,
        ),
        (
            strategies.windows(strategies.token_batches()),
            lambda window: num_rows(window[0]) == 0 and num_rows(window[-1]) == 2,
        ),
    ],
)
def test_corners_are_reached(strategy, corner):
    assert corner(find(strategy, corner, settings=ANY_EXAMPLE))


@given(st.data(), st.integers(0, 4), st.integers(0, 5), st.sampled_from(["right", "left"]))
def test_ragged_masks_are_padded_rows(data, rows, columns, side):
    least = data.draw(st.integers(0, rows * columns))
    mask = data.draw(strategies.ragged_masks(rows, columns, min_total=least, side=side))
    assert mask.shape == (rows, columns)
    assert mask.dtype == torch.bool
    assert mask.sum() >= least
    steps = mask.int().diff(dim=1)
    assert (steps <= 0 if side == "right" else steps >= 0).all()


def test_ragged_masks_reach_empty_rows_beside_full_ones():
    found = find(strategies.ragged_masks(2, 3), lambda mask: mask[1].all() and not mask[0].any())
    assert found.tolist() == [[False] * 3, [True] * 3]


@given(st.integers(1, 8), st.data())
def test_meshes_hold_their_ranks(max_ranks, data):
    mesh = data.draw(strategies.meshes(("dp", "cp", "tp"), max_ranks=max_ranks))
    assert list(mesh) == ["dp", "cp", "tp"]
    assert all(size >= 1 for size in mesh.values())
    assert math.prod(mesh.values()) <= max_ranks


@pytest.mark.parametrize("sizes", [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_meshes_reach_each_shape(sizes):
    assert find(strategies.meshes(), lambda mesh: tuple(mesh.values()) == sizes)


@pytest.mark.parametrize(
    ("name", "args", "bad", "message"),
    [
        ("ragged_masks", (2, 3), {"min_total": 7}, "min_total=7 must be at most rows * columns"),
        ("ragged_masks", (-1, 3), {}, "got rows=-1, columns=3"),
        ("ragged_masks", (2, 3), {"side": "top"}, "must be 'right' or 'left', got side='top'"),
        ("meshes", (("dp", "dp"),), {}, "axes of different names"),
        ("meshes", (), {"max_ranks": 0}, "got axes=('dp', 'tp'), max_ranks=0"),
        ("dyadic", (), {"min_value": 2, "max_value": 1}, "min_value=2 > max_value=1"),
        ("dyadic", (), {"denominator": 3}, "power of two, got denominator=3"),
        ("dyadic", (), {"denominator": 0}, "power of two, got denominator=0"),
        ("dyadic", (), {"min_value": 0.1, "max_value": 0.12}, "no multiple of 1/8 lies between"),
        ("dyadic_tensors", ((2,),), {"min_value": 2, "max_value": 1}, "min_value=2 > max_value=1"),
        ("masks", ((2,),), {"min_true": 2, "max_true": 1}, "min_true=2 > max_true=1"),
        ("masks", ((2,),), {"max_true": 3}, "max_true=3 must lie between 0 and the size 2"),
        ("masks", ((2,),), {"min_true": -1}, "min_true=-1 and max_true=2 must lie between"),
        ("ragged_counts", (), {"min_size": 9}, "min_size=9 > max_size=8"),
        ("ragged_counts", (), {"min_value": 17}, "min_value=17 > max_value=16"),
        (
            "ragged_counts",
            (),
            {"min_value": -1},
            "must be at least 0, got min_size=1, min_value=-1",
        ),
        (
            "ragged_counts",
            (),
            {"max_value": 1, "min_total": 9},
            "min_total=9 is more than max_size=8",
        ),
        ("partitions", (3,), {"min_size": 9}, "min_size=9 > max_size=8"),
        (
            "partitions",
            (3,),
            {"min_size": 0},
            "needs n >= 0 and min_size >= 1, got n=3, min_size=0",
        ),
        ("partitions", (-1,), {}, "needs n >= 0 and min_size >= 1, got n=-1"),
        ("partitions", (3,), {"min_size": 4, "allow_empty": False}, "n=3 rows make no min_size=4"),
        ("worlds", (3,), {"min_ranks": 5}, "min_ranks=5 > max_ranks=4"),
        ("worlds", (3,), {"min_ranks": 0}, "needs n >= 0 and min_ranks >= 1, got n=3, min_ranks=0"),
        (
            "worlds",
            (3,),
            {"min_ranks": 4, "allow_idle": False},
            "leave one of min_ranks=4 ranks idle",
        ),
        ("token_batches", (), {"min_rows": 5}, "min_rows=5 > max_rows=4"),
        ("token_batches", (), {"min_columns": 6}, "min_columns=6 > max_columns=5"),
        ("token_batches", (), {"max_vocabulary": 1}, "min_vocabulary=2 > max_vocabulary=1"),
        ("token_batches", (), {"min_rows": -1}, "rows and columns must be at least 0"),
    ],
)
def test_empty_domains_are_refused(name, args, bad, message):
    with pytest.raises(InvalidArgument) as caught:
        getattr(strategies, name)(*args, **bad)
    assert str(caught.value).startswith(f"{name.removesuffix('_tensors')}: ")
    assert message in str(caught.value)


def test_windows_refuse_early():
    with pytest.raises(InvalidArgument, match="windows: must not have min_size=5 > max_size=4"):
        strategies.windows(strategies.token_batches(), min_size=5)
