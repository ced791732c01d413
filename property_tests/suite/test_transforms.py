"""Windows inside torch.func: a window is a function like any other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from window_cases import (
    CASES,
    assert_close,
    cut,
    mean_terms,
    own_terms,
    random_params,
    random_rows,
    residuals,
    whole_batch,
)

from numden.property_tests.strategies import partitions
from numden.pure import LossTerms, fold, scan, term_mean, tree, window_grad, window_value

# torch compiles a few rules with its own deprecated torch.jit at its first jvp.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

NUM_ROWS = 12
BY_NAME = {case.name: case for case in CASES}
ROWS = random_rows(NUM_ROWS)
WINDOW = cut(ROWS, [5, 0, 3])
cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
few = settings(max_examples=max(4, settings.default.max_examples // 8))


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def whole(case):
    """The loss of all rows as a function of params, in plain torch."""
    return lambda params: case.whole(params, ROWS)


# --- first derivatives ---------------------------------------------------------------------------


@cases
@few
@given(cut=partitions(NUM_ROWS, max_size=4))
def test_grad_of_window_value_is_window_grad(case, cut):
    params, rows = random_params(), ROWS
    window = [{name: leaf[list(each)] for name, leaf in rows.items()} for each in cut]
    value = lambda params: window_value(case.loss_fn, case.objective)(params, window).loss
    assert_close(grad(value)(params), whole_batch(case, params, rows)[1])
    pulled = vjp(value, params)[1](torch.tensor(1.0).double())[0]
    assert_close(pulled, window_grad(case.loss_fn, case.objective)(params, window).grads)


@cases
def test_jvp_of_window_value(case):
    params, v = random_params(), random_params(5)
    step = lambda params: window_value(case.loss_fn, case.objective)(params, WINDOW).loss
    loss, tangent = jvp(step, (params,), (v,))
    expected, grads = whole_batch(case, params, ROWS)
    assert_close(loss, expected)
    assert_close(tangent, dot(grads, v))


@cases
def test_the_window_may_depend_on_what_is_differentiated(case):
    """The gradient with respect to the batches, plan and all."""
    params = random_params()
    scaled = lambda c, rows: {**rows, "x": rows["x"] * c}
    one = torch.tensor(1.0).double()
    step = lambda c: window_grad(case.loss_fn, case.objective)(
        params, [scaled(c, rows) for rows in WINDOW]
    )
    found = grad(lambda c: step(c).loss)(one)
    expected = grad(lambda c: case.whole(params, scaled(c, ROWS)))(one)
    assert_close(found, expected)


# --- derivatives of a gradient -------------------------------------------------------------------


def norm(grads):
    return sum((leaf**2).sum() for leaf in tree.leaves(grads))


@cases
def test_grad_of_a_function_of_window_grad(case):
    """Second derivatives, against those of the whole batch."""
    params = random_params()
    step = window_grad(case.loss_fn, case.objective)
    found = grad(lambda params: norm(step(params, WINDOW).grads))(params)
    assert_close(found, grad(lambda params: norm(grad(whole(case))(params)))(params))


@cases
def test_jvp_of_window_grad_is_a_hessian_vector_product(case):
    params, v = random_params(), random_params(5)
    step = window_grad(case.loss_fn, case.objective)
    _, found = jvp(lambda params: step(params, WINDOW).grads, (params,), (v,))
    h = hessian(whole(case))(params)
    expected = {
        a: sum((h[a][b].reshape(*params[a].shape, -1) * v[b].reshape(-1)).sum(-1) for b in params)
        for a in params
    }
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["token_mean", "dspine", "dice"])
def test_hessian_is_the_jacobian_of_window_grad(name):
    case, params = BY_NAME[name], random_params()
    found = jacrev(lambda params: window_grad(case.loss_fn, case.objective)(params, WINDOW).grads)
    assert_close(found(params), hessian(whole(case))(params))


def test_third_derivative():
    loss_fn = lambda w, x: LossTerms((w**5 * x).sum(), x.numel())
    window, w = [torch.tensor([2.0]).double(), torch.tensor([4.0, 3.0]).double()], torch.tensor(2.0)
    third = grad(grad(lambda w: window_grad(loss_fn)(w, window).grads))
    assert_close(third(w.double()), 3.0 * 60 * w.double() ** 2)


# --- vmap ----------------------------------------------------------------------------------------


def stacked(trees):
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


@cases
def test_vmap_over_params_is_a_loop(case):
    """An ensemble: several sets of params, one window."""
    members = [random_params(seed) for seed in range(3)]
    step = window_grad(case.loss_fn, case.objective)
    found = vmap(lambda params: step(params, WINDOW)[:3])(stacked(members))
    assert_close(found, stacked([step(params, WINDOW)[:3] for params in members]))


@cases
def test_vmap_over_windows_is_a_loop(case):
    """As for gradients of single samples: one set of params, several windows of one shape."""
    params = random_params()
    windows = [cut(random_rows(NUM_ROWS, seed), [5, 3]) for seed in range(3)]
    step = window_grad(case.loss_fn, case.objective)
    found = vmap(lambda window: step(params, window).grads)(stacked(windows))
    assert_close(found, stacked([step(params, window).grads for window in windows]))


@cases
def test_grad_of_vmap_of_window_grad(case):
    members = [random_params(seed) for seed in range(3)]
    step = window_grad(case.loss_fn, case.objective)
    each = vmap(lambda params: norm(step(params, WINDOW).grads))
    found = grad(lambda many: each(many).sum())(stacked(members))
    expected = [grad(lambda p: norm(grad(whole(case))(p)))(params) for params in members]
    assert_close(found, stacked(expected))


def test_vmap_of_an_empty_and_a_full_window():
    """No value is read inside a transform: where nothing is supervised, there is no gradient."""
    masks = torch.stack([torch.zeros(NUM_ROWS), torch.ones(NUM_ROWS)]).double()
    params, rows = random_params(), ROWS
    found = vmap(lambda mask: window_grad(mean_terms)(params, [{**rows, "mask": mask}])[:2])(masks)
    full = window_grad(mean_terms)(params, [{**rows, "mask": masks[1]}])
    assert_close(found, stacked([tree.zeros_like(full[:2]), full[:2]]))


# --- what else there is in a result --------------------------------------------------------------


def with_metrics(params, rows):
    hits = (residuals(params, rows) ** 2 * rows["mask"]).sum()
    return own_terms(params, rows), {"fit": LossTerms(hits, rows["mask"].sum())}


def test_metrics_and_terms_inside_a_transform():
    params = random_params()
    expected = window_grad(with_metrics)(params, WINDOW)
    for make in (window_grad, window_value):
        loss, result = grad_with_aux(
            lambda params, make=make: make(with_metrics)(params, WINDOW), params
        )
        assert_close(loss, expected.grads)
        assert_close(result.terms, expected.terms)
        assert_close(result.metrics, expected.metrics)


def grad_with_aux(step, params):
    def loss(params):
        result = step(params)
        return result.loss, result

    return grad(loss, has_aux=True)(params)


def test_metrics_are_differentiable_inside_a_transform():
    params = random_params()
    found = grad(lambda p: window_value(with_metrics)(p, WINDOW).metrics["fit"])(params)
    assert_close(found, whole_batch(BY_NAME["token_mean"], params, ROWS)[1])


@pytest.mark.parametrize("plan", ["after", "before", "columns", "replay", "auto"])
def test_plan_plays_no_part_inside_a_transform(plan):
    """The definition itself is differentiated, so each plan can express each objective."""
    case, params = BY_NAME["dspine"], random_params()
    step = window_grad(case.loss_fn, case.objective, plan=plan)
    found = grad(lambda params: step(params, iter(WINDOW)).loss)(params)
    assert_close(found, whole_batch(case, params, ROWS)[1])


def test_inside_means_inside():
    """A transform elsewhere in the program leaves no trace."""
    params = random_params()
    grad(lambda w: w**2)(torch.tensor(1.0))
    vmap(lambda x: x)(torch.ones(2))
    assert not window_grad(mean_terms)(params, WINDOW).loss.requires_grad


def test_functional_call_of_a_module():
    module = torch.nn.Linear(3, 1, dtype=torch.float64)
    loss_fn = lambda params, rows: LossTerms(
        functional_call(module, params, (rows["x"],)).pow(2).sum(), rows["x"].shape[0]
    )
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    found = grad(lambda params: window_grad(loss_fn)(params, WINDOW).loss)(params)
    by_module = lambda m, rows: LossTerms(m(rows["x"]).pow(2).sum(), rows["x"].shape[0])
    assert_close(found, window_grad(by_module)(module, WINDOW).grads)
    assert all(leaf.grad is None for leaf in module.parameters())


# --- learning to learn ---------------------------------------------------------------------------

RATE = 0.05


def sgd(params, grads):
    return tree.map(lambda p, g: p - RATE * g, params, grads)


def meta_loss(case, test_rows):
    """The loss of other rows after two steps, each with the gradient of a window."""
    step = window_grad(case.loss_fn, case.objective)

    def after_updates(params):
        params, _ = scan(
            lambda params, window: (sgd(params, step(params, window).grads), None),
            params,
            [WINDOW, WINDOW[::-1]],
        )
        return window_value(case.loss_fn, case.objective)(params, cut(test_rows, [4])).loss

    return after_updates


def meta_loss_by_hand(case, params, test_rows):
    """The same with create_graph, on whole batches."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    current = leaves
    for _ in range(2):
        loss = case.whole(current, ROWS)
        grads = torch.autograd.grad(loss, list(current.values()), create_graph=True)
        current = sgd(current, dict(zip(current, grads, strict=True)))
    loss = case.whole(current, test_rows)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, grads, strict=True))


