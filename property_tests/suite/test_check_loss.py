"""check_loss finds no fault in right losses, and names the law that a planted fault breaks."""

import time

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from numden.property_tests import LawViolation
from numden.property_tests.loss_checker import outputs
from numden.property_tests.loss_checker.check import check_loss, report_loss
from numden.property_tests.loss_checker.trials import LAWS
from numden.property_tests.reports.report import CheckFailed
from numden.property_tests.rows import join_rows, num_rows
from numden.property_tests.strategies import token_batches
from numden.property_tests.worlds.problems import token_batch, tokens, tokens_and_balance
from numden.pure import LossTerms, combine, losses, random

PARAMS = {"w": torch.tensor(1.25, dtype=torch.float64)}
WEIGHTINGS = ("token", "sample", "square")
FEW = {"max_examples": 6, "budget_s": 10}


def logits(params, batch):
    return batch["logits"] * params["w"]


def cross_entropy(weighting, packed=False):
    def loss_fn(params, batch):
        ids = batch["sample_ids"] if packed else None
        options = {"where": batch["where"], "weighting": weighting, "sample_ids": ids}
        return losses.cross_entropy(logits(params, batch), batch["labels"], **options)

    return loss_fn


def linear(params, batch):
    head = torch.cos(torch.arange(12.0, dtype=torch.float64)).reshape(4, 3) * params["w"]
    hidden = batch["logits"].sum(-1, keepdim=True) * torch.ones(3, dtype=torch.float64)
    labels = batch["labels"].clamp_max(3)
    return losses.linear_cross_entropy(hidden, head, labels, where=batch["where"], chunk_size=2)


def squared(params, batch):
    target = batch["labels"].unsqueeze(-1).double().expand_as(batch["logits"])
    return losses.squared_error(logits(params, batch), target, where=batch["where"][..., None])


def hinge(params, batch):
    """Flat and 0 where the margin is kept."""
    margin = (1 - logits(params, batch)[..., 0]).clamp_min(0)
    return LossTerms((margin * batch["where"]).sum(), batch["where"].sum())


def z(params, batch):
    return losses.z_loss(logits(params, batch))  # Over all positions, whatever is masked.


def rounded_to(dtype):
    def loss_fn(params, batch):
        ce = cross_entropy("token")(params, batch | {"logits": batch["logits"].to(dtype)})
        return ce._replace(num=ce.num.to(torch.float32))

    return loss_fn


def every_third_quick(names):
    """All names; two thirds of them are for the slow suite."""
    slow = pytest.mark.slow
    return [name if i % 3 == 0 else pytest.param(name, marks=slow) for i, name in enumerate(names)]


RIGHT = {
    **{f"by {w}": cross_entropy(w) for w in WEIGHTINGS},
    **{f"packed by {w}": cross_entropy(w, packed=True) for w in WEIGHTINGS},
    "linear": linear,
    "squared": squared,
    "hinge": hinge,
    "two terms, one of all positions": combine(ce=cross_entropy("token"), z=z),
    "float32 sums of float64 params": rounded_to(torch.float32),
}


@pytest.mark.parametrize("name", every_third_quick(RIGHT))
def test_right_losses_hold(name):
    report = report_loss(RIGHT[name], PARAMS, token_batches(), **FEW)
    assert [(v.law, str(v.violation)) for v in report.broken] == []
    assert report.failed == ()
    assert [v.law for v in report.verdicts] == list(LAWS)


@pytest.mark.parametrize("name", ["by token", "packed by sample", "hinge"])
def test_right_losses_hold_on_one_given_batch(name):
    labels = torch.tensor([[1, 0, 2, -100], [2, 1, -100, -100], [0, -100, 1, 1]])
    batch = {
        "logits": torch.sin(torch.arange(36.0, dtype=torch.float64)).reshape(3, 4, 3),
        "labels": labels,
        "where": torch.ones(3, 4, dtype=torch.bool),
        "sample_ids": torch.arange(3).unsqueeze(1).expand(3, 4).contiguous(),
    }
    report = check_loss(RIGHT[name], PARAMS, batch, **FEW)
    assert {v.status for v in report.verdicts} == {"holds"}
    padding = next(v for v in report.verdicts if v.law == "padding")
    assert "not tried" not in padding.words


def token_losses(params, batch):
    return params["w"] * batch["losses"]


def by(num, den):
    def loss_fn(params, batch):
        mask = batch["mask"]
        return LossTerms(num(token_losses(params, batch), mask), den(mask, batch))

    return loss_fn


