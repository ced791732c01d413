"""Bugs of accumulation: micro-steps that weigh too much, divisions that miss or come twice."""

from typing import Any

import torch
from torch import Tensor

from numden.property_tests.strategies import meshes
from numden.property_tests.worlds.problems import token_batch, tokens
from numden.property_tests.worlds.world import Step, StepResult, World

from .case import Case
from .loop import (
    Batch,
    Micro,
    Params,
    added,
    by_rank,
    loss_sum,
    mean,
    num_tokens,
    scaled,
    sum_over_ranks,
    total,
    trainer,
)
from .problems import actor_and_critic, rows

__all__ = ["CASES"]

ONE = {"ranks": 1}
MEANS = "mean of micro-step means"
AGAIN = "divided by the number of micro-steps again"
MISSING = "missing division by the number of micro-steps"
CONFIGURED = "divided by the configured number of micro-steps"


def of_window(params: Params, micro: Micro) -> Tensor:
    """Right: the micro-step's sum over the tokens of all windows; gradients are summed."""
    return mean(loss_sum(params, micro.batch), micro.all_tokens)


def of_window_for_avg(params: Params, micro: Micro) -> Tensor:
    """Right too: what undoes the AVG that follows."""
    return of_window(params, micro) * micro.num_ranks


def micro_mean(params: Params, micro: Micro) -> Tensor:
    """The mean that a model returns."""
    return mean(loss_sum(params, micro.batch), micro.tokens)


def mean_of_means(params: Params, micro: Micro) -> Tensor:
    """The recipe of old: model mean over accumulation steps."""
    return micro_mean(params, micro) / len(micro.window)


def divided_twice(params: Params, micro: Micro) -> Tensor:
    """The trainer's habit, applied to a loss that is normalised already."""
    return of_window_for_avg(params, micro) / len(micro.window)


def over_configured(params: Params, micro: Micro) -> Tensor:
    """Model mean over the setting, whatever the loader had left."""
    return micro_mean(params, micro) / micro.world.accumulation


def over_generation(params: Params, micro: Micro) -> Tensor:
    """All that was generated together is counted, also what other windows train on."""
    elsewhere = [batch for rank in micro.world.data_ranks for batch in micro.world.rest[rank]]
    generated = micro.all_tokens + total(num_tokens, elsewhere)
    return mean(loss_sum(params, micro.batch), generated)


def row_mean(params: Params, micro: Micro) -> Tensor:
    """The mean over samples that a loss returns."""
    return params["w"] * micro.batch["losses"].mean()


def rows_over_configured(params: Params, micro: Micro) -> Tensor:
    """The packer chose another number of micro-steps than the setting."""
    return row_mean(params, micro) / micro.world.accumulation


def rows_of_window(params: Params, micro: Micro) -> Tensor:
    """Right: the sum over samples over all samples."""
    count = sum(batch["losses"].numel() for batch in micro.all_batches)
    return params["w"] * micro.batch["losses"].sum() / count


def _masked_sum(batch: Batch, field: str) -> Tensor:
    return (batch[field] * batch["mask"]).sum()


def critic_lost_the_count(params: Params, micro: Micro) -> Tensor:
    """The policy gets the count of all windows, the value loss that of its micro-step."""
    policy = params["actor"] * _masked_sum(micro.batch, "losses")
    value = params["critic"] * _masked_sum(micro.batch, "value_losses")
    return mean(policy, micro.all_tokens) + mean(value, micro.tokens)


def critic_has_the_count(params: Params, micro: Micro) -> Tensor:
    """Right: one count for both."""
    policy = params["actor"] * _masked_sum(micro.batch, "losses")
    value = params["critic"] * _masked_sum(micro.batch, "value_losses")
    return mean(policy + value, micro.all_tokens)


