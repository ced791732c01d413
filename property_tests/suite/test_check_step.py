"""check_step: right steps pass, wrong ones are flagged, and its own failure modes are verdicts."""

import time

import pytest
import torch

from numden.property_tests import CheckFailed, StepResult, World, check_step, report_step
from numden.property_tests.worlds.problems import tokens, tokens_and_balance
from numden.pure import LossTerms, optim, window_grad

QUICK = {"max_examples": 12, "budget_s": 10.0}


def token_sums(params, batch):
    return params["w"] * (batch["losses"] * batch["mask"]).sum(), batch["mask"].sum().double()


def mean_of(params, batches):
    nums, dens = zip(*[token_sums(params, batch) for batch in batches], strict=True)
    return sum(nums) / sum(dens)


def flat(world):
    return [batch for rank in world.data_ranks for batch in world[rank]]


def right(params, world):
    mean = mean_of(params, flat(world)).detach()
    return StepResult(grads={"w": mean}, loss=mean, eval_loss=float(mean))


def verdicts(report):
    return {verdict.law: verdict for verdict in report.verdicts}


def test_a_right_step_holds_in_all_it_shows():
    report = check_step(right)
    assert {law: verdict.status for law, verdict in verdicts(report).items()} == dict.fromkeys(
        ["runs", "purity", "dtype", "repeatability", "gradient", "logged loss", "evaluation loss"],
        "holds",
    )
    assert report.examples > 30


def test_our_own_window_of_terms_with_dens_of_their_own_holds():
    problem = tokens_and_balance()

    def step(params, world):
        return window_grad(problem.loss_fn, problem.objective)(params, flat(world))

    check_step(step, *problem[:3], objective=problem.objective, max_examples=20)


def test_right_with_ranks_that_differ_in_their_number_of_micro_steps():
    seen = set()

    def step(params, world):
        seen.add(tuple(map(len, world)))
        return right(params, world)

    check_step(step, uneven=True, ranks=(2, 3), max_examples=20)
    assert any(len(set(lengths)) > 1 for lengths in seen)


def test_ranks_of_tp_see_the_same_batches_and_count_once():
    def step(params, world):
        assert all(torch.equal(a["losses"], b["losses"]) for a, b in zip(*world[:2], strict=True))
        return right(params, world)

    check_step(step, mesh={"dp": 2, "tp": 2}, **QUICK)


def test_a_failure_is_shrunk_to_the_smallest_window():
    def mean_of_means(params, world):
        means = [n / d.clamp(min=1) for n, d in [token_sums(params, b) for b in world[0]]]
        return {"w": sum(means) / len(means)}

    with pytest.raises(CheckFailed, match="mean of micro-step means") as caught:
        check_step(mean_of_means, ranks=1)
    (broken,) = caught.value.report.broken
    assert "1 rank, window of 2 micro-steps" in broken.example
    assert broken.violation.differences[0].term == "grads['w']"


@pytest.mark.slow
def test_the_code_of_an_example_repeats_it():
    def doubled(params, world):
        return {"w": 2 * right(params, world).grads["w"]}

    (broken,) = report_step(doubled, **QUICK).broken
    names = {"step": doubled, "params": tokens().params}
    exec(broken.code.rpartition("\n")[0], names)
    expected, got = broken.violation.differences[0][1:]
    assert float(doubled(names["params"], names["world"])["w"]) == float(got) == 2 * float(expected)


def test_a_step_that_raises_always_is_no_verdict_on_its_scale():
    def needs_a_gpu(params, world):
        torch.zeros(1, device="cuda:7")

    report = report_step(needs_a_gpu, **QUICK)
    assert report.exit_code == 2
    assert [verdict.law for verdict in report.failed] == ["runs"]
    assert "the step raised" in report.failed[0].words
    with pytest.raises(CheckFailed, match="the step raised"):
        report.require()