def total(values, mask):
    return (values * mask).sum()


def count(mask, batch):
    return mask.sum()


def mean_of_rows(params, batch):
    mask = batch["mask"]
    rows = (token_losses(params, batch) * mask).sum(1) / mask.sum(1).clamp_min(1)
    return LossTerms(rows.mean() * mask.sum(), mask.sum())


def by_position(params, batch):
    mask = batch["mask"]
    place = torch.arange(1, len(mask) + 1).unsqueeze(1)
    return LossTerms((token_losses(params, batch) * mask * place).sum(), mask.sum())


def neighbour(params, batch):
    mask = batch["mask"]
    shifted = token_losses(params, batch).roll(1, 0).detach()
    return LossTerms((token_losses(params, batch) * shifted * mask).sum(), mask.sum())


def greedy(params, batch):
    mask = batch.pop("mask")
    return LossTerms((token_losses(params, batch) * mask).sum(), mask.sum())


def in_place(params, batch):
    batch["losses"] *= 2
    return by(total, count)(params, batch)


def global_draw(params, batch):
    kept = torch.rand(batch["losses"].shape) < 0.5
    return LossTerms(
        (token_losses(params, batch) * batch["mask"] * kept).sum(), batch["mask"].sum()
    )


def draw_by_place(params, batch):
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(batch["losses"].shape, generator=generator) < 0.5
    return LossTerms(
        (token_losses(params, batch) * batch["mask"] * kept).sum(), batch["mask"].sum()
    )


def draw_by_row(params, batch):
    """Right: the draw depends on the row's own losses alone."""
    ids = (batch["losses"].sum(1) * 8).long()
    keys = random.fold_in(random.key(0).expand(len(ids), 2), ids)
    kept = random.bernoulli(keys, ())
    sums = (token_losses(params, batch) * batch["mask"]).sum(1) * kept
    return LossTerms(sums.sum(), batch["mask"].sum())


def reads(params, batch):
    scale = 1.0 if batch["mask"].sum().item() >= 0 else 2.0
    terms = by(total, count)(params, batch)
    return terms._replace(num=terms.num * scale)


def den_of_params(params, batch):
    terms = by(total, count)(params, batch)
    return terms._replace(den=terms.den * params["w"])


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * (1.0 if grads[0].isfinite().item() else 0.0)


calls = []


def remembers(params, batch):
    calls.append(1)
    terms = by(total, count)(params, batch)
    return terms._replace(num=terms.num * len(calls))


FAULTS = {
    "mean of row means": (mean_of_rows, "additivity padding emptiness"),
    "mean inside": (by(lambda v, m: (v * m).mean(), count), "additivity padding emptiness"),
    "a neighbour": (neighbour, "additivity"),
    "by position": (by_position, "permutation"),
    "count of positions": (by(total, lambda m, b: m.numel()), "padding mask_agreement emptiness"),
    "count before the shift": (
        by(total, lambda m, b: (b["labels"] != -100).sum()),
        "mask_agreement",
    ),
    "count of the attention mask": (
        by(total, lambda m, b: b["attention_mask"].sum()),
        "padding mask_agreement emptiness",
    ),
    "a mask the sum lacks": (by(lambda v, m: v.sum(), count), "padding mask_agreement emptiness"),
    "clamped count": (by(total, lambda m, b: m.sum().clamp_min(1)), "emptiness"),
    "mean of nothing": (
        by(lambda v, m: (v * m).sum() / m.sum() * m.sum(), count),
        "emptiness",
    ),
    "constant": (by(lambda v, m: (v * m).sum() + 1, count), "additivity emptiness"),
    "den of params": (den_of_params, "den_independence"),
    "pops": (greedy, "purity"),
    "in place": (in_place, "purity"),
    "global draw": (global_draw, "purity repeatability keyed_randomness"),
    "draw by place": (draw_by_place, "permutation keyed_randomness"),
    "item": (reads, "no_host_sync"),
    "item in backward": (by(lambda v, m: Reads.apply((v * m).sum()), count), "no_host_sync"),
    "state": (remembers, "repeatability"),
}
# What breaks of itself where something else is broken.
ALONG = {
    "by position": {"additivity", "keyed_randomness"},
    "draw by place": {"additivity", "padding", "mask_agreement"},
    "state": {"keyed_randomness"},
}


def run_code(code, **names):
    exec(code, {**names})


