"""Each law holds for a right loss and catches planted faults, with a message that says where."""

import random
import re

import pytest
import torch
import torch.distributed as c10d
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import _functional_collectives as funcol

from numden.property_tests import LawViolation, laws
from numden.property_tests.rows import join_rows, num_rows, take_rows
from numden.property_tests.strategies import dyadic_tensors, masks, token_batches, windows
from numden.property_tests.violation import check_equal
from numden.pure import LossTerms
from numden.pure.losses import cross_entropy

PARAMS = {"w": torch.tensor([1.0, -2.0]).double(), "frozen_ids": torch.tensor([3])}


def squared_error(params, batch):
    """A right loss: exact for dyadic values."""
    error = (batch["x"] * params["w"]).sum(-1) - batch["y"]
    kept = batch["where"]
    terms = LossTerms(torch.where(kept, error**2, 0.0).sum(), kept.sum())
    return terms, {"mean error": LossTerms(torch.where(kept, error, 0.0).sum(), kept.sum())}


@st.composite
def batches(draw, min_rows=1, max_rows=5):
    rows = draw(st.integers(min_rows, max_rows))
    x, y, where = dyadic_tensors((rows, 2)), dyadic_tensors((rows,)), masks((rows,))
    return {"x": draw(x), "y": draw(y), "where": draw(where)}


def pad_rows(batch, n):
    rows = {"x": torch.full((n, 2), 1e3), "y": torch.ones(n), "where": torch.zeros(n).bool()}
    return {name: torch.cat([batch[name], rows[name].to(batch[name])]) for name in batch}


BATCH = {
    "x": torch.tensor([[1.0, 0.5], [2.0, -1.0], [0.25, 3.0]]).double(),
    "y": torch.tensor([0.5, 1.0, -1.0]).double(),
    "where": torch.tensor([True, True, False]),
}
WINDOW = [take_rows(BATCH, [0]), take_rows(BATCH, [1, 2])]
EMPTY = BATCH | {"where": torch.zeros(3, dtype=torch.bool)}


@given(windows(batches(min_rows=0)))
def test_additivity_holds(window):
    laws.additivity(squared_error, PARAMS, window, exact=True)


@given(batches(), st.data())
def test_permutation_holds(batch, data):
    order = data.draw(st.permutations(range(num_rows(batch))))
    laws.permutation(squared_error, PARAMS, batch, order, exact=True)


@given(batches(), st.integers(0, 3))
def test_padding_holds(batch, num):
    laws.padding(squared_error, PARAMS, batch, pad_row=pad_rows, num=num, exact=True)


@given(batches())
def test_keyed_randomness_holds(batch):
    laws.keyed_randomness(squared_error, PARAMS, batch, exact=True)


@given(batches())
def test_effect_laws_hold(batch):
    laws.purity(squared_error, PARAMS, batch)
    laws.repeatability(squared_error, PARAMS, batch)
    laws.no_collective(squared_error, PARAMS, batch)
    laws.no_host_sync(squared_error, PARAMS, batch)
    laws.den_independence(squared_error, PARAMS, batch, other_params={"w": torch.zeros(2).double()})
    laws.emptiness(squared_error, PARAMS, take_rows(batch, []))
    laws.emptiness(squared_error, PARAMS, batch | {"where": torch.zeros_like(batch["where"])})


def test_laws_hold_for_a_module():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    module[0].bias.requires_grad_(False)

    def loss_fn(module, batch):
        return LossTerms(((module(batch["x"])[:, 0] - batch["y"]) ** 2).sum(), len(batch["y"]))

    laws.additivity(loss_fn, module, WINDOW)
    laws.purity(loss_fn, module, BATCH)
    assert all(parameter.grad is None for parameter in module.parameters())


def per_row(params, batch):
    return ((batch["x"] * params["w"]).sum(-1) - batch["y"]) ** 2


def mean_inside(params, batch):
    return LossTerms(per_row(params, batch).mean(), 1)


def batch_norm_inside(params, batch):
    error = per_row(params, batch)
    return LossTerms((error - error.mean()).abs().sum(), len(error))


def wrong_gradient_alone(params, batch):
    error = per_row(params, batch)
    scale = len(error)
    return LossTerms(error.detach().sum() + scale * (error - error.detach()).sum(), len(error))


def wrong_metric_alone(params, batch):
    error = per_row(params, batch)
    return LossTerms(error.sum(), len(error)), {"mean": LossTerms(error.detach().mean(), 1.0)}


def two_terms_one_mean(params, batch):
    error = per_row(params, batch)
    count = torch.tensor(len(error))
    return LossTerms({"ce": error.sum(), "aux": error.mean()}, {"ce": count, "aux": count})


