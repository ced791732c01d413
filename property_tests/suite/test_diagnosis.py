"""Diagnoses: each fault of the catalogue is found again from the numbers that it makes."""

import pytest
import torch
from hypothesis import strategies as st

from numden.property_tests import StepResult, World, diagnose, report_step
from numden.property_tests.diagnosis.facts import facts_of
from numden.property_tests.diagnosis.faults import apply, catalogue
from numden.property_tests.diagnosis.recipe import Finish, Recipe, TermRecipe, evaluator
from numden.property_tests.step_checker.smallest import counts_something
from numden.property_tests.worlds.draw import drawn, step_worlds
from numden.property_tests.worlds.problems import (
    Problem,
    token_batch,
    tokens,
    tokens_and_balance,
    two_heads,
)
from numden.pure import LossTerms, term_mean

PROBLEM = tokens()
ONE_AND_THREE = [token_batch([[8.0]]), token_batch([[2.0, 2.0, 2.0]])]


def some_worlds(problem, mesh=None, num=14):
    mesh = st.integers(1, 3).map(lambda n: {"dp": n}) if mesh is None else st.just(mesh)
    worlds = step_worlds(problem.batches, mesh, max_micro_steps=3)
    # Examples come in groups that are alike.
    return drawn(worlds, 3 * num, 0, lambda world: counts_something(problem, world))[::-3]


def explained(problem, recipe, worlds, finish=Finish()):  # noqa: B008
    """What is said of gradients that ``recipe`` makes."""
    values = [evaluator(facts_of(problem, world), finish)(recipe) for world in worlds]
    seen = [(world, {"w": value[1]}) for world, value in zip(worlds, values, strict=True)]
    options = {"objective": problem.objective, "max_norm": finish.max_norm}
    return diagnose(seen, problem.loss_fn, problem.params, **options)


def faults_of(problem, worlds, **options):
    facts = max((facts_of(problem, world) for world in worlds), key=lambda f: f.sizes["ranks"])
    return catalogue(facts, **options)


def names_in(diagnosis):
    return {name for names in (diagnosis.faults, *diagnosis.alternatives) for name in names}


def test_round_trip_each_fault_is_found_in_the_numbers_it_makes():
    worlds, silent = some_worlds(PROBLEM, num=10), []
    for fault in once_each(faults_of(PROBLEM, worlds)):
        recipe = apply(Recipe((TermRecipe(),)), fault, (0,))
        found = explained(PROBLEM, recipe, worlds)
        if found:
            assert fault.name in names_in(found[0]), fault.name
        else:
            silent.append(fault.name)
    # Some change nothing here: there are no weights, and bf16 holds small counts exactly.
    assert len(silent) < 10, silent


def test_round_trip_each_fault_of_clipping():
    worlds, named = some_worlds(PROBLEM, num=16), set()
    faults = [f for f in faults_of(PROBLEM, worlds, clips=True) if "clip" in f.change]
    for fault in once_each(faults):
        recipe = apply(Recipe((TermRecipe(),)), fault, ())
        for diagnosis in explained(PROBLEM, recipe, worlds, Finish(max_norm=0.5)):
            assert fault.name in names_in(diagnosis)
            named.add(fault.name)
    assert {"not clipped", "clipped before normalisation", "clipped on each rank"} <= named


def once_each(faults):
    """One fault of each name, and no count that is another one by its values."""
    own = [fault for fault in faults if not fault.change.get("count", "").startswith("den, ")]
    return {fault.name: fault for fault in reversed(own)}.values()


@pytest.mark.parametrize("problem", [tokens_and_balance(), two_heads()], ids=["balance", "heads"])
def test_round_trip_a_fault_in_one_of_two_terms(problem):
    worlds, right = some_worlds(problem, num=8), Recipe((TermRecipe(),) * 2)
    for fault in faults_of(problem, worlds)[::12]:
        recipe = None if fault.whole else apply(right, fault, (1,))
        if recipe is not None:
            for diagnosis in explained(problem, recipe, worlds):
                assert diagnosis.faults, fault.name


def test_pairs_of_faults_are_found():
    recipe = TermRecipe(
        over="micro-step", ranks="own", factor=(("micro-steps", -1), ("ranks", -1)), nan="rank"
    )
    (found,) = explained(PROBLEM, Recipe((recipe,)), some_worlds(PROBLEM))
    assert found.faults[:2] == ("mean of micro-step means", "mean of rank means")
    assert "0/0 in an empty rank" in names_in(found)


def test_numbers_from_a_log_are_explained_with_both_numbers():
    five = StepResult(grads={"w": torch.tensor(5.0).double()}, loss=5.0)
    found = diagnose([([ONE_AND_THREE], five)], PROBLEM.loss_fn, PROBLEM.params)
    assert [each.faults for each in found] == [("mean of micro-step means",)] * 2
    assert [each.where for each in found] == ["grads['w']", "logged loss"]
    assert "gives 5, where 3.5 is right" in found[0].explanation


def test_right_numbers_need_no_diagnosis():
    right = {"w": torch.tensor(3.5).double()}
    assert diagnose([([ONE_AND_THREE], right)], PROBLEM.loss_fn, PROBLEM.params) == ()