@pytest.mark.parametrize("name", every_third_quick(FAULTS))
def test_planted_faults_break_their_law(name):
    loss_fn, broken = FAULTS[name]
    report = report_loss(loss_fn, PARAMS, tokens().batches, **FEW)
    assert {v.law for v in report.broken} - ALONG.get(name, set()) == set(broken.split())
    assert report.failed == ()
    for verdict in report.broken:
        assert verdict.violation is not None
        assert verdict.violation.law == verdict.law
        assert verdict.code
        assert verdict.code in str(verdict.violation).replace("\n    ", "\n")
        if name not in ("state", "global draw"):
            assert_reproduced(verdict, loss_fn)


def assert_reproduced(verdict, loss_fn):
    with pytest.raises(LawViolation) as caught:
        run_code(verdict.code, loss_fn=loss_fn, params=PARAMS)
    terms = {each.term for each in verdict.violation.differences}
    assert terms <= {each.term for each in caught.value.differences}


def test_a_keyed_draw_holds():
    report = report_loss(draw_by_row, PARAMS, tokens().batches, **FEW)
    # Rows with one sum share a key, which is no fault of this law.
    assert "keyed_randomness" not in {v.law for v in report.broken}


def test_examples_are_shrunk():
    mean = by(lambda v, m: (v * m).mean(), count)
    report = report_loss(mean, PARAMS, tokens().batches, laws=["additivity"], **FEW)
    (verdict,) = report.verdicts
    assert verdict.example.splitlines()[0].startswith("micro-batch 1 of 1 row: num ")
    assert len(verdict.example.splitlines()) == 3
    assert "joined of 2 rows" in verdict.example


def test_a_term_per_micro_batch_is_said_to_be_one():
    problem = tokens_and_balance()
    report = report_loss(problem.loss_fn, problem.params, problem.batches, laws=["additivity"])
    (verdict,) = report.verdicts
    assert verdict.words.startswith("den['balance'] is 1 for each micro-batch, whatever is in it")
    assert {d.term for d in verdict.violation.differences} >= {"num['balance']", "den['balance']"}
    assert "num['ce']" not in {d.term for d in verdict.violation.differences}


def test_check_loss_raises_with_the_report():
    wrong = FAULTS["count before the shift"][0]
    with pytest.raises(CheckFailed) as caught:
        check_loss(wrong, PARAMS, tokens().batches, **FEW)
    assert [v.law for v in caught.value.report.broken] == ["mask_agreement"]


def test_a_loss_that_raises_fails_with_the_smallest_batch():
    def loss_fn(params, batch):
        if num_rows(batch) > 2:
            raise RuntimeError("no more than two rows")
        return cross_entropy("token")(params, batch)

    report = report_loss(loss_fn, PARAMS, token_batches(), budget_s=10)
    (verdict,) = report.failed
    assert report.exit_code == 2
    expected = "the loss function raised RuntimeError: no more than two rows (at test_check_loss.py"
    assert verdict.words.startswith(expected)
    assert verdict.example.startswith("batch of 3 rows: raises RuntimeError")
    with pytest.raises(RuntimeError, match="no more than two rows"):
        run_code(verdict.code, loss_fn=loss_fn, params=PARAMS)


def test_a_loss_that_refuses_empty_batches_breaks_emptiness_alone():
    def loss_fn(params, batch):
        if not batch["mask"].any():
            raise ValueError("nothing to learn from")
        return by(total, count)(params, batch)

    report = report_loss(loss_fn, PARAMS, tokens().batches, **FEW)
    assert {v.law for v in report.broken} == {"emptiness", "no_host_sync"}
    assert report.failed == ()
    emptiness = next(v for v in report.broken if v.law == "emptiness")
    (difference,) = emptiness.violation.differences
    assert difference.got.startswith("ValueError: nothing to learn from (at test_check_loss.py:")


def test_the_time_is_kept_while_drawing_and_shrinking():
    def slow(params, batch):
        time.sleep(0.02)
        return by(lambda v, m: (v * m).mean(), count)(params, batch)

    started = time.monotonic()
    report = report_loss(slow, PARAMS, tokens().batches, budget_s=4)
    assert time.monotonic() - started < 7  # An example that has begun is finished.
    additivity = report.verdicts[0]
    assert additivity.status == "broken"
    assert {v.status for v in report.verdicts} <= {"holds", "broken", "skipped"}


