import functools
import math

import pytest
import torch
from block_cases import known_batch, sines
from dspark_cases import make_config, normal
from hypothesis import given
from hypothesis import strategies as st

from numden.models import dspark
from numden.models.anchors import supervised_slots, take_slots
from numden.models.block_losses import renyi_divergence, slot_losses, slot_metrics, slot_terms
from numden.pure import random, tree

# Known numbers: logits from a closed form, two rows, three blocks.


def known_case():
    batch, shape = known_batch(), (2, 2, 5)
    tokens, anchors = batch["tokens"], batch["anchors"]
    losses, measures = slot_losses(
        sines((*shape, 13), 0.37, 0.1),
        take_slots(tokens, anchors, 5, offset=1),
        sines((*shape, 13), 0.53, 0.7),
        sines(shape, 0.9, 0.2),
    )
    return losses, measures, supervised_slots(batch["loss_mask"], anchors, batch["keep"], 5)


@pytest.mark.parametrize(
    ("which", "ce", "l1", "confidence", "num", "den"),
    [
        (slice(0, 1), 26.540250, 9.646574, 7.361303, 18.697245, 8),
        (slice(1, 2), 16.726005, 4.866453, 3.519160, 9.571569, 4),
        (slice(0, 2), 43.266255, 14.513028, 10.880464, 28.268814, 12),
    ],
    ids=["row 0", "row 1", "both"],
)
def test_known_loss_terms(which, ce, l1, confidence, num, den):
    losses, _, supervised = known_case()
    terms = slot_terms({name: v[which] for name, v in losses.items()}, supervised[which], None)
    # The numbers have six digits behind the point, the last one not rounded.
    close = functools.partial(pytest.approx, abs=1e-6)
    assert terms.num["ce"].item() == close(ce)
    assert terms.num["l1"].item() == close(l1)
    assert terms.num["confidence"].item() == close(confidence)
    assert terms.den.item() == den
    loss = dspark.objective(make_config())(terms)
    assert loss.item() * den == close(num)
    if which == slice(0, 2):
        assert loss.item() == close(2.355735)


def test_known_mean_of_row_means_is_another_number():
    losses, _, supervised = known_case()
    objective = dspark.objective(make_config())
    rows = [({k: v[i] for k, v in losses.items()}, supervised[i]) for i in (0, 1)]
    means = [objective(slot_terms(*row, None)).item() for row in rows]
    assert sum(means) / 2 == pytest.approx(2.365024, abs=1e-6)


def test_known_metrics():
    losses, measures, supervised = known_case()
    metrics = slot_metrics(losses, measures, supervised, None)
    expected = {
        "accepted_length": (4, 3),
        "accuracy": (1, 12),
        "accuracy_position": ([1, 0, 0, 0, 0], [3, 3, 3, 2, 1]),
        "ce_loss": (43.266255, 12),
        "ce_position": ([10.539078, 12.412657, 12.045346, 4.798724, 3.470450], [3, 3, 3, 2, 1]),
        "confidence_abs_error": (3.548129, 12),
        "confidence_loss": (10.880464, 12),
        "draft_top1_prob": (2.973151, 12),
        "l1_loss": (14.513028, 12),
        "tau_probabilistic": (5.188090, 3),
        "teacher_agreement": (0, 12),
        "teacher_top1_prob": (2.815996, 12),
    }
    assert set(metrics) == set(expected)
    for name, (num, den) in expected.items():
        assert metrics[name].num.tolist() == pytest.approx(num, abs=1e-6), name
        assert metrics[name].den.tolist() == den, name


def test_known_den_with_decay():
    _, _, supervised = known_case()
    assert slot_terms({}, supervised, 7.0).den.item() == pytest.approx(9.722661, abs=1e-6)


# Values of a slot, and their sums.


