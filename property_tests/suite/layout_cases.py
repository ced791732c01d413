"""What each test of a layout shows: the table, the gradient of the whole batch, the global norm."""

from functools import partial

import torch
from dist_cases import CASES, apart, reference
from torch import nn
from torch.distributed.tensor import DTensor

from numden import dist
from numden.pure import LossTerms, optim, term_mean, tree

ROUNDING = 1e-13
"""Of float64 sums in another order."""

MAX_NORM = 1e-2
"""Less than any norm here, so that clipping changes each gradient."""


def full(grads):
    """Whole gradients on each rank, as a dict by name."""
    leaves = tree.named(grads)
    return {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in leaves.items()}


def norm(grads):
    squares = dist.sum_of_squares(tree.leaves(grads))
    return float(squares.sqrt())


def clipped(grads):
    return optim.clip_by_global_norm(MAX_NORM, sum_squares=dist.sum_of_squares)(grads)


def off(result, loss, grads):
    """How far a result is from the loss and the gradient of one process, as three numbers.

    Loss, gradient, and the gradient clipped by its global norm.
    """
    expected = tree.named(grads)
    length = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    # torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm, and so do we.
    shorter = {name: g * (MAX_NORM / (length + 1e-6)) for name, g in expected.items()}
    return (
        abs(float(result.loss) - float(loss)) / abs(float(loss)),
        apart(full(result.grads), expected),
        apart(full(clipped(result.grads)), shorter) + abs(norm(result.grads) / float(length) - 1),
    )


def of_whole_batch(case="mean"):
    """Loss and gradient of all rows of ``WINDOW``, by plain autograd in one process."""
    loss, grads, _ = reference(CASES[case])
    return loss, grads


# --- experts --------------------------------------------------------------------------------------

NUM_EXPERTS, WIDTH = 4, 3


def values(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def expert_params():
    return {
        "experts": values(NUM_EXPERTS, WIDTH, WIDTH, seed=1),
        "router": values(NUM_EXPERTS, WIDTH, seed=2),
        "trunk": values(WIDTH, WIDTH, seed=3),
    }


def expert_batch(num_tokens, seed):
    return {"x": values(num_tokens, WIDTH, seed=seed), "y": values(num_tokens, WIDTH, seed=-seed)}


EXPERT_WINDOWS = [
    [expert_batch(size, 10 * rank + i) for i, size in enumerate(sizes, 1)]
    for rank, sizes in enumerate([(3, 2), (1,), (4, 1, 2), (2, 5)])
]
"""Ragged windows of four ranks; no two ranks have the same tokens."""


def mixture(params, x, exchange):
    """Each token goes to its likeliest expert, wherever that is, and comes back weighted.

    Each rank is sent as many rows as this one has tokens, zeros where a token is not for it.
    """
    hidden = torch.tanh(x @ params["trunk"])
    chances = (hidden @ params["router"].T).softmax(-1)
    chance, expert = chances.max(-1)
    num_here = len(params["experts"])
    ranks = torch.arange(NUM_EXPERTS // num_here)[:, None]
    sent = hidden * (expert // num_here == ranks)[..., None]
    received, which = exchange(sent), exchange((expert % num_here).expand(len(ranks), -1))
    outputs = torch.einsum("rnw,ewv->rnev", received, params["experts"])
    picked = outputs.gather(2, which[..., None, None].expand(*which.shape, 1, WIDTH)).squeeze(2)
    returned = exchange(picked).sum(0)
    return chance[:, None] * returned, chances


def expert_loss(params, batch, exchange=lambda parts: parts):
    """Squared error, and a term with a den of its own that only the router learns from."""
    out, chances = mixture(params, batch["x"], exchange)
    errors = (out - batch["y"]).square().sum()
    return LossTerms(
        {"fit": errors, "spread": chances.square().sum()},
        {"fit": len(out), "spread": chances.numel()},
    )


EXPERT_OBJECTIVE = term_mean({"fit": 1.0, "spread": 0.5})


def exchange_over(mesh):
    """``expert_loss`` where experts are cut over the ranks of a one-dimensional mesh.

    Ranks of one ``mesh`` must have micro-batches of one size for an exchange: they are padded, and
    padding is not counted.
    """
    return partial(_padded_loss, exchange=partial(dist.all_to_all, axis=mesh))


LONGEST = 5


def _padded_loss(params, batch, exchange):
    x = nn.functional.pad(batch["x"], (0, 0, 0, LONGEST - len(batch["x"])))
    out, chances = mixture(params, x, exchange)
    real = len(batch["x"])
    errors = (out[:real] - batch["y"]).square().sum()
    return LossTerms(
        {"fit": errors, "spread": chances[:real].square().sum()},
        {"fit": real, "spread": real * NUM_EXPERTS},
    )


def experts_of_whole_batch(num_ranks):
    """Loss and gradient of all tokens of the first ranks, by plain autograd in one process."""
    params = tree.map(lambda p: p.requires_grad_(), expert_params())
    batches = [batch for window in EXPERT_WINDOWS[:num_ranks] for batch in window]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("x", "y")}
    loss = EXPERT_OBJECTIVE(expert_loss(params, whole))
    leaves, structure = tree.flatten(params)
    return loss.detach(), tree.unflatten(structure, list(torch.autograd.grad(loss, leaves)))