def test_a_step_that_raises_on_empty_micro_steps_is_broken():
    def step(params, world):
        if not all(batch["mask"].any() for batch in flat(world)):
            raise ZeroDivisionError("no tokens")
        return right(params, world)

    report = report_step(step, max_examples=30)
    broken = verdicts(report)["runs"]
    assert report.exit_code == 1
    assert broken.status == "broken"
    assert "ZeroDivisionError: no tokens" in broken.words
    assert "count 0" in broken.example
    assert verdicts(report)["gradient"].status == "holds"


def test_a_step_that_hangs_is_stopped():
    def step(params, world):
        time.sleep(30)

    start = time.monotonic()
    report = report_step(step, timeout_s=0.2, **QUICK)
    assert time.monotonic() - start < 15
    assert report.exit_code == 2
    assert "hangs: took longer than 0.2 s" in report.failed[0].words


def test_nan_is_flagged():
    def step(params, world):
        return {"w": torch.tensor(float("nan")).double()}

    assert verdicts(report_step(step, **QUICK))["gradient"].status == "broken"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"v": torch.tensor(1.0)}, r"must be a tree like the params, got grads\['v'\]"),
        ({"w": torch.ones(2)}, r"must have the shape \[\] of the param, got \[2\]"),
        (None, "returned None"),
    ],
    ids=["tree", "shape", "none"],
)
def test_a_wrong_tree_is_named(result, message):
    report = report_step(lambda params, world: result, **QUICK)
    assert report.exit_code == 2
    with pytest.raises(CheckFailed, match=message):
        report.require()


def test_a_coarser_dtype_is_flagged():
    def step(params, world):
        return {"w": right(params, world).grads["w"].half()}

    broken = verdicts(report_step(step, **QUICK))["dtype"]
    assert broken.status == "broken"
    assert "torch.float16" in broken.words


def test_a_random_step_is_flagged_and_not_compared():
    def step(params, world):
        return {"w": right(params, world).grads["w"] + torch.rand(()).double()}

    report = report_step(step, **QUICK)
    assert verdicts(report)["repeatability"].status == "broken"
    assert "gradient" not in verdicts(report)


def test_a_gradient_that_is_never_zeroed_is_named():
    held = torch.zeros(()).double()

    def step(params, world):
        held.add_(right(params, world).grads["w"])
        return {"w": held.clone()}

    broken = verdicts(report_step(step, **QUICK))["repeatability"]
    assert broken.diagnoses[0].faults == ("gradient left over from the window before",)


@pytest.mark.parametrize("what", ["params", "batch"])
def test_mutated_inputs_are_flagged(what):
    def step(params, world):
        result = right(params, world)
        (params["w"] if what == "params" else world[0][0]["losses"]).mul_(2)
        return result

    broken = verdicts(report_step(step, **QUICK))["purity"]
    assert broken.status == "broken"
    assert ("params['w']" if what == "params" else "world[0][0]['losses']") in broken.words


def test_inputs_stay_as_they_are_for_the_caller():
    params = {"w": torch.tensor(1.0).double()}
    report_step(
        lambda params, world: {"w": params["w"].mul_(3)},
        tokens().loss_fn,
        params,
        tokens().batches,
        **QUICK,
    )
    assert params["w"] == 1


def test_new_params_are_compared_as_updates():
    def step(params, world):
        return {"w": params["w"] - 0.5 * right(params, world).grads["w"]}

    check_step(step, returns="params", lr=0.5, **QUICK)
    assert report_step(step, returns="params", lr=1.0, **QUICK).exit_code == 1


def test_new_params_of_an_optimizer_are_compared():
    adam = optim.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.1)

    def step(params, world):
        grads = right(params, world).grads
        return StepResult(params=adam.update(grads, adam.init(params), params)[0])

    check_step(step, optimizer=adam, **QUICK)


def test_a_step_says_on_how_many_ranks_it_works():
    class Step:
        ranks = 2

        def __call__(self, params, world):
            assert len(world) == 2
            return right(params, world)

    check_step(Step(), **QUICK)


def test_a_list_of_batches_is_cut_into_rows():
    problem = tokens()
    batch = {
        "losses": torch.arange(12.0).double().reshape(4, 3) / 8 + 1,
        "mask": torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0], [0, 1, 0]]).bool(),
    }
    rows = set()

    def step(params, world):
        rows.update(len(each["mask"]) for each in flat(world))
        return right(params, world)

    check_step(step, problem.loss_fn, problem.params, [batch], **QUICK)
    assert rows >= {1, 2}