def cancelling_vector(params, batch):
    error = per_row(params, batch).sum()
    noise = error * len(batch["y"])
    return LossTerms(
        torch.stack([error + noise, error - noise]), torch.tensor([1.0, 1.0]) * len(batch["y"])
    )


@pytest.mark.parametrize(
    ("loss_fn", "term"),
    [
        (mean_inside, "num: expected"),
        (batch_norm_inside, "num: expected"),
        (wrong_gradient_alone, "gradient of num by params['w']["),
        (wrong_metric_alone, "metrics['mean'].num: expected"),
        (two_terms_one_mean, "num['aux']: expected"),
        (cancelling_vector, "gradient of num by params['w']"),
    ],
)
def test_additivity_catches(loss_fn, term):
    with pytest.raises(LawViolation, match=re.escape(term)) as caught:
        laws.additivity(loss_fn, PARAMS, WINDOW)
    assert str(caught.value).startswith("additivity: the sums of joined batches must be the sums")
    assert "\nUsual cause: the loss divides by a count" in str(caught.value)


def test_additivity_names_only_the_wrong_terms():
    with pytest.raises(LawViolation) as caught:
        laws.additivity(two_terms_one_mean, PARAMS, WINDOW)
    assert [each.term for each in caught.value.differences] == [
        "num['aux']",
        "gradient of num['aux'] by params['w']",
    ]


def test_additivity_catches_terms_that_come_and_go():
    def loss_fn(params, batch):
        num = {"ce": per_row(params, batch).sum()}
        if len(batch["y"]) > 2:
            num["extra"] = num["ce"]
        return LossTerms(num, len(batch["y"]))

    with pytest.raises(
        LawViolation, match=re.escape("num['extra']: expected no such value, got one")
    ):
        laws.additivity(loss_fn, PARAMS, WINDOW)


def weight_by_position(params, batch):
    error = per_row(params, batch)
    return LossTerms((error * torch.arange(1, len(error) + 1)).sum(), len(error))


def test_permutation_catches():
    with pytest.raises(LawViolation, match=r"permutation: rows in the order \[2, 0, 1\]"):
        laws.permutation(weight_by_position, PARAMS, BATCH, [2, 0, 1])


def test_permutation_needs_more_than_the_loss():
    # In a batch of equal rows only the gradients, or nothing, can show the order.
    batch = take_rows(BATCH, [1, 1, 1])
    laws.permutation(weight_by_position, PARAMS, batch, [2, 0, 1])


def counts_padding(params, batch):
    terms, _ = squared_error(params, batch)
    return terms._replace(den=batch["where"].numel())


def learns_from_padding(params, batch):
    terms, _ = squared_error(params, batch)
    return terms._replace(num=terms.num + 0.001 * (batch["x"] * params["w"]).sum())


@pytest.mark.parametrize(
    ("loss_fn", "term"), [(counts_padding, "den: expected 3, got 5"), (learns_from_padding, "num:")]
)
def test_padding_catches(loss_fn, term):
    with pytest.raises(LawViolation, match=f"padding: 2 neutral rows(.|\n)*{term}"):
        laws.padding(loss_fn, PARAMS, BATCH, pad_row=pad_rows)


def test_padding_catches_columns():
    def loss_fn(params, batch):
        return LossTerms(params["w"].sum() * batch["x"].sum(), batch["x"].numel())

    def pad_columns(batch, n):
        return batch | {"x": nn.functional.pad(batch["x"], (0, n))}

    with pytest.raises(LawViolation, match="padding: 4 neutral columns"):
        laws.padding(loss_fn, PARAMS, BATCH, pad_columns=pad_columns, num=4)


def test_padding_needs_to_know_how():
    with pytest.raises(ValueError, match="padding: needs to know how to pad, got pad_row=None"):
        laws.padding(squared_error, PARAMS, BATCH)


def clamped_count(params, batch):
    terms, metrics = squared_error(params, batch)
    return terms._replace(den=terms.den.clamp_min(1)), metrics


def mean_of_nothing(params, batch):
    error = per_row(params, batch) * batch["where"]
    return LossTerms(error.sum() / batch["where"].sum(), batch["where"].sum())


def nan_gradient_alone(params, batch):
    # sqrt(0) is 0, but its gradient is infinite, and 0 · inf is NaN.
    return LossTerms((per_row(params, batch) * batch["where"]).sum().sqrt(), batch["where"].sum())


def constant_per_batch(params, batch):
    terms, _ = squared_error(params, batch)
    return terms._replace(num=terms.num + (params["w"] ** 2).sum())


