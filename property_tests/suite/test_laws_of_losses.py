"""All losses of the repository × all laws. A new loss is one more line of ``TABLE``."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import block_cases
import dspine_cases
import eagle_cases
import mtp_cases
import pytest
import torch
import torch.distributed as c10d
from dspark_cases import TARGET, make_batch, make_config, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from numden import dist
from numden.dist import run_local
from numden.models import decoder, dflash, domino, dspark, dspine, eagle3, moe, mtp, peagle
from numden.property_tests import laws, over_ranks
from numden.property_tests._window_laws import results
from numden.property_tests.rows import join_rows, num_rows, take_rows
from numden.property_tests.strategies import dyadic_tensors, token_batches, windows, worlds
from numden.property_tests.violation import check_equal
from numden.pure import combine, losses, random, term_mean, tree, window_grad
from numden.pure.objective import Objective
from numden.pure.plans import PLANS
from numden.pure.terms import LossFn, split_metrics

VOCAB = 3
TOKENS = token_batches(max_rows=3, max_columns=4, min_vocabulary=VOCAB, max_vocabulary=VOCAB)
HEAD = st.fixed_dictionaries(
    {
        "scale": dyadic_tensors(()),
        "bias": dyadic_tensors((VOCAB,)),
        "out": dyadic_tensors((5, VOCAB)),
    }
)
OWN_DENS = ("before", "columns", "replay")


class Loss(NamedTuple):
    """A line of the table: a loss function and what it is defined on.

    ``mask`` is the field that says what counts, ``columns`` are the fields with a token axis.
    ``degree`` is how many dens the objective divides by, None where terms differ in it.
    """

    name: str
    loss_fn: LossFn
    params: SearchStrategy[Any] = HEAD
    batches: SearchStrategy[Any] = TOKENS
    exact: bool = False
    mask: str = "where"
    columns: tuple[str, ...] = ("logits", "labels", "where", "sample_ids")
    objective: Objective = term_mean()
    plans: tuple[str, ...] = PLANS
    degree: int | None = 1
    num_examples: int = 6


def logits(params, batch):
    return batch["logits"] * params["scale"] + params["bias"]


def token_loss(fn: Callable[..., Any], *fields: str, **options: Any) -> LossFn:
    def loss_fn(params, batch):
        named = {field: batch[field] for field in fields}
        return fn(logits(params, batch), batch["labels"], where=batch["where"], **named, **options)

    return loss_fn


def linear_loss(*, chunk_size: int, listed: bool = False) -> LossFn:
    def loss_fn(params, batch):
        hidden, labels = logits(params, batch), batch["labels"]
        positions = torch.arange(labels.numel()).flip(0) if listed else None
        options = {"chunk_size": chunk_size, "positions": positions, "where": batch["where"]}
        return losses.linear_cross_entropy(hidden, params["out"], labels, **options)

    return loss_fn


def teacher_loss(fn: Callable[..., Any]) -> LossFn:
    def loss_fn(params, batch):
        return fn(logits(params, batch), batch["logits"].flip(-1) / 2, where=batch["where"])

    return loss_fn


def bce(params, batch):
    targets = (batch["labels"].clamp_min(0) / VOCAB).to(torch.float64)
    return losses.binary_cross_entropy(logits(params, batch)[..., 0], targets, where=batch["where"])


def mse(params, batch):
    where = batch["where"].unsqueeze(-1)
    return losses.squared_error(logits(params, batch), batch["logits"] / 2, where=where)


def weighted_mse(params, batch):
    weights = (batch["labels"].clamp_min(0) / 2).to(torch.float64)
    error = logits(params, batch)[..., 0], batch["logits"][..., 1]
    return losses.squared_error(*error, where=batch["where"], weights=weights)


def z(params, batch):
    return losses.z_loss(logits(params, batch), where=batch["where"])


def balance(params, batch):
    # Router scores that are no probabilities: the sums of these are exact.
    selected = batch["logits"].argsort(dim=-1, stable=True)[..., :2]
    return losses.balance_stats(logits(params, batch), selected, where=batch["where"])


def keyed_dropout(params, batch):
    """What is kept depends on the key of the row and on the place in the row alone."""
    ids = batch["sample_ids"]
    keys = random.fold_in(random.key(0).expand(ids.shape[0], 2), ids[:, 0])
    kept = torch.stack(
        [random.bernoulli(random.fold_in(keys, i), ()) for i in range(ids.shape[1])], 1
    )
    scaled = logits(params, batch) * kept[..., None]
    return losses.squared_error(scaled, batch["logits"], where=batch["where"].unsqueeze(-1))


CE = token_loss(losses.cross_entropy)
several = combine(ce=CE, z=z, tv=teacher_loss(losses.total_variation), fit=mse)

DECODER = decoder.Config(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
DSPARK = make_config(num_layers=1, decay_gamma=4.0)
DPARD = make_config(num_layers=1, ce_alpha=0.0, l1_alpha=0.0, dpard_alpha=0.5)
PARALLEL = block_cases.SHAPE | {"num_layers": 1}
DFLASH = dflash.Config(**PARALLEL, decay_gamma=4.0)
DPACE = dflash.Config(**PARALLEL, dpace="full")
DOMINO = domino.Config(**PARALLEL, gru_size=3, correction_rank=2, prefix_size=1)
SHIFTED = domino.Config(**PARALLEL, gru_size=3, correction_rank=2, shift_label=True)
DSPINE = dspine_cases.make_config(num_layers=1, replacement_layers=1)
MTP = mtp_cases.make_config(chain_context="prefix")
EAGLE3 = eagle3.Config(**eagle_cases.SHAPE, num_steps=2)
EAGLE3_LAMBDA = eagle3.Config(**eagle_cases.SHAPE, num_steps=2, loss="lk_lambda", average="token")
PEAGLE = peagle.Config(**eagle_cases.SHAPE, mask_token_id=16, num_layers=1, num_depths=3)


@st.composite
def texts(draw):
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    sizes = {"min_rows": rows, "max_rows": rows, "min_columns": columns, "max_columns": columns}
    drawn = draw(token_batches(**sizes, min_vocabulary=7, max_vocabulary=7))
    return {"tokens": drawn["labels"].clamp_min(0), "loss_mask": drawn["where"]}


MOE = moe.Config(
    **asdict(DECODER), num_experts=4, num_selected=2, expert_size=6, alpha_balance=0.5, alpha_z=0.1
)


def routed_texts():
    """Texts whose ``token_mask`` says what counts, prompts too."""
    return texts().map(lambda batch: batch | {"token_mask": batch["tokens"] % 5 != 3})


TEXTS = {
    "params": st.integers(0, 9).map(
        lambda seed: decoder.init(DECODER, random.key(seed), std=0.4, dtype=torch.float64)
    ),
    "batches": texts(),
    "mask": "loss_mask",
    "columns": ("tokens", "loss_mask"),
    "num_examples": 4,
}
ROUTED_TEXTS = {
    "params": st.integers(0, 9).map(
        lambda seed: moe.init(MOE, random.key(seed), std=0.4, dtype=torch.float64)
    ),
    "batches": routed_texts(),
    "mask": "token_mask",
    "columns": ("tokens", "loss_mask", "token_mask"),
    "objective": moe.objective(MOE),
    "plans": ("columns", "replay"),
    "degree": None,
    "num_examples": 4,
}
DRAFTS = {
    "params": st.integers(0, 9).map(lambda seed: make_params(DSPARK, seed)),
    "batches": st.builds(
        partial(make_batch, DSPARK),
        num_rows=st.integers(1, 3),
        size=st.integers(3, 8),
        seed=st.integers(0, 99),
        supervised=st.sampled_from([0.0, 0.4, 0.9]),
    ),
    "mask": "loss_mask",
    "columns": ("tokens", "loss_mask", "captured", "final"),
    "objective": dspark.objective(DSPARK),
    "num_examples": 3,
}
SIZES = {"num_rows": st.integers(1, 3), "size": st.integers(3, 8), "seed": st.integers(0, 99)}
SIZES |= {"supervised": st.sampled_from([0.0, 0.4, 0.9])}
SPINES = {
    "params": st.integers(0, 9).map(partial(dspine_cases.make_params, DSPINE)),
    "batches": st.builds(partial(dspine_cases.make_batch, DSPINE), **SIZES),
    "mask": "loss_mask",
    "columns": ("tokens", "loss_mask", "captured", "final"),
    "objective": dspine.objective(DSPINE),
    "plans": ("columns", "replay"),
    "degree": None,
    "num_examples": 2,
}
CHAINS = {
    "params": st.integers(0, 9).map(partial(mtp_cases.make_params, MTP)),
    "batches": st.builds(partial(mtp_cases.make_batch, num_samples=2), **SIZES),
    "mask": "loss_mask",
    "columns": ("tokens", "loss_mask", "final", "sample_ids"),
    "objective": mtp.objective(MTP),
    "plans": OWN_DENS,
    "num_examples": 2,
}


def drafts(model, config, **prepare):
    """What a loss of a drafter without a teacher is defined on."""
    sizes = {"num_rows": st.integers(1, 3), "size": st.integers(3, 8), "seed": st.integers(0, 99)}
    share = st.sampled_from([0.0, 0.4, 0.9])
    make = partial(block_cases.make_batch, partial(model.prepare, **prepare), config)

    def params(seed):
        drawn = model.init(config, random.key(seed), std=0.4, dtype=torch.float64)
        # Heads that start at zero take part, too.
        return tree.map(lambda leaf: leaf + block_cases.sines(leaf.shape, 0.3, 0.1) / 8, drawn)

    return {
        "loss_fn": partial(model.loss_terms, config=config, target=TARGET),
        "params": st.integers(0, 9).map(params),
        "batches": st.builds(make, **sizes, supervised=share),
        "mask": "loss_mask",
        "columns": ("tokens", "loss_mask", "captured"),
        "objective": model.objective(config),
        "num_examples": 2,
    }


def distilled(model, config, prepare=lambda batch, config: batch):
    """What a loss of a drafter with a vocabulary of its own is defined on."""
    make = partial(eagle_cases.make_batch, prepare, config)
    return {
        "loss_fn": partial(model.loss_terms, config=config, target=eagle_cases.TARGET),
        "params": st.integers(0, 9).map(
            lambda seed: model.init(config, random.key(seed), std=0.4, dtype=torch.float64)
        ),
        "batches": st.builds(make, **SIZES),
        "mask": "loss_mask",
        "columns": ("tokens", "loss_mask", "captured", "final"),
        "objective": model.objective(config),
        "num_examples": 2,
    }


TABLE = [
    Loss("cross_entropy", CE),
    Loss("cross_entropy by sample", token_loss(losses.cross_entropy, weighting="sample")),
    Loss("cross_entropy by square", token_loss(losses.cross_entropy, weighting="square")),
    Loss("packed by sample", token_loss(losses.cross_entropy, "sample_ids", weighting="sample")),
    Loss("packed by square", token_loss(losses.cross_entropy, "sample_ids", weighting="square")),
    Loss("linear_cross_entropy", linear_loss(chunk_size=2)),
    Loss("linear_cross_entropy at positions", linear_loss(chunk_size=3, listed=True)),
    Loss("kl_divergence", teacher_loss(losses.kl_divergence)),
    Loss("total_variation", teacher_loss(losses.total_variation)),
    Loss("binary_cross_entropy", bce),
    Loss("squared_error", mse, exact=True),
    Loss("squared_error, weighted", weighted_mse, exact=True),
    Loss("z_loss", z),
    Loss(
        "balance_stats",
        balance,
        exact=True,
        objective=partial(losses.balance_loss, num_selected=2),
        plans=("columns", "replay"),
        degree=2,
    ),
    Loss("keyed dropout", keyed_dropout, exact=True),
    Loss("several terms with dens of their own", several, plans=OWN_DENS),
    Loss("decoder", partial(decoder.loss_terms, config=DECODER, chunk_size=3), **TEXTS),
    Loss(
        "decoder by sample",
        partial(decoder.loss_terms, config=DECODER, weighting="sample"),
        **TEXTS,
    ),
    Loss("moe", partial(moe.loss_terms, config=MOE, chunk_size=3), **ROUTED_TEXTS),
    Loss("dspark", partial(dspark.loss_terms, config=DSPARK, target=TARGET), **DRAFTS),
    Loss(
        "dspark by D-PARD",
        partial(dspark.loss_terms, config=DPARD, target=TARGET),
        **DRAFTS | {"objective": dspark.objective(DPARD), "plans": OWN_DENS, "num_examples": 2},
    ),
    Loss("dflash", **drafts(dflash, DFLASH)),
    Loss("dflash by D-PACE", **drafts(dflash, DPACE)),
    Loss("domino", **drafts(domino, DOMINO, step=1, num_steps=8)),
    Loss("domino, shifted", **drafts(domino, SHIFTED, step=1, num_steps=8)),
    Loss(
        "dspine",
        partial(dspine.loss_terms, config=DSPINE, target=dspine_cases.TARGET),
        **SPINES,
    ),
    Loss("mtp", partial(mtp.loss_terms, config=MTP, target=mtp_cases.TARGET), **CHAINS),
    Loss("eagle3", plans=OWN_DENS, **distilled(eagle3, EAGLE3)),
    Loss(
        "eagle3 by lk_lambda",
        plans=("columns", "replay"),
        degree=None,
        **distilled(eagle3, EAGLE3_LAMBDA),
    ),
    Loss("peagle", **distilled(peagle, PEAGLE, peagle.prepare)),
]

each_loss = pytest.mark.parametrize("loss", TABLE, ids=lambda loss: loss.name)


def law(check: Callable[[Loss, Any], None]) -> Callable[[Loss], None]:
    """A test of ``check(loss, data)`` on each line of the table, with examples to its measure."""

    @each_loss
    def test(loss):
        scale = settings().max_examples / 30  # 1 in the profile dev
        run = settings(max_examples=max(1, round(scale * loss.num_examples)))
        run(given(st.data())(lambda data: check(loss, data)))()

    test.__name__ = check.__name__
    return test


def draw(loss, data):
    return data.draw(loss.params), data.draw(loss.batches)


@law
def test_additivity(loss, data):
    params, window = data.draw(loss.params), data.draw(windows(loss.batches, max_size=3))
    laws.additivity(loss.loss_fn, params, window, exact=loss.exact)


@law
def test_permutation(loss, data):
    params, batch = draw(loss, data)
    order = data.draw(st.permutations(range(num_rows(batch))))
    laws.permutation(loss.loss_fn, params, batch, order, exact=loss.exact)


@law
def test_padding(loss, data):
    params, batch = draw(loss, data)

    def neutral(batch, rows):
        padded = join_rows([batch, take_rows(batch, rows)])
        padded[loss.mask][num_rows(batch) :] = False
        return padded

    def pad_row(batch, n):
        return neutral(batch, [0] * n)

    def pad_columns(batch, n):
        flipped = {name: batch[name].transpose(0, 1) for name in loss.columns}
        padded = {name: value.transpose(0, 1) for name, value in neutral(flipped, [0] * n).items()}
        return batch | padded

    pads = {"pad_row": pad_row, "pad_columns": pad_columns}
    laws.padding(loss.loss_fn, params, batch, **pads, exact=loss.exact)


@law
def test_emptiness(loss, data):
    params, batch = draw(loss, data)
    masked = batch | {loss.mask: torch.zeros_like(batch[loss.mask])}
    laws.emptiness(loss.loss_fn, params, masked)
    laws.emptiness(loss.loss_fn, params, take_rows(batch, []))


@law
def test_den_independence(loss, data):
    params, batch = draw(loss, data)
    laws.den_independence(loss.loss_fn, params, batch, other_params=data.draw(loss.params))


@law
def test_keyed_randomness(loss, data):
    laws.keyed_randomness(loss.loss_fn, *draw(loss, data), exact=loss.exact)


@law
def test_effects(loss, data):
    params, batch = draw(loss, data)
    laws.purity(loss.loss_fn, params, batch)
    laws.repeatability(loss.loss_fn, params, batch)
    laws.no_collective(loss.loss_fn, params, batch)
    laws.no_host_sync(loss.loss_fn, params, batch)


def grad_of(loss, params, plan, loss_fn, **options):
    def den_fn(batch):
        return split_metrics(loss_fn(params, batch))[0].den

    options["den_fn"] = den_fn if plan == "before" else None
    return window_grad(loss_fn, loss.objective, plan=plan, on_empty="zero", **options)


@law
def test_homogeneity(loss, data):
    if loss.degree is None:
        return
    params, window = data.draw(loss.params), data.draw(windows(loss.batches, max_size=3))
    plan = data.draw(st.sampled_from(loss.plans))
    step = partial(grad_of, loss, params, plan)
    laws.homogeneity(step, loss.loss_fn, params, window, factor=4.0, degree=loss.degree)


@law
def test_split_invariance(loss, data):
    params, window = data.draw(loss.params), data.draw(windows(loss.batches))
    dealt = data.draw(worlds(len(window), max_ranks=3))
    world = [[window[step] for step in steps] for steps in dealt]
    plan = data.draw(st.sampled_from(["auto", *loss.plans]))
    step = over_ranks(
        lambda reduction: grad_of(loss, params, plan, loss.loss_fn, reduction=reduction)
    )
    # The other plans multiply by the cotangent before they add: exact only where that is.
    exact = loss.exact and plan == "after"
    whole = [[join_rows(window)]]
    laws.split_invariance(step, params, [whole, [window]], exact=exact)
    # Each rank multiplies its share by one over the den before ranks add: rounded twice.
    laws.split_invariance(step, params, [whole, world])


@each_loss
def test_split_invariance_on_real_ranks(loss):
    """The same with two processes, one of which may have no micro-step, on few examples."""

    def world_grad(params, world):
        grad = dist.window_grad(loss.loss_fn, loss.objective, on_empty="zero")
        if len(world) == 1:
            return grad(params, world[0])
        first, second = run_local(lambda: grad(params, world[c10d.get_rank()]), 2, timeout=30)
        assert torch.equal(first.loss, second.loss)
        return first

    @settings(max_examples=2)
    @given(st.data())
    def check(data):
        params, window = data.draw(loss.params), data.draw(windows(loss.batches))
        dealt = data.draw(worlds(len(window), max_ranks=2))
        shares = [[window[step] for step in steps] for steps in dealt]
        world = [*shares, []] if len(shares) == 1 else shares
        laws.split_invariance(world_grad, params, [[window], world])

    check()


@law
def test_equivalent_window_grad_whole_batch(loss, data):
    """The one micro-step that split_invariance compares with is right."""
    params, batch = draw(loss, data)
    got = grad_of(loss, params, data.draw(st.sampled_from(loss.plans)), loss.loss_fn)(
        params, [batch]
    )
    leaves, structure = tree.flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    terms, _ = split_metrics(loss.loss_fn(tree.unflatten(structure, leaves), batch))
    value = loss.objective(terms)
    grads = torch.autograd.grad(value, leaves, materialize_grads=True)
    check_equal(
        *("window_grad", "must equal autograd on the whole batch.", "the plan."),
        results((value.detach(), tree.unflatten(structure, list(grads)))),
        results(got),
    )