def test_a_module_is_given_and_compared_by_name():
    model = torch.nn.Linear(2, 1, bias=False).double()

    def loss_fn(model, batch):
        errors = (model(batch["x"]).squeeze(-1) - batch["y"]) ** 2
        return LossTerms(errors.sum(), len(errors))

    def step(model, world):
        leaf = model.weight
        terms = [loss_fn(model, batch) for batch in flat(world)]
        loss = sum(t.num for t in terms) / sum(t.den for t in terms)
        return {"weight": torch.autograd.grad(loss, leaf)[0]}

    batch = {"x": torch.randn(5, 2).double(), "y": torch.randn(5).double()}
    check_step(step, loss_fn, model, batch, **QUICK)


def test_half_of_a_problem_is_refused():
    with pytest.raises(ValueError, match=r"needs loss_fn, params and batches, or none of them"):
        report_step(right, tokens().loss_fn)


def test_clipping_that_hides_the_scale_is_said():
    def step(params, world):
        return {"w": right(params, world).grads["w"].clamp(max=1e-4)}

    report = check_step(step, max_norm=1e-4, **QUICK)
    assert "hides its scale" in report.notes[0]


def test_the_time_budget_ends_the_check():
    def slow(params, world):
        time.sleep(0.3)
        return right(params, world)

    report = report_step(slow, budget_s=3.0)
    assert report.seconds < 10
    assert "The time was up after" in report.notes[0]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report():
    def doubled(params, world):
        return {"w": 2 * right(params, world).grads["w"]}

    first, second = [report_step(doubled, seed=3, **QUICK) for _ in range(2)]
    assert first.broken[0].example == second.broken[0].example


def test_worlds_are_what_their_mesh_says():
    with pytest.raises(ValueError, match=r"needs a window for each rank of the mesh"):
        World([[1]], mesh={"dp": 2})
    with pytest.raises(ValueError, match=r"no window may be longer than accumulation"):
        World([[1, 2]], accumulation=1)


def test_a_tuple_of_tensors_is_one_batch_and_params_may_be_any_tree():
    def loss_fn(params, batch):
        inputs, targets = batch
        weight, (bias,) = params["net"]
        errors = (inputs @ weight + bias - targets) ** 2
        return LossTerms(errors.sum(), errors.numel())

    def step(params, world):
        (weight, (bias,)), terms = params["net"], []
        leaves = [weight.requires_grad_(), bias.requires_grad_()]
        terms = [loss_fn(params, batch) for batch in flat(world)]
        loss = sum(each.num for each in terms) / sum(each.den for each in terms)
        grads = torch.autograd.grad(loss, leaves)
        return {"net": [grads[0], (grads[1],)]}

    params = {"net": [torch.randn(3, 1).double(), (torch.randn(1).double(),)]}
    batch = (torch.randn(6, 3).double(), torch.randn(6, 1).double())
    check_step(step, loss_fn, params, batch, **QUICK)


def test_a_frozen_param_is_not_compared():
    model = torch.nn.Linear(2, 1).double()
    model.bias.requires_grad_(False)

    def loss_fn(model, batch):
        out = model(batch["x"])
        return LossTerms((out**2).sum(), len(out))

    def step(model, world):
        terms = [loss_fn(model, batch) for batch in flat(world)]
        loss = sum(each.num for each in terms) / sum(each.den for each in terms)
        return {"weight": torch.autograd.grad(loss, model.weight)[0]}

    check_step(step, loss_fn, model, {"x": torch.randn(5, 2).double()}, **QUICK)


def test_a_loss_function_that_raises_is_said():
    def loss_fn(params, batch):
        raise KeyError("mask")

    report = report_step(right, loss_fn, tokens().params, tokens().batches, **QUICK)
    assert report.exit_code == 2
    assert "the loss function cannot be run on a drawn batch: KeyError" in report.failed[0].words