def accumulated(keep: Any) -> Step:
    """A loop that keeps some micro-steps only: ``keep(index, window length, accumulation)``."""

    def step(params: Params, world: World) -> StepResult:
        zero = {name: torch.zeros(()).double() for name in [*params, "loss"]}
        kept = [
            [each for at, each in enumerate(grads) if keep(at, len(grads), world.accumulation)]
            for grads in by_rank(of_window, params, world)
        ]
        grads = sum_over_ranks([added([zero, *each]) for each in kept], world)
        return StepResult(grads={"w": grads["w"]})

    return step


PIPELINE = 2  # chunks that a pipeline cuts each micro-batch into


def pipelined(*, divides_all: bool) -> Step:
    """Each micro-batch goes through a pipeline whose gradients are divided by its chunks.

    What it is handed is scaled up by as much, so that this division leaves the mean.
    """

    def step(params: Params, world: World) -> StepResult:
        def of_rank(micro_grads: list[Params]) -> Params:
            held = scaled(params, 0.0)
            for grads in micro_grads:
                new = scaled({"w": grads["w"]}, PIPELINE)
                if divides_all:
                    held = scaled(added([held, new]), 1 / PIPELINE)
                else:
                    held = added([held, scaled(new, 1 / PIPELINE)])
            return held

        held = [of_rank(grads) for grads in by_rank(of_window, params, world)]
        return StepResult(grads=sum_over_ranks(held, world))

    return step


def window(*micro_steps: list[float], accumulation: int | None = None) -> World:
    """One rank; each micro-step is one row of tokens."""
    return World([[token_batch([row]) for row in micro_steps]], accumulation=accumulation)


def samples(*micro_steps: list[float], accumulation: int | None = None) -> World:
    """One rank; each micro-step has the losses of some samples."""
    batches = [{"losses": torch.tensor(row, dtype=torch.float64)} for row in micro_steps]
    return World([batches], accumulation=accumulation)


def critic_window() -> World:
    """One rank, value losses of 4, 3, 2, 6 on 1, 3, 2, 2 tokens; the policy's are 1."""
    values = [[4.0], [1.0] * 3, [1.0] * 2, [3.0] * 2]
    batches = [token_batch([row]) for row in values]
    ones = [torch.ones_like(batch["losses"]) for batch in batches]
    pairs = zip(batches, ones, strict=True)
    return World([[b | {"losses": one, "value_losses": b["losses"]} for b, one in pairs]])


def generation() -> World:
    """The first of two windows that were generated together."""
    first, second = window([3.0, 3.0], [1.0, 1.0]), window([1.0, 1.0], [1.0, 1.0])
    return World(first, rest=second)


summed = trainer(of_window, reduce=sum_over_ranks)
averaged = trainer(of_window_for_avg)
TOKENS, ROWS = tokens(), rows()