@pytest.mark.parametrize(
    ("loss_fn", "term"),
    [
        (clamped_count, "den: expected 0, got 1"),
        (mean_of_nothing, "num: expected 0.0, got nan"),
        (nan_gradient_alone, r"gradient of num by params\['w'\]\[0\]: expected 0.0, got nan"),
        (constant_per_batch, "num: expected 0.0, got 5.0"),
    ],
)
def test_emptiness_catches(loss_fn, term):
    with pytest.raises(LawViolation, match=f"emptiness: an empty batch(.|\n)*{term}"):
        laws.emptiness(loss_fn, PARAMS, EMPTY)


def weighting_of(name):
    def loss_fn(params, batch):
        logits = batch["logits"] * params["w"][0]
        return cross_entropy(logits, batch["labels"], where=batch["where"], weighting=name)

    return loss_fn


@pytest.mark.parametrize("name", ["token", "sample", "square"])
@given(token_batches())
def test_mask_agreement_holds(name, batch):
    laws.mask_agreement(weighting_of(name), PARAMS, batch)


@given(batches(), st.data())
def test_mask_agreement_holds_at_chosen_places(batch, data):
    places = data.draw(st.lists(st.tuples(st.integers(0, num_rows(batch) - 1)), max_size=2))
    laws.mask_agreement(squared_error, PARAMS, batch, places=places)


def counts_another_mask(params, batch):
    terms, _ = squared_error(params, batch)
    return terms._replace(den=batch["loss_mask"].sum())


def counts_unshifted(params, batch):
    terms, _ = squared_error(params, batch | {"where": batch["where"] & (torch.arange(3) > 0)})
    return terms._replace(den=batch["where"].sum())


@pytest.mark.parametrize(
    ("loss_fn", "term"),
    [
        (counts_padding, "den with all of batch['where'] masked: expected 0, got 3"),
        (counts_unshifted, "num without batch['where'][0]: expected a change, as den goes from 2"),
        (counts_another_mask, "num without batch['loss_mask'][2]: expected a change"),
    ],
)
def test_mask_agreement_catches(loss_fn, term):
    batch = BATCH | {"loss_mask": torch.tensor([True, True, True])}
    with pytest.raises(LawViolation, match=re.escape(term)) as caught:
        laws.mask_agreement(loss_fn, PARAMS, batch)
    assert str(caught.value).startswith("mask_agreement: num and den must come from one mask.")


def test_mask_agreement_needs_a_mask():
    laws.mask_agreement(counts_padding, PARAMS, BATCH, fields=[])


def test_a_violation_ends_with_its_code():
    violation = LawViolation("law", "a is b.", [], "A slip.", code="import torch\nlaws.law()")
    assert str(violation).endswith("To reproduce:\n    import torch\n    laws.law()")


def test_den_independence_catches():
    def attached(params, batch):
        return LossTerms({"a": params["w"].sum()}, {"a": params["w"].sum() ** 2})

    with pytest.raises(LawViolation, match=re.escape("den['a']: expected a tensor without grad")):
        laws.den_independence(attached, PARAMS, BATCH)

    def detached(params, batch):
        return LossTerms(params["w"].sum(), params["w"].sum().detach())

    laws.den_independence(detached, PARAMS, BATCH)
    with pytest.raises(LawViolation, match=r"den: expected -1\.0, got 0\.0"):
        laws.den_independence(detached, PARAMS, BATCH, other_params={"w": torch.zeros(2).double()})


def global_dropout(params, batch):
    error = per_row(params, batch)
    return LossTerms((error * (torch.rand(len(error)) < 0.5)).sum(), len(error))


def draw_by_position(params, batch):
    error = per_row(params, batch)
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(len(error), generator=generator)
    return LossTerms((error * noise).sum(), len(error))


@pytest.mark.parametrize("loss_fn", [global_dropout, draw_by_position])
def test_keyed_randomness_catches(loss_fn):
    with pytest.raises(LawViolation, match="keyed_randomness: rows one by one must add up"):
        laws.keyed_randomness(loss_fn, PARAMS, BATCH)


def test_draws_by_position_are_pure_and_repeatable():
    laws.purity(draw_by_position, PARAMS, BATCH)
    laws.repeatability(draw_by_position, PARAMS, BATCH)


def change_params(params, batch):
    with torch.no_grad():
        params["w"].mul_(2)


def replace_params(params, batch):
    params["w"] = params["w"] * 2


def change_batch(params, batch):
    batch["y"].add_(1)


def pop_from_batch(params, batch):
    batch.pop("where")


def add_to_batch(params, batch):
    batch["extra"] = batch["y"]


