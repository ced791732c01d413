"""Bugs of a second loss term: balance of experts, z-loss, more prediction heads, priors."""

import torch
from torch import Tensor

from numden.property_tests.worlds.problems import (
    token_batch,
    tokens_and_balance,
    two_heads,
)
from numden.property_tests.worlds.world import World
from numden.pure import term_mean

from .case import Case
from .loop import (
    Batch,
    LossOf,
    Micro,
    Params,
    loss_sum,
    mean,
    size,
    sum_over_ranks,
    total,
    trainer,
)
from .meshes import on
from .problems import balance_by_tokens
from .windows import of_window

__all__ = ["CASES"]

COEF = 0.01
EXTRA = 0.1


def balance(params: Params, batch: Batch) -> Tensor:
    """The mean over a micro-batch that a router makes."""
    return params["w"] * batch["balance"].mean()


def balance_share(params: Params, micro: Micro) -> Tensor:
    """Right: the micro-step's part of the mean over the micro-steps of a rank."""
    return balance(params, micro.batch) / micro.steps_per_rank


def with_balance(params: Params, micro: Micro) -> Tensor:
    """Right: only the part that is normalised by all tokens undoes the average over ranks."""
    return of_window(params, micro) * micro.num_ranks + balance_share(params, micro)


def all_undone(params: Params, micro: Micro) -> Tensor:
    """The whole scalar undoes the average, also the part that should be averaged."""
    return (of_window(params, micro) + balance_share(params, micro)) * micro.num_ranks


def balance_summed(params: Params, micro: Micro) -> Tensor:
    """The token part may be summed over micro-steps; the balance is summed with it."""
    return of_window(params, micro) * micro.num_ranks + balance(params, micro.batch)


def with_coefficient(times: int) -> LossOf:
    """The model's loss has ``coef · balance`` in it; the trainer may add it again."""

    def loss_of(params: Params, micro: Micro) -> Tensor:
        ce = of_window(params, micro) * micro.num_ranks
        return ce + times * COEF * balance_share(params, micro)

    return loss_of


def all_divided_last(params: Params, micro: Micro) -> Tensor:
    """Sums of tokens are divided at the end, and so is the balance, which is a mean already."""
    share = balance(params, micro.batch) / len(micro.all_batches)
    return mean(loss_sum(params, micro.batch) + share, micro.all_tokens)


def balance_for_sum(params: Params, micro: Micro) -> Tensor:
    """Right: what gradients that are summed over ranks need."""
    return of_window(params, micro) + balance(params, micro.batch) / len(micro.all_batches)


def rescaled(count: str) -> LossOf:
    """All is divided by the tokens at the end, so the balance is multiplied by a count first."""

    def loss_of(params: Params, micro: Micro) -> Tensor:
        shards = {
            "micro-batch": micro.tokens,
            "shard": micro.tokens / size(micro.world, "tp"),
            "replicas": micro.tokens * size(micro.world, "tp"),
            "sequence": micro.tokens / len(micro.batch["mask"]),
        }
        share = balance(params, micro.batch) * shards[count]
        return mean(loss_sum(params, micro.batch) + share, micro.all_tokens)

    return loss_of


def extra_sum(params: Params, batch: Batch) -> Tensor:
    """Sum of the losses of the extra head."""
    return params["w"] * (batch["extra_losses"] * batch["extra_mask"]).sum()


def extra_tokens(batch: Batch) -> Tensor:
    """What the extra head scores."""
    return batch["extra_mask"].sum()


def with_extra(params: Params, micro: Micro) -> Tensor:
    """Right: each head over its own count."""
    count = total(extra_tokens, micro.all_batches)
    return of_window(params, micro) + mean(extra_sum(params, micro.batch), count)


def extra_over_main(params: Params, micro: Micro) -> Tensor:
    """Both heads over the count of the main one."""
    both = loss_sum(params, micro.batch) + extra_sum(params, micro.batch)
    return mean(both, micro.all_tokens)


def extra_mean_weighted(params: Params, micro: Micro) -> Tensor:
    """The extra head returns a mean of its micro-step, which is weighted back: 0/0 if empty."""
    own, count = extra_tokens(micro.batch), total(extra_tokens, micro.all_batches)
    return of_window(params, micro) + extra_sum(params, micro.batch) / own * mean(own, count)


def extra_as_mean(params: Params, micro: Micro) -> Tensor:
    """Right: coefficient times mean."""
    count = total(extra_tokens, micro.all_batches)
    return of_window(params, micro) + EXTRA * mean(extra_sum(params, micro.batch), count)


def extra_as_sum(params: Params, micro: Micro) -> Tensor:
    """Coefficient times sum, beside a mean."""
    return of_window(params, micro) + EXTRA * extra_sum(params, micro.batch)


def balanced(*windows: list[float], ce: float = 0.0, **mesh: int) -> World:
    """Windows by rank; a micro-step is a token of loss ``ce`` and its balance."""
    batches = [
        [token_batch([[ce]]) | {"balance": torch.tensor([value]).double()} for value in window]
        for window in windows
    ]
    return World(batches, mesh=mesh or None)


