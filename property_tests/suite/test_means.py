"""A scalar's den is found among the counts of the batch, or none is said to be."""

import pytest
import torch
from torch.nn import functional as F

from numden.property_tests.loss_checker.means import find_den
from numden.property_tests.loss_checker.outputs import as_loss_fn

B, T, V = 5, 6, 7
PARAMS = {
    "w": torch.sin(torch.arange(4.0 * V)).reshape(4, V).double(),
    "v": torch.cos(torch.arange(4.0 * V)).reshape(4, V).double(),
}


def batch():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 4:] = labels[2, :3] = -100
    lengths = torch.tensor([4, 6, 6, 5, 6]).unsqueeze(1)
    return {
        "x": torch.randn(B, T, 4, generator=generator).double(),
        "labels": labels,
        "attention_mask": (torch.arange(T) < lengths).long(),
    }


def logits(params, batch, name="w"):
    return batch["x"] @ params[name]


def shifted(params, batch):
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits(params, batch)[:, :-1].flatten(0, 1), labels.flatten())


def unshifted(params, batch):
    return F.cross_entropy(logits(params, batch).flatten(0, 1), batch["labels"].flatten())


def each(params, batch):
    labels = batch["labels"].clamp_min(0)
    return F.cross_entropy(logits(params, batch).transpose(1, 2), labels, reduction="none")


def over_positions(params, batch):
    return each(params, batch).mean()


def over_attention(params, batch):
    mask = batch["attention_mask"]
    return (each(params, batch) * mask).sum() / mask.sum()


def by_sample(params, batch):
    mask = batch["labels"] != -100
    return ((each(params, batch) * mask).sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (shifted, "(batch['labels'][:, 1:] != -100).sum()"),
        (unshifted, "(batch['labels'] != -100).sum()"),
        (over_attention, "batch['attention_mask'].sum()"),
        (by_sample, "len(batch)"),
        (over_positions, "len(batch)"),  # As many positions in each row: one is the other.
    ],
)
def test_the_count_of_a_mean_is_found(fn, code):
    found = find_den(as_loss_fn(fn), PARAMS, [batch()])
    assert found.kind == "mean"
    assert found.codes[0] == code
    assert f"a mean over {code}" in found.words
    if code != "len(batch)":
        assert found.codes == (code,)


@pytest.mark.parametrize("fn", [shifted, unshifted, over_attention, by_sample])
def test_den_fn_makes_sums(fn):
    found, whole = find_den(as_loss_fn(fn), PARAMS, [batch()]), batch()
    loss_fn = as_loss_fn(fn, found.den_fn)
    rows = [{name: field[i : i + 1] for name, field in whole.items()} for i in range(B)]
    nums, dens = zip(*[loss_fn(PARAMS, row) for row in rows], strict=True)
    total = loss_fn(PARAMS, whole)
    torch.testing.assert_close(sum(nums), total.num)
    assert sum(dens) == total.den


def test_full_batches_are_masked_to_tell_counts_apart():
    full = batch() | {"labels": torch.ones(B, T, dtype=torch.int64)}
    assert find_den(as_loss_fn(shifted), PARAMS, [full]).codes == (
        "(batch['labels'][:, 1:] != -100).sum()",
    )


def test_a_sum_is_one():
    found = find_den(as_loss_fn(lambda p, b: each(p, b).sum()), PARAMS, [batch()])
    assert (found.kind, found.codes) == ("sum", ())
    assert found.words.startswith("a sum already")


def test_weights_that_no_count_explains():
    def by_square(params, batch):
        mask = batch["labels"] != -100
        weights = mask.sum(1).double().sqrt()
        means = (each(params, batch) * mask).sum(1) / mask.sum(1)
        return (means * weights).sum() / weights.sum()

    found = find_den(as_loss_fn(by_square), PARAMS, [batch()])
    assert found.kind == "weighted"
    # Four tokens in the first row, six in the second: √6 / √4.
    assert "the second has the weight 1.22474" in found.words


def two_means(params, batch):
    return shifted(params, batch) + logits(params, batch, "v").square().mean()


def normalised(params, batch):
    z = logits(params, batch)
    z = (z - z.mean((0, 1))) / z.std((0, 1))
    return F.cross_entropy(z.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("fn", [two_means, normalised])
def test_no_den_fixes_it(fn):
    found = find_den(as_loss_fn(fn), PARAMS, [batch()])
    assert found.kind == "none"
    assert "no den makes it additive: two batches have the values" in found.words
    a, b, joined = found.values
    assert joined == pytest.approx(float(fn(PARAMS, join(found.pair))))
    assert (a, b) == pytest.approx([float(fn(PARAMS, each)) for each in found.pair])


def join(pair):
    return {name: torch.cat([part[name] for part in pair]) for name in pair[0]}


def test_nothing_is_said_of_a_constant_or_of_nan():
    for value in (0.0, float("nan")):
        fn = lambda p, b, value=value: 0 * p["w"].sum() + value
        assert find_den(as_loss_fn(fn), PARAMS, [batch()]).kind == "unknown"
    assert find_den(as_loss_fn(shifted), PARAMS, []).kind == "unknown"


def test_float32_is_enough():
    params = {name: leaf.float() for name, leaf in PARAMS.items()}
    single = batch() | {"x": batch()["x"].float()}
    found = find_den(as_loss_fn(shifted), params, [single])
    assert found.codes == ("(batch['labels'][:, 1:] != -100).sum()",)
    assert find_den(as_loss_fn(two_means), params, [single]).kind == "none"