def test_formulas_that_agree_are_told_apart_by_a_window_on_which_they_differ():
    # With one token in each micro-step, a mean of means is right, and three formulas are not.
    def summed_means(params, world):
        means = [
            (batch["losses"] * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)
            for window in world
            for batch in window
        ]
        return {"w": sum(means) / len(world)}

    one = World([[token_batch([[2.0]]), token_batch([[4.0]])]])
    few = [(one, summed_means(None, one))]
    (guess,) = diagnose(few, PROBLEM.loss_fn, PROBLEM.params)
    assert len(guess.alternatives) > 3
    (broken,) = report_step(summed_means, ranks=1).broken
    assert broken.diagnoses[0].faults == ("missing division by the number of micro-steps",)
    assert broken.diagnoses[0].alternatives == ()


def test_no_match_is_said_as_such():
    worlds = some_worlds(PROBLEM)
    seen = [(w, {"w": evaluator(facts_of(PROBLEM, w))(RIGHT)[1] ** 2}) for w in worlds]
    (found,) = diagnose(seen, PROBLEM.loss_fn, PROBLEM.params)
    assert found.faults == ()
    assert "No formula of the catalogue gives these numbers" in found.explanation
    assert "lies between" in found.explanation


def test_rounding_is_said_as_such():
    worlds = some_worlds(PROBLEM)
    seen = [(w, {"w": evaluator(facts_of(PROBLEM, w))(RIGHT)[1].half().double()}) for w in worlds]
    (found,) = diagnose(seen, PROBLEM.loss_fn, PROBLEM.params)
    assert found.faults == ("rounding",)
    assert "right but for rounding" in found.explanation


def test_another_weighting_of_samples_is_named():
    def mean_of_samples(params, world):
        rows = [(b["losses"] * b["mask"], b["mask"].sum(1)) for window in world for b in window]
        means = [(loss.sum(1) / count.clamp(min=1)).sum() for loss, count in rows]
        return {"w": sum(means) / sum((count > 0).sum() for _, count in rows)}

    worlds = some_worlds(PROBLEM)
    seen = [(world, mean_of_samples(None, world)) for world in worlds]
    (found,) = diagnose(seen, PROBLEM.loss_fn, PROBLEM.params)
    assert found.faults == ("mean of sample means",)


def test_a_constant_factor_is_said_as_such():
    worlds = some_worlds(PROBLEM)
    seen = [(w, {"w": evaluator(facts_of(PROBLEM, w))(RIGHT)[1] * 0.3}) for w in worlds]
    (found,) = diagnose(seen, PROBLEM.loss_fn, PROBLEM.params)
    assert found.faults == ("constant factor",)
    assert "0.3 times the right one" in found.explanation


def test_leaves_that_are_wrong_in_another_way_get_a_diagnosis_each():
    def loss_fn(params, batch):
        num = (params["a"] + params["b"]) * (batch["losses"] * batch["mask"]).sum()
        return LossTerms(num, batch["mask"].sum())

    params = {"a": torch.tensor(1.0).double(), "b": torch.tensor(2.0).double()}
    problem = Problem(loss_fn, params, PROBLEM.batches)
    worlds = [world for world in some_worlds(problem, num=20) if len(world) > 1]
    right = [evaluator(facts_of(problem, world))(RIGHT)[1] for world in worlds]
    seen = [
        (world, {"a": value * len(world), "b": value * len(world[0])})
        for world, value in zip(worlds, right, strict=True)
    ]
    found = {each.where: each.faults for each in diagnose(seen, loss_fn, params)}
    assert found == {
        "grads['a']": ("times the number of ranks",),
        "grads['b']": ("times the number of micro-steps",),
    }


def test_an_axis_is_named_rather_than_the_ranks():
    worlds = some_worlds(PROBLEM, {"dp": 2, "cp": 3})
    recipe = Recipe((TermRecipe(factor=(("cp", -1),)),))
    (found,) = explained(PROBLEM, recipe, worlds)
    assert found.faults == ("divided by the size of cp",)


def test_weights_of_terms_enter_the_formulas():
    problem = tokens_and_balance()._replace(objective=term_mean({"ce": 1.0, "balance": 0.25}))
    worlds = some_worlds(problem)
    names = list(facts_of(problem, worlds[0]).terms)
    ignored = [TermRecipe()] * 2
    ignored[names.index("balance")] = TermRecipe(factor=(("weight of balance", -1),))
    (found,) = explained(problem, Recipe(tuple(ignored)), worlds)
    assert "weight of the term ignored" in names_in(found)


def test_objectives_that_are_no_mean_have_no_diagnosis_and_say_so():
    def dice(terms):
        return 1 - terms.num / terms.den

    seen = [([ONE_AND_THREE], {"w": torch.tensor(5.0).double()})]
    (found,) = diagnose(seen, PROBLEM.loss_fn, PROBLEM.params, objective=dice)
    assert found.faults == ()
    assert "knows the wrong formulas of term_mean" in found.explanation


RIGHT = Recipe((TermRecipe(),))