def one_balance(rows: list[list[float]], value: float, **mesh: int) -> World:
    """A micro-step of ``rows`` and their balance; all ranks hold the same."""
    batch = token_batch(rows)
    batch["balance"] = torch.full((len(rows),), value, dtype=torch.float64)
    ranks = max(mesh.values(), default=1)
    return World([[batch]] * ranks, mesh=mesh or None)


def uneven_balance() -> World:
    """Two ranks, one with a token and one with three, balance 1/2 on each."""
    rows = [[8.0]], [[2.0, 2.0, 2.0]]
    half = {"balance": torch.tensor([0.5]).double()}
    return World([[token_batch(row) | half] for row in rows])


def heads(main: float, num_main: int, extra: float, num_extra: int) -> World:
    """One micro-step: tokens of the main head, the last of which the extra head scores too."""
    batch = token_batch([[main] * num_main])
    place = torch.arange(num_main + 1)
    batch["extra_losses"] = torch.full((1, num_main + 1), extra, dtype=torch.float64)
    batch["extra_mask"] = (place > num_main - num_extra).unsqueeze(0)
    return World([[batch]])


BALANCE, BY_TOKENS, HEADS = tokens_and_balance(), balance_by_tokens(), two_heads()
WEIGHTED_BALANCE = BALANCE._replace(objective=term_mean({"ce": 1.0, "balance": COEF}))
WEIGHTED_HEADS = HEADS._replace(objective=term_mean({"main": 1.0, "extra": EXTRA}))
GROWS = "term multiplied by the number of micro-steps"
with_heads = trainer(with_extra, reduce=sum_over_ranks)
by_tokens = trainer(rescaled("micro-batch"), reduce=sum_over_ranks)

# fmt: off
CASES = (
    Case("B06", "the balance undoes an average that it needs", "huggingface/transformers#48690",
         BALANCE, trainer(all_undone), trainer(with_balance),
         uneven_balance(), "grads", 4.0, 4.5, "term multiplied by the number of ranks"),
    Case("B07", "the balance is summed over micro-steps", "transformers 5.24.0 modeling_mixtral",
         BALANCE, trainer(balance_summed), trainer(with_balance),
         balanced([0.25] * 4), "grads", 0.25, 1.0, GROWS),
    Case("B13", "the trainer adds a balance that is in the loss", "huggingface/trl#4012",
         WEIGHTED_BALANCE, trainer(with_coefficient(2)), trainer(with_coefficient(1)),
         balanced([2.0]), "grads", 0.02, 0.04, "term counted twice"),
    Case("B28", "a mean is divided by the tokens of the window", "NVIDIA/Megatron-LM!2851",
         BALANCE, trainer(all_divided_last, reduce=sum_over_ranks),
         trainer(balance_for_sum, reduce=sum_over_ranks),
         one_balance([[0.0] * 1000], 0.01), "grads", 0.01, 1e-5,
         "term divided by the number of tokens of ce"),
    Case("B29", "rescaled by the tokens of a tp shard", "NVIDIA/Megatron-LM#5047",
         BY_TOKENS, trainer(rescaled("shard"), reduce=sum_over_ranks), by_tokens,
         one_balance([[0.0] * 4], 0.01, tp=4), "grads", 0.01, 0.0025,
         "term divided by the size of tp", options=on("dp", "tp")),
    Case("B29b", "an older release: the term is added on each tp rank", "NVIDIA/Megatron-LM#2237",
         BY_TOKENS, trainer(rescaled("replicas"), reduce=sum_over_ranks), by_tokens,
         one_balance([[0.0] * 4], 0.01, tp=4), "grads", 0.01, 0.04,
         "term multiplied by the size of tp", options=on("dp", "tp")),
    Case("B30", "rescaled by the tokens of one sequence", "NVIDIA/Megatron-LM#5798",
         BY_TOKENS, trainer(rescaled("sequence"), reduce=sum_over_ranks), by_tokens,
         one_balance([[0.0] * 2] * 4, 0.01), "grads", 0.01, 0.0025,
         "term divided by the number of rows"),
    Case("B31", "an extra head is divided by the main head's count", "NVIDIA/Megatron-LM#3159",
         HEADS, trainer(extra_over_main, reduce=sum_over_ranks), with_heads,
         heads(0.0, 8, 2.0, 6), "grads", 2.0, 1.5, "count of another term"),
    Case("B32", "an extra head without targets", "NVIDIA/Megatron-LM#3396",
         HEADS, trainer(extra_mean_weighted, reduce=sum_over_ranks), with_heads,
         heads(2.0, 1, 2.0, 0), "grads", 2.0, float("nan"), "0/0 in an empty micro-step"),
    Case("B70", "a prior is summed over micro-steps", "OpenNMT/OpenNMT-py#2209",
         BALANCE, trainer(balance_summed), trainer(with_balance),
         balanced([0.1] * 4), "grads", 0.1, 0.4, GROWS),
    Case("B76", "an extra head enters as a sum beside a mean", "NVIDIA/Megatron-LM#1532",
         WEIGHTED_HEADS, trainer(extra_as_sum, reduce=sum_over_ranks),
         trainer(extra_as_mean, reduce=sum_over_ranks),
         heads(0.0, 8, 2.0, 8), "grads", 0.2, 1.6, "no division at all"),
)
# fmt: on