@given(st.integers(0, 10**6), st.none() | st.floats(0.5, 20), st.booleans())
def test_equivalent_sums_loop(seed, gamma, with_teacher):
    draft, teacher = normal(seed, 2, 3, 5), normal(seed + 1, 2, 3, 5)
    scores = normal(seed + 2, 2, 3) if with_teacher else None
    labels = random.choice(random.key(seed + 3), 5, (2, 3))
    alive = random.bernoulli(random.key(seed + 4), (2, 3), p=0.7).int().cumprod(-1).bool()
    losses, measures = slot_losses(draft, labels, teacher if with_teacher else None, scores)
    terms = slot_terms(losses, alive, gamma)
    metrics = slot_metrics(losses, measures, alive, gamma)
    sums = dict.fromkeys(["ce", "l1", "confidence", "w", "error", "tau", "agree", "blocks"], 0.0)
    for n in range(2):
        reached = 1.0
        sums["blocks"] += float(alive[n, 0])
        sums["tau"] += float(alive[n, 0])
        for j in range(3):
            p, t = draft[n, j].softmax(-1).tolist(), teacher[n, j].softmax(-1).tolist()
            if not alive[n, j]:
                break
            w = math.exp(-j / gamma) if gamma else 1.0
            overlap = sum(map(min, p, t))
            reached *= overlap
            sums["w"] += w
            sums["ce"] += -w * math.log(p[labels[n, j]])
            sums["l1"] += w * 2 * (1 - overlap)
            sums["tau"] += reached
            sums["agree"] += p.index(max(p)) == t.index(max(t))
            if scores is not None:
                c = 1 / (1 + math.exp(-float(scores[n, j])))
                sums["confidence"] += -w * (overlap * math.log(c) + (1 - overlap) * math.log(1 - c))
                sums["error"] += w * abs(c - overlap)
    close = functools.partial(pytest.approx, rel=1e-9, abs=1e-12)
    assert set(terms.num) == ({"ce", "l1", "confidence"} if with_teacher else {"ce"})
    for name, num in terms.num.items():
        assert num.item() == close(sums[name])
    assert terms.den.item() == close(sums["w"])
    if with_teacher:
        assert metrics["confidence_abs_error"].num.item() == close(sums["error"])
        assert metrics["tau_probabilistic"].num.item() == close(sums["tau"])
        assert metrics["tau_probabilistic"].den.item() == sums["blocks"]
        assert metrics["teacher_agreement"].num.item() == sums["agree"]


def test_slots_that_do_not_count_add_exact_zeros():
    alive = torch.tensor([[True, False, False]])
    values = torch.tensor([[2.0, math.inf, math.nan]], requires_grad=True)
    terms = slot_terms({"ce": values}, alive, None)
    assert terms.num["ce"].item() == 2
    (grad,) = torch.autograd.grad(terms.num["ce"], values)
    assert grad.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_read_in_float32(dtype):
    draft, teacher = normal(0, 4, 9).to(dtype), normal(1, 4, 9).to(dtype)
    labels, scores = torch.tensor([0, 3, 8, 2]), normal(2, 4).to(dtype)
    half = slot_losses(draft, labels, teacher, scores)
    wide = slot_losses(draft.float(), labels, teacher.float(), scores.float())
    assert all(map(torch.equal, tree.leaves(half), tree.leaves(wide)))
    assert half[0]["ce"].dtype == torch.float32


def test_no_gradient_to_teacher_and_acceptance():
    draft, teacher, scores = (
        normal(i, *s).requires_grad_() for i, s in enumerate([(3, 5)] * 2 + [(3,)])
    )
    losses, measures = slot_losses(draft, torch.zeros(3, dtype=torch.long), teacher, scores)
    losses["confidence"].sum().backward(retain_graph=True)
    assert scores.grad is not None
    assert draft.grad is teacher.grad is None
    losses["l1"].sum().backward()
    assert draft.grad is not None
    assert teacher.grad is None
    assert not any(value.requires_grad for value in measures.values())


@given(st.integers(0, 999))
def test_equivalent_renyi_divergence_probabilities(seed):
    draft, teacher = normal(seed, 4, 5).requires_grad_(), normal(seed + 1, 4, 5).requires_grad_()
    found = renyi_divergence(draft, teacher)
    expected = -2 * (draft.softmax(-1) * teacher.softmax(-1)).sqrt().sum(-1).log()
    torch.testing.assert_close(found, expected)
    assert (found >= 0).all()
    torch.testing.assert_close(renyi_divergence(draft, draft), torch.zeros(4, dtype=draft.dtype))
    (grad,) = torch.autograd.grad(found.sum(), draft, retain_graph=True)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), draft)[0])
    assert torch.autograd.grad(found.sum(), teacher, allow_unused=True) == (None,)


def test_renyi_divergence_of_excluded_tokens_is_finite():
    draft = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    value = renyi_divergence(draft, torch.tensor([0.0, -math.inf, -math.inf]))
    value.backward()
    assert value.item() == pytest.approx(-draft.detach().log_softmax(-1)[0].item())
    assert draft.grad.isfinite().all()
