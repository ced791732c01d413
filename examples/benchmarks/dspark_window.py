"""DSpark training windows of ragged micro-steps for some ranks, and how long their passes take."""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from numden.models import dspark, job
from numden.models.job_rows import read_corpus
from numden.models.train_config import Data, Drafter, Target, TrainConfig
from numden.pure import LossFn, tree
from numden.pure.terms import split_metrics

NUM_MICRO_STEPS = 16
"""Of each rank."""


class Setting(NamedTuple):
    """The window of each rank, and the drafter's params, loss function and config."""

    windows: list[list[Any]]
    params: Any
    loss_fn: LossFn
    config: dspark.Config


def setting(num_ranks: int) -> Setting:
    """The first windows of a run of ``numden train``, with an untrained target."""
    config = TrainConfig(
        data=Data(max_bytes=400_000, vocab_size=2048, max_length=256),
        target=Target(hidden_size=128, num_layers=4),
        drafter=Drafter(micro_steps=NUM_MICRO_STEPS * num_ranks, rows_per_micro_step=2),
    )
    corpus = read_corpus(config)
    shape = job.target_config(config, corpus.tokenizer.vocab_size)
    drafter = job.drafter_config(config, shape, corpus.tokenizer.special_ids["mask"])
    target = job.target_init(config, shape)
    windows = [
        next(job.drafter_windows(config, corpus, shape, drafter, target, rank, num_ranks))
        for rank in range(num_ranks)
    ]
    frozen = job.drafter_target(config, drafter, target)
    params = job.drafter_init(config, drafter, frozen)
    loss_fn = job.drafter_loss(config, drafter, frozen)
    return Setting(windows, params, loss_fn, drafter)


def pass_seconds(each: Setting, window: list[Any]) -> Tensor:
    """Seconds of the forward and backward pass of each micro-step, ``[micro-steps, 2]``."""
    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), each.params)
    found = []
    for batch in window:
        start = time.perf_counter()
        terms = split_metrics(each.loss_fn(leaves, batch))[0]
        loss = torch.stack(list(terms.num.values())).sum()
        middle = time.perf_counter()
        loss.backward()
        found.append((middle - start, time.perf_counter() - middle))
    return torch.tensor(found, dtype=torch.float64)