def backward_inside(params, batch):
    (params["w"] ** 2).sum().backward()


def draw_torch(params, batch):
    torch.rand(1)


def reseed_python(params, batch):
    random.random()


def draw_numpy(params, batch):
    numpy = pytest.importorskip("numpy")
    numpy.random.rand()


@pytest.mark.parametrize(
    ("effect", "term"),
    [
        (change_params, "params['w'][1]: expected -2.0, got -4.0"),
        (replace_params, "params['w']"),
        (change_batch, "batch['y'][0]: expected 0.5, got 1.5"),
        (pop_from_batch, "batch['where']: expected tensor([ True,  True, False]), got none"),
        (add_to_batch, "batch['extra']: expected none"),
        (backward_inside, "params['w'].grad: expected None"),
        (draw_torch, "torch.get_rng_state(): expected the state before, got another"),
        (reseed_python, "random.getstate(): expected the state before, got another"),
        (draw_numpy, "numpy.random.get_state(): expected the state before, got another"),
    ],
)
def test_purity_catches(effect, term):
    pytest.importorskip("numpy")

    def loss_fn(params, batch):
        terms = squared_error(dict(params), dict(batch))
        effect(params, batch)
        return terms

    copies = {name: value.clone() for name, value in PARAMS.items()}
    batch = {name: value.clone() for name, value in BATCH.items()}
    # A change in place of what the backward pass needs is an error of autograd, seen first.
    expected = (
        (LawViolation, RuntimeError) if effect in (change_params, change_batch) else LawViolation
    )
    with pytest.raises(expected) as caught:
        laws.purity(loss_fn, copies, batch)
    if isinstance(caught.value, LawViolation):
        assert term in str(caught.value)


def test_purity_catches_a_change_in_the_backward_pass():
    class Leak(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, store):
            ctx.store = store
            return x.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            ctx.store.add_(1)
            return grad_outputs[0], None

    def loss_fn(params, batch):
        return LossTerms(Leak.apply(params["w"], batch["y"]).sum(), 1)

    with pytest.raises(LawViolation, match=re.escape("batch['y'][0]")):
        laws.purity(loss_fn, PARAMS, {name: value.clone() for name, value in BATCH.items()})


def test_purity_catches_buffers_and_train_mode():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).double()

    def loss_fn(module, batch):
        out = module(batch["x"])
        return LossTerms(out.sum(), len(out))

    with pytest.raises(LawViolation, match=r"params\.0\.running_mean"):
        laws.purity(loss_fn, module, BATCH)
    laws.purity(loss_fn, module.eval(), BATCH)

    def switch(module, batch):
        return loss_fn(module.train(), batch)

    with pytest.raises(LawViolation, match=r"params\.1\.training: expected False, got True"):
        laws.purity(switch, module.eval(), BATCH)


def test_repeatability_catches():
    with pytest.raises(LawViolation, match="repeatability: the same input must give the same bits"):
        laws.repeatability(lambda p, b: LossTerms(p["w"].sum() * torch.rand(()), 1), PARAMS, BATCH)
    calls = []

    def stateful(params, batch):
        calls.append(1)
        return LossTerms(params["w"].sum(), len(calls))

    with pytest.raises(LawViolation, match="den: expected 1, got 2"):
        laws.repeatability(stateful, PARAMS, BATCH)


def _world():
    return c10d.distributed_c10d._get_default_group()


class SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return funcol.wait_tensor(funcol.all_reduce(grad_outputs[0], "sum", _world()))


def in_place_sum(x):
    total = x.detach().clone()
    c10d.all_reduce(total)
    return x


def functional_sum(x):
    return x + funcol.all_reduce(x.detach(), "sum", _world())


@pytest.mark.parametrize(
    ("collective", "seen"),
    [
        (in_place_sum, "forward: expected none, got c10d.allreduce_ at .*test_laws.py:"),
        (
            functional_sum,
            "forward: expected none, got _c10d_functional.all_reduce at .*test_laws.py:",
        ),
        (
            SumInBackward.apply,
            "backward: expected none, got _c10d_functional.all_reduce at .*test_laws",
        ),
    ],
)
def test_no_collective_catches(two_ranks, collective, seen):
    def loss_fn(params, batch):
        return LossTerms(collective(params["w"].sum()), 1)

    with pytest.raises(LawViolation, match=seen):
        laws.no_collective(loss_fn, PARAMS, BATCH)


class ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,) = grad_outputs
        return grad * (2.0 if grad.item() > 5 else 1.0)


