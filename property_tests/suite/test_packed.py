"""The buffer of sums: ranks are buffers here, and their all-reduce is the sum of the buffers."""

import pytest
import torch
import torch.distributed as c10d
from dist_cases import FailsBackward, said
from hypothesis import assume, given
from hypothesis import strategies as st

from numden import dist
from numden.dist import run_local
from numden.dist._packed import Packed, fits, header, pack, reduce_rest, skeleton, unpack
from numden.property_tests.strategies import dyadic_tensors
from numden.pure import LossTerms, tree, window_grad

CPU = torch.device("cpu")

shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
names = st.sampled_from(["num", "den", "a", "b", "['a']"])
structures = st.dictionaries(names, st.one_of(shapes, st.lists(shapes, max_size=2)), min_size=1)


def zeros(structure):
    """A tree of zeros; a list of shapes is a list of tensors."""
    return {
        name: [torch.zeros(each, dtype=torch.float64) for each in shape]
        if isinstance(shape, list)
        else torch.zeros(shape, dtype=torch.float64)
        for name, shape in structure.items()
    }


def names_and_shapes(sums):
    return list(zip(tree.names(sums), [leaf.shape for leaf in tree.leaves(sums)], strict=True))


def reduced(*ranks):
    """What an all-reduce leaves on each rank; a rank is sums, None without any, or an error."""
    packed = [
        pack(None, failed=True, device=CPU)
        if isinstance(sums, Exception)
        else pack(sums, failed=False, device=CPU)
        for sums in ranks
    ]
    rests = [each.rest for each in packed if len(each.rest)]
    return Packed(
        sum(each.buffer for each in packed), sum(rests) if rests else torch.zeros(0).double()
    )


def states(packed):
    return [float(each) for each in header(packed.buffer)]