# fmt: off
CASES = (
    Case("B01", "each micro-step divided by its own token count", "huggingface/transformers#34191",
         TOKENS, trainer(mean_of_means), averaged,
         window([8.0], [2.0, 2.0, 2.0]), "grads", 3.5, 5.0, MEANS, options=ONE),
    Case("B03", "micro-step means are added up", "huggingface/transformers#35204",
         TOKENS, trainer(micro_mean), averaged,
         window([3.0], [3.0]), "loss", 3.0, 6.0, MISSING, options=ONE),
    Case("B04", "a model takes the window's count and ignores it", "huggingface/transformers#37208",
         TOKENS, trainer(micro_mean), averaged,
         window([2.0], [2.0], [2.0], [2.0]), "grads", 2.0, 8.0, MISSING, options=ONE),
    Case("B11", "the count covers the whole generation batch", "huggingface/trl#5619",
         TOKENS, trainer(over_generation, reduce=sum_over_ranks), summed,
         generation(), "grads", 2.0, 1.0, "count of the generation batch"),
    Case("B12", "a normalised loss is divided by the steps", "modelscope/ms-swift#10117",
         TOKENS, trainer(divided_twice), averaged,
         window([2.0], [2.0], [2.0], [2.0]), "grads", 2.0, 0.5, AGAIN, options=ONE),
    Case("B14", "the trainer thinks that a loss of its own is normalised", "huggingface/trl#2615",
         ROWS, trainer(row_mean), trainer(rows_of_window, reduce=sum_over_ranks),
         samples(*[[0.7]] * 8), "grads", 0.7, 5.6, MISSING, options=ONE),
    Case("B16", "a call site forgets the global counts", "verl-project/verl#7200",
         ROWS, trainer(row_mean), trainer(rows_of_window, reduce=sum_over_ranks),
         samples(*[[0.25]] * 8), "grads", 0.25, 2.0, MISSING, options=ONE),
    Case("B17", "the policy has the global counts, the critic has not", "verl-project/verl#6957",
         actor_and_critic(), trainer(critic_lost_the_count),
         trainer(critic_has_the_count, reduce=sum_over_ranks),
         critic_window(), "grads", 1.875, 9.0, MISSING, leaf="critic", options=ONE),
    Case("B20", "the packer made fewer micro-steps than configured", "verl-project/verl#141",
         ROWS, trainer(rows_over_configured), trainer(rows_of_window, reduce=sum_over_ranks),
         samples([1.0] * 4, [2.0] * 3, [5.0], accumulation=4), "grads", 1.875, 2.0, CONFIGURED,
         options=ONE),
    Case("B25", "weighted micro-steps, divided by their number too", "areal-project/AReaL#1273",
         TOKENS, trainer(divided_twice), averaged,
         window([2.0], [4.0], [3.0], [5.0]), "grads", 3.5, 0.875, AGAIN,
         options={"mesh": meshes(("dp", "pp"))}),
    Case("B38", "a hook divides although scaling is off", "huggingface/accelerate#3877",
         TOKENS, trainer(divided_twice), averaged,
         window([1.0, 3.0], [2.0], [2.0], [2.0]), "grads", 2.0, 0.5, AGAIN, options={"ranks": 2}),
    Case("B42", "a schedule divides what has been accumulated so far", "pytorch/torchtitan#1733",
         TOKENS, pipelined(divides_all=True), pipelined(divides_all=False),
         window([6.0], [6.0], [6.0]), "grads", 6.0, 3.5, "running average of micro-steps",
         options=ONE),
    Case("B51", "the last window of an epoch is short", "Lightning-AI/pytorch-lightning#19987",
         TOKENS, trainer(over_configured), averaged,
         window([3.0], [5.0], accumulation=4), "grads", 4.0, 2.0, CONFIGURED, options=ONE),
    Case("B52", "a step on exact multiples only", "NVIDIA-NeMo/Automodel#2257",
         TOKENS, accumulated(lambda at, length, configured: length == configured), summed,
         window([2.0], [2.0], accumulation=4), "grads", 10.0, 8.0, "partial window dropped",
         before=(window(*[[4.0]] * 4), window(*[[4.0]] * 4)), options=ONE),
    Case("B57", "both the model and the trainer normalise", "unslothai/unsloth-zoo#1023",
         TOKENS, trainer(divided_twice), averaged,
         window([2.0, 2.0], [2.0], [2.0], [2.0]), "grads", 2.0, 0.5, AGAIN),
    Case("B63", "a resumed window has its counter and not its gradient", "Nerogar/OneTrainer#1465",
         TOKENS, accumulated(lambda at, length, configured: at >= length // 2), summed,
         window([1.0], [2.0], [3.0], [4.0]), "grads", 2.5, 1.75, "first micro-steps lost",
         options=ONE),
    Case("B74", "a factor is worked out in each micro-batch", "google-research/t5x trainer.py",
         TOKENS, trainer(micro_mean), averaged,
         window([8.0], [2.0, 2.0, 2.0]), "grads", 3.5, 10.0, MISSING, options=ONE),
)
# fmt: on