@pytest.mark.parametrize(
    ("read", "seen"),
    [
        (lambda x: x * (x.item() > 0), "forward: expected none, got aten._local_scalar_dense at "),
        (ReadInBackward.apply, "backward: expected none, got aten._local_scalar_dense at "),
    ],
)
def test_no_host_sync_catches(read, seen):
    with pytest.raises(LawViolation, match=seen + r".*test_laws\.py:"):
        laws.no_host_sync(lambda p, b: LossTerms(read(p["w"].sum()), 1), PARAMS, BATCH)


def test_scaled_window_breaks_homogeneity():
    def grad_of(divisor):
        def window_grad(loss_fn):
            def run(params, window):
                parts = [loss_fn(params, batch) for batch in window]
                parts = [part if isinstance(part, LossTerms) else part[0] for part in parts]
                num, den = sum(p.num for p in parts), sum(p.den for p in parts)
                return num / divisor(den, window), {"w": num / divisor(den, window)}

            return run

        return window_grad

    laws.homogeneity(grad_of(lambda den, window: den), squared_error, PARAMS, WINDOW)
    with pytest.raises(LawViolation, match=r"homogeneity: all sums times 2\.0 must change nothing"):
        laws.homogeneity(grad_of(lambda den, window: len(window)), squared_error, PARAMS, WINDOW)
    with pytest.raises(LawViolation, match="homogeneity: all sums times"):
        laws.homogeneity(grad_of(lambda den, window: den * den), squared_error, PARAMS, WINDOW)


def sums_by_hand(params, world):
    parts = [squared_error(params, batch)[0] for window in world for batch in window]
    num = torch.stack([part.num for part in parts]).sum()
    den = sum(part.den for part in parts)
    return num / den, {"w": torch.autograd.grad(num / den, params["w"])[0]}


def mean_of_rank_means(params, world):
    return_of = [sums_by_hand(params, [window]) for window in world if window]
    loss = sum(loss for loss, _ in return_of) / len(world)
    return loss, {"w": sum(grads["w"] for _, grads in return_of) / len(world)}


def test_split_invariance_catches():
    params = {"w": PARAMS["w"].clone().requires_grad_()}
    batch = BATCH | {"where": torch.ones(3, dtype=torch.bool)}
    parts = [take_rows(batch, rows) for rows in ([0], [1], [2])]
    one, uneven = [[batch]], [[parts[0]], [join_rows(parts[1:])]]
    laws.split_invariance(sums_by_hand, params, [one, [parts], [parts, []], uneven])
    with pytest.raises(
        LawViolation, match=r"micro-steps by rank \[1, 1\] must give what \[1\] gives"
    ):
        laws.split_invariance(mean_of_rank_means, params, [one, uneven])


def test_check_equal_tolerance():
    def check(a, b, **options):
        a, b = {"x": torch.as_tensor(a)}, {"x": torch.as_tensor(b)}
        check_equal("law", "rule", "cause", a, b, **options)

    rounded = torch.tensor([1.0, 1e-17], dtype=torch.float64)
    check(torch.tensor([1.0, 0.0]).double(), rounded)
    with pytest.raises(
        LawViolation, match=r"x\[1\]: expected 0.0, got 1e-17 \(1 of 2 elements differ\)"
    ):
        check(torch.tensor([1.0, 0.0]).double(), rounded, exact=True)
    with pytest.raises(LawViolation, match=r"x: expected 1\.0, got 1\.0001"):
        check(torch.tensor(1.0).double(), torch.tensor(1.0001, dtype=torch.float64))
    check(torch.tensor(1.0).double(), torch.tensor(1.0001, dtype=torch.float64), rtol=1e-3)
    check(torch.tensor(1.0), torch.tensor(1.0001))  # float32 sums of thousands differ by as much
    with pytest.raises(LawViolation, match="x: expected nan, got nan"):
        check(torch.tensor(torch.nan), torch.tensor(torch.nan))
    with pytest.raises(LawViolation, match=r"x: expected shape \[2\], got \[\]"):
        check(rounded, rounded[0])
    with pytest.raises(LawViolation, match="x: expected 3, got 4"):
        check(3, 4)


def test_rows_errors():
    with pytest.raises(ValueError, match=r"num_rows: the tensors .* got \[1, 2\]"):
        num_rows({"a": torch.zeros(1), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match="join_rows: a value that belongs to all rows"):
        join_rows([{"x": torch.zeros(1), "c": 1}, {"x": torch.zeros(1), "c": 2}])
    assert join_rows([{"x": torch.zeros(1), "c": 1}] * 2)["c"] == 1


def test_violation_survives_pickling():
    import pickle

    with pytest.raises(LawViolation) as caught:
        laws.emptiness(clamped_count, PARAMS, EMPTY)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
