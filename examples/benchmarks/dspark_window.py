"""A DSpark training window of ragged micro-steps, and two ways to normalise it over ranks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor

from numden import dist
from numden.models import dspark, job
from numden.models.job_rows import read_corpus
from numden.models.train_config import Data, Drafter, Target, TrainConfig
from numden.pure import tree

NUM_MICRO_STEPS = 16
"""Of each rank."""


class Setting(NamedTuple):
    """What a rank trains on: its window, the drafter's params, loss function and config."""

    window: list[Any]
    params: Any
    loss_fn: Callable[..., Any]
    config: dspark.Config


def setting(rank: int, num_ranks: int, *, num_steps: int = NUM_MICRO_STEPS) -> Setting:
    """The first window of a run of ``numden train``, with an untrained target."""
    config = TrainConfig(
        data=Data(max_bytes=400_000, vocab_size=2048),
        target=Target(hidden_size=128, num_layers=4),
        drafter=Drafter(micro_steps=num_steps * num_ranks, rows_per_micro_step=2),
    )
    corpus = read_corpus(config)
    shape = job.target_config(config, corpus.tokenizer.vocab_size)
    drafter = job.drafter_config(config, shape, corpus.tokenizer.special_ids["mask"])
    target = job.target_init(config, shape)
    window = next(job.drafter_windows(config, corpus, shape, drafter, target, rank, num_ranks))
    return Setting(
        window, job.drafter_init(config, drafter), job.drafter_loss(drafter, target), drafter
    )


def per_window(each: Setting) -> Callable[[], Any]:
    """numden: sums, one packed all-reduce, one of the gradients."""
    grad = dist.window_grad(each.loss_fn, dspark.objective(each.config), plan="after")
    return lambda: grad(each.params, each.window).grads


def per_micro_step(each: Setting) -> Callable[[], Any]:
    """As trainers do it: in each forward the denominator is summed over ranks and read.

    The reading is theirs, too: they branch on whether anything is supervised. Gradients of the
    micro-steps' means are summed over ranks and divided by the number of micro-steps: a mean of
    means.
    """
    alphas = each.config.alphas

    def run() -> Any:
        leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), each.params)
        for batch in each.window:
            terms, _ = each.loss_fn(leaves, batch)
            den = terms.den.clone()
            c10d.all_reduce(den)
            if float(den) > 0:
                loss: Tensor = sum(alpha * terms.num[name] for name, alpha in alphas.items()) / den
                (loss / len(each.window)).backward()
        grads = [leaf.grad for leaf in tree.leaves(leaves)]
        options = c10d.AllreduceCoalescedOptions()
        assert c10d.group.WORLD is not None
        c10d.group.WORLD.allreduce_coalesced(grads, options).wait()
        return tree.unflatten(tree.structure(leaves), grads)

    return run


VARIANTS = {"per micro-step": per_micro_step, "per window": per_window}


def micro_step_seconds(each: Setting, rounds: int) -> Tensor:
    """How long each micro-step of a window takes on this rank alone, forward and backward."""
    import time

    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), each.params)
    found = []
    for round_ in range(rounds + 1):
        for batch in each.window:
            start = time.perf_counter()
            terms, _ = each.loss_fn(leaves, batch)
            sum(terms.num.values()).backward()
            if round_:
                found.append(time.perf_counter() - start)
    return torch.tensor(found, dtype=torch.float64)