@given(structures, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_ranks_of_one_structure_agree(structure, num_ranks, num_idle, num_failed):
    sums = zeros(structure)
    size = sum(leaf.numel() for leaf in tree.leaves(sums))
    everyone = [sums] * num_ranks + [None] * num_idle + [RuntimeError()] * num_failed
    assert states(reduced(*everyone)) == [num_ranks, num_failed, size * num_ranks, 0]


@given(structures)
def test_thousands_of_ranks_of_one_structure_agree(structure):
    """Header sums are integers far below 2^53, so that their rounding makes no difference."""
    buffer = pack(zeros(structure), failed=False, device=CPU).buffer
    for num_ranks in (1000, 4095, 4096):
        assert header(buffer * num_ranks).apart == 0


@given(structures, structures, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_ranks_of_different_structures_do_not_agree(one, other, num_one, num_other, num_idle):
    one, other = zeros(one), zeros(other)
    assume(names_and_shapes(one) != names_and_shapes(other))
    everyone = [one] * num_one + [other] * num_other + [None] * num_idle
    assert header(reduced(*everyone).buffer).apart > 0


def test_one_rank_among_thousands_does_not_agree():
    most = pack({"a": torch.zeros(2)}, failed=False, device=CPU).buffer
    one = pack({"b": torch.zeros(2)}, failed=False, device=CPU).buffer
    assert header(4095 * most + one).apart > 0


def test_order_of_dict_keys_is_no_difference():
    one, other = {"a": torch.ones(1), "b": torch.zeros(2)}, {"b": torch.ones(2), "a": torch.ones(1)}
    packed = reduced(one, other)
    assert header(packed.buffer).apart == 0
    assert tree.map(torch.Tensor.tolist, unpack(packed, one)) == {"a": [2.0], "b": [1.0, 1.0]}


@given(st.data(), st.integers(1, 4), st.booleans())
def test_equivalent_packed_sum_sum_of_trees(data, num_ranks, idle):
    draw = dyadic_tensors((2,)), dyadic_tensors(()), dyadic_tensors((1, 3))
    ranks = [
        (
            LossTerms({"a": data.draw(draw[0]).double()}, data.draw(draw[1]).double()),
            data.draw(draw[2]).double(),
        )
        for _ in range(num_ranks)
    ]
    total = unpack(reduced(*ranks, *([None] if idle else [])), ranks[0])
    expected = tree.map(lambda *leaves: sum(leaves), *ranks)
    assert tree.structure(total) == tree.structure(expected)
    assert all(map(torch.equal, tree.leaves(total), tree.leaves(expected)))


@pytest.mark.parametrize("exponent", [24, 31, 51])
def test_counts_are_exact(exponent):
    counts = torch.tensor(2**exponent + 1), torch.tensor(2**exponent), torch.tensor(3)
    total = unpack(reduced(*({"count": count.double()} for count in counts)), {"count": counts[0]})
    assert int(total["count"]) == 2 ** (exponent + 1) + 4


def test_skeleton_has_the_structure_alone():
    sums = LossTerms({"a": torch.ones(2, requires_grad=True) * 2}, torch.tensor(3))
    like = skeleton(sums)
    assert tree.structure(like) == tree.structure(sums)
    assert [leaf.shape for leaf in tree.leaves(like)] == [(2,), ()]
    assert not any(leaf.requires_grad or leaf.any() for leaf in tree.leaves(like))


def test_fits_up_to_the_capacity():
    assert fits({"a": torch.zeros(1000), "b": torch.zeros(24)})
    assert not fits({"a": torch.zeros(1000), "b": torch.zeros(25)})
    assert not len(pack(torch.zeros(1024), failed=False, device=CPU).rest)
    assert len(pack(torch.zeros(1030), failed=False, device=CPU).rest) == 6


def test_reduce_rest_waits_for_nobody_who_has_none():
    """After trouble no rank calls the second all-reduce, which has no group here to run over."""
    long, short = torch.ones(1500), torch.ones(3)
    for ranks in ([long, short], [long, RuntimeError()], [None, None], [short, short]):
        packed = reduced(*ranks)
        assert reduce_rest(packed, None) is packed.rest  # pyright: ignore[reportArgumentType]


# --- ranks ---------------------------------------------------------------------------------------


def per_feature(w, x):
    """A loss for each of thousands of features, each with a count of its own."""
    seen = (x != 0).sum(0)
    return LossTerms((w * x).square().sum(0), seen), {"mean": LossTerms(x.sum(0), seen)}


@pytest.mark.parametrize("plan", ["before", "columns", "replay"])
def test_equivalent_thousands_of_sums_whole_batch(plan):
    rows = torch.arange(9.0)[:, None] + torch.arange(700.0) + 1
    windows = [[rows[:2], rows[2:3]], [], [rows[3:]]]
    weight = torch.linspace(-1, 1, 700)

    def objective(totals):  # one group of terms, however many features there are
        return (totals.num / 8).sum() + 0 * totals.den.sum()

    def on_rank():
        window = windows[c10d.get_rank()]
        den_fn = (lambda x: (x != 0).sum(0)) if plan == "before" else None
        value = dist.window_value(per_feature, objective)(weight, window)
        grad = dist.window_grad(per_feature, objective, plan=plan, den_fn=den_fn)
        return grad(weight, window), value

    expected = window_grad(per_feature, objective, plan="replay")(weight, [rows])
    for found, value in run_local(on_rank, 3, timeout=20):
        for result in (found, value):
            assert torch.equal(result.terms.den, expected.terms.den)
            assert torch.equal(result.metrics["mean"], expected.metrics["mean"])
            torch.testing.assert_close(result.loss, expected.loss)
        torch.testing.assert_close(found.grads, expected.grads)


@pytest.mark.parametrize("sizes", [(1500, 3), (3, 1500), (1500, 1600)])
def test_sums_too_many_and_different(sizes):
    def loss(w, x):
        return LossTerms(w * torch.ones(sizes[c10d.get_rank()]), 1)

    def on_rank():
        return said(lambda: dist.window_grad(loss)(torch.tensor(1.0), [1]))

    one, other = run_local(on_rank, 2, timeout=20)
    assert one == other
    assert one.startswith("TermStructureError: window: all ranks must return the same sums, but")
    assert f"rank 0 has num[{sizes[0]}]" in one


def test_a_rank_that_fails_after_its_sums_were_sent_sends_the_rest():
    def loss(w, x):
        w = FailsBackward.apply(w) if c10d.get_rank() else w
        return LossTerms(w * torch.ones(1500), 1)

    def on_rank():
        return said(lambda: dist.window_grad(loss)(torch.tensor(1.0), [1]))

    one, other = run_local(on_rank, 2, timeout=20)
    assert one == other
    assert one.startswith("RankError: window: a rank failed: RuntimeError: no backward (rank 1)")