def test_one_seed_one_report():
    wrong = FAULTS["count before the shift"][0]
    options = {"laws": ["mask_agreement"], "max_examples": 4, "seed": 3, "budget_s": 120}
    first, second = (report_loss(wrong, PARAMS, tokens().batches, **options) for _ in range(2))
    assert first.verdicts[0].code == second.verdicts[0].code
    assert first.examples == second.examples


def test_nothing_outside_is_changed(capfd):
    params, batch = {"w": torch.tensor(2.0).double()}, token_batch([[8.0], [2.0, 2.0]])
    kept = {name: value.clone() for name, value in batch.items()}
    state = torch.get_rng_state()
    for loss_fn in (in_place, greedy, global_draw):
        report_loss(loss_fn, params, batch, max_examples=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert params["w"] == 2
    assert all(torch.equal(batch[name], value) for name, value in kept.items())
    assert capfd.readouterr() == ("", "")


def test_given_pads_and_empty_batch_are_used():
    def loss_fn(w, batch):
        return LossTerms((w * batch["x"]).sum(), (batch["x"] != 7).sum())

    def pad_row(batch, n):
        return {"x": torch.cat([batch["x"], torch.full((n,), 7.0).double()])}

    batch = {"x": torch.tensor([1.0, 2.0, 3.0]).double()}
    without = report_loss(loss_fn, PARAMS["w"], batch)
    assert next(v for v in without.verdicts if v.law == "padding").status == "skipped"
    report = report_loss(loss_fn, PARAMS["w"], batch, pad_row=pad_row, empty={"x": torch.zeros(1)})
    broken = {v.law: v for v in report.broken}
    assert set(broken) == {"padding", "emptiness"}
    assert "pad_row=pad_row" in broken["padding"].code


def test_fields_that_are_no_masks_are_left_alone():
    def loss_fn(w, batch):  # A bool that is an input, integer targets that -100 does not mask.
        error = w * batch["x"] - batch["target"] + batch["flag"]
        return LossTerms(error.square().sum(), error.numel())

    batch = {
        "x": torch.randn(4, 3).double(),
        "target": torch.randint(5, (4, 3)),
        "flag": torch.rand(4, 3) < 0.5,
    }
    report = report_loss(loss_fn, PARAMS["w"], batch)
    assert report.exit_code == 0
    padding = next(v for v in report.verdicts if v.law == "padding")
    assert padding.status == "skipped"
    assert "masking all of batch['flag'] and batch['target'] changes no sum to 0" in padding.words


def test_a_sequence_of_batches_and_tuples_of_tensors():
    def loss_fn(w, batch):
        x, y = batch
        return LossTerms(((w * x - y) ** 2).sum(), len(x))

    pair = (torch.randn(3).double(), torch.randn(3).double())
    for batches in (pair, [pair, pair], list(pair), iter([pair])):
        assert report_loss(loss_fn, PARAMS["w"], batches, max_examples=4).exit_code == 0
    singles = [tuple(x[i : i + 1] for x in pair) for i in range(3)]
    report = report_loss(loss_fn, PARAMS["w"], singles, laws=["additivity"], join=join_rows)
    assert report.verdicts[0].status == "holds"


def test_batches_without_rows():
    def loss_fn(w, batch):
        return LossTerms(w * batch["x"], 1)

    report = report_loss(loss_fn, PARAMS["w"], {"x": torch.tensor(2.0)})
    words = {v.law: v.words for v in report.verdicts if v.status == "skipped"}
    assert "no common leading size" in words["additivity"]
    assert {v.law for v in report.verdicts if v.status == "holds"} >= {"purity", "repeatability"}


def test_laws_are_chosen_by_name():
    report = report_loss(by(total, count), PARAMS, tokens().batches, laws=["purity", "padding"])
    assert [v.law for v in report.verdicts] == ["purity", "padding"]
    with pytest.raises(ValueError, match=r"check_loss: laws must be among .* got \['speed'\]"):
        report_loss(by(total, count), PARAMS, tokens().batches, laws=["speed"])
    with pytest.raises(ValueError, match="check_loss: needs at least one batch, got none"):
        report_loss(by(total, count), PARAMS, [])


class Net(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), *parts, nn.Linear(4, 1)).double()

    def forward(self, x):
        return self.encoder(x)[:, 0]