@cases
def test_gradient_of_a_post_update_loss_by_the_initial_params(case):
    params, test_rows = random_params(), random_rows(NUM_ROWS, seed=8)
    loss, grads = meta_loss_by_hand(case, params, test_rows)
    step = meta_loss(case, test_rows)
    assert_close(step(params), loss)  # outside of transforms, by a plan
    assert_close(grad(step)(params), grads)


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "dspine"], ids=lambda c: c.name)
def test_gradient_of_a_post_update_loss_by_finite_differences(case):
    """But for an objective with a stop-gradient, whose gradient is no derivative."""
    params, test_rows, v = random_params(), random_rows(NUM_ROWS, seed=8), random_params(5)
    step = meta_loss(case, test_rows)
    h = 1e-4
    ahead, behind = (step(tree.map(lambda p, d, s=s: p + s * h * d, params, v)) for s in (1, -1))
    slope = dot(grad(step)(params), v)
    # Central differences err by h² times a third derivative, here some hundreds, and by 1e-16/h.
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-4, atol=1e-5)


def test_first_order_approximation_is_another_number():
    """So that the tests above would see a gradient that was cut."""
    case, params, test_rows = BY_NAME["dspine"], random_params(), random_rows(NUM_ROWS, seed=8)
    current = params
    for _ in range(2):
        current = sgd(current, window_grad(case.loss_fn, case.objective)(current, WINDOW).grads)
    first_order = window_grad(case.loss_fn, case.objective)(current, cut(test_rows, [4])).grads
    exact = meta_loss_by_hand(case, params, test_rows)[1]
    assert not torch.allclose(first_order["w"], exact["w"], rtol=0.01)


# --- fold and objectives -------------------------------------------------------------------------


@given(st.integers(0, 99))
@few
def test_objective_of_a_fold_is_the_definition_of_a_window(seed):
    params = random_params(seed)
    defined = grad(lambda p: term_mean()(fold(own_terms)(p, WINDOW)))(params)
    assert_close(window_grad(own_terms)(params, WINDOW).grads, defined)