def net_loss(net, batch):
    return ((net(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["y"])


NET_BATCH = {"x": torch.randn(6, 3).double(), "y": torch.randn(6).double()}


def verdicts_of(net, **options):
    report = report_loss(net_loss, net, NET_BATCH, **FEW, **options)
    return {v.law: v for v in report.verdicts}


def test_a_module_in_eval_mode_holds():
    net = Net(nn.BatchNorm1d(4), nn.Dropout(0.3)).eval()
    assert {v.status for v in verdicts_of(net).values()} <= {"holds", "skipped"}


def test_dropout_in_train_mode_is_named():
    verdicts = verdicts_of(Net(nn.Dropout(0.3)))
    said = "params.encoder.1 (Dropout) is in train mode and draws from the global generator. Call"
    for law in ("purity", "repeatability", "keyed_randomness"):
        assert verdicts[law].status == "broken"
        assert verdicts[law].words.startswith(said)
    assert verdicts["additivity"].words.endswith("see repeatability")
    assert verdicts["no_host_sync"].status == "holds"


def test_batch_norm_in_train_mode_is_named():
    net = Net(nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    verdicts = verdicts_of(net)
    assert verdicts["additivity"].status == "broken"
    said = "params.encoder.1 (BatchNorm1d) is in train mode and uses statistics of each micro-batch"
    assert verdicts["additivity"].words.startswith(said)
    assert verdicts["purity"].words.startswith(f"{said} and keeps running averages")
    assert verdicts["repeatability"].status == "holds"
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
    assert net.training


def test_a_drawing_function_inside_a_part_is_named_by_the_part():
    class Noisy(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5)

    words = verdicts_of(Net(Noisy()))["repeatability"].words
    assert words.startswith("params.encoder.1 (Noisy) is in train mode and draws")


@pytest.mark.parametrize("returns", ["mean", "output"])
def test_a_mean_is_identified_and_its_emptiness_broken(returns):
    def loss_fn(params, batch):
        scaled = logits(params, batch)
        loss = F.cross_entropy(scaled.flatten(0, 1), batch["labels"].flatten())
        return loss if returns == "mean" else {"loss": loss, "logits": scaled}

    batches = token_batches(min_rows=2, min_columns=3)
    report = report_loss(loss_fn, PARAMS, batches, **FEW)
    first = report.verdicts[0]
    assert (first.law, first.status) == ("denominator", "holds")
    assert "a mean over (batch['labels'] != -100).sum()" in first.words
    assert {v.law for v in report.broken} == {"emptiness"}
    assert report.broken[0].words == "A mean over nothing is nan; return the sum and the count."
    with pytest.raises(AssertionError, match="emptiness"):
        run_code(report.broken[0].code, loss_fn=loss_fn, params=PARAMS)


def test_a_mean_that_no_den_fixes():
    def loss_fn(params, batch):
        losses_of = F.cross_entropy(
            logits(params, batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        count = (batch["labels"] != -100).sum()
        return losses_of / count + (params["w"] * batch["logits"]).square().mean()

    report = report_loss(loss_fn, PARAMS, token_batches(min_rows=3, min_columns=3), **FEW)
    verdicts = {v.law: v for v in report.verdicts}
    assert verdicts["denominator"].status == "broken"
    assert "no den makes it additive" in verdicts["denominator"].words
    assert verdicts["denominator"].violation.law == "denominator"
    assert verdicts["additivity"].words == "the loss function returns no den; see denominator"


def test_a_strategy_of_empty_batches():
    empty = st.just({"x": torch.zeros(0)})
    report = report_loss(lambda w, batch: LossTerms((w * batch["x"]).sum(), 1), PARAMS["w"], empty)
    assert {v.status for v in report.verdicts} == {"skipped"}


@pytest.mark.parametrize("family", [pytest.param("Llama", marks=pytest.mark.slow), "Qwen3"])
def test_hugging_face_models(family):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(11, (4, 6))
    attention = (torch.arange(6) < torch.tensor([6, 4, 5, 6])[:, None]).long()
    labels = torch.where(attention > 0, ids, -100)
    batch = {"input_ids": ids, "attention_mask": attention, "labels": labels}
    report = report_loss(model, None, batch, max_examples=3)
    verdicts = {v.law: v for v in report.verdicts}
    assert verdicts["denominator"].words.endswith(
        "a mean over (batch['labels'][:, 1:] != -100).sum()"
    )
    for law in ("additivity", "permutation", "padding", "mask_agreement", "purity"):
        assert verdicts[law].status == "holds"
    assert verdicts["emptiness"].status == "broken"
    assert outputs.read_output(model(**batch)).kind == "scalar"
