"""Bugs of the numbers that a trainer shows; the gradient is right."""

import torch
from torch import Tensor

from numden.property_tests.worlds.problems import token_batch
from numden.property_tests.worlds.world import Step, StepResult, World

from .case import Case
from .loop import LossOf, Micro, Params, Reduce, loss_sum, mean, total, trainer
from .masks import attended
from .ranks import first_rank, of_own_window, ranks
from .terms import BALANCE, balance_summed, balanced, with_balance
from .windows import TOKENS, averaged, mean_of_means, of_window_for_avg, window

__all__ = ["CASES"]


def evaluating(loss_of: LossOf) -> Step:
    """The right update, and an evaluation that adds up ``loss_of`` over batches and ranks."""

    def step(params: Params, world: World) -> StepResult:
        shown = trainer(loss_of)(params, world).loss
        return averaged(params, world)._replace(eval_loss=shown)

    return step


def logging(loss_of: LossOf, reduce: Reduce | None = None) -> Step:
    """The right update, and a log that adds up ``loss_of`` over micro-steps."""
    return trainer(of_window_for_avg, logged=loss_of, log_reduce=reduce)


def is_last(micro: Micro) -> bool:
    """Whether the log of this micro-step overwrites the others."""
    return micro.batch is micro.window[-1]


def global_share_averaged(params: Params, micro: Micro) -> Tensor:
    """Values over the global count should be added over micro-steps; they are averaged."""
    return of_window_for_avg(params, micro) / len(micro.window)


def assigned(params: Params, micro: Micro) -> Tensor:
    """``=`` for ``+=``: what came before the last micro-step is gone."""
    return of_window_for_avg(params, micro) * is_last(micro)


def mean_assigned(params: Params, micro: Micro) -> Tensor:
    """The same with a mean of micro-steps."""
    return mean_of_means(params, micro) * is_last(micro)


def over_attended(params: Params, micro: Micro) -> Tensor:
    """The sum has one mask, the count another."""
    count = total(attended, micro.all_batches)
    return mean(loss_sum(params, micro.batch), count) * micro.num_ranks


def right_answers() -> World:
    """Six answers, four of which count, three of which are right."""
    batch = token_batch([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]])
    batch["mask"] &= torch.arange(7) < 5
    return World([[batch]])


right_log = evaluating(of_window_for_avg)
LAST = "last micro-step only"

# fmt: off
CASES = (
    Case("B10", "the evaluation averages means of batches", "huggingface/transformers#39241",
         TOKENS, evaluating(mean_of_means), right_log,
         window([10.0], [1.0] * 9), "eval_loss", 1.9, 5.5, "mean of batch means",
         options={"ranks": 1}),
    Case("B19", "shares of a global mean are averaged in the log", "verl-project/verl#4711",
         TOKENS, logging(global_share_averaged), averaged,
         window([2.0], [2.0], [2.0], [2.0]), "loss", 2.0, 0.5,
         "divided by the number of micro-steps again"),
    Case("B21", "the log has the last micro-step's share", "verl-project/verl#102",
         TOKENS, logging(assigned), averaged,
         window([4.0], [2.0], [6.0]), "loss", 4.0, 2.0, LAST),
    Case("B35", "assigned in the log, then divided by the interval", "NVIDIA/Megatron-LM!3668",
         TOKENS, logging(mean_assigned), averaged,
         window([4.0], [3.0], [2.0], [1.0]), "loss", 2.5, 0.25,
         ("mean of micro-step means", LAST), options={"ranks": 1}),
    Case("B36", "the log shows one rank", "NVIDIA/Megatron-LM#3199",
         TOKENS, logging(of_own_window, first_rank), averaged,
         ranks([[0.2]], [[0.6]]), "loss", 0.4, 0.2, "rank 0 only"),
    Case("B58", "the balance is divided for backward only", "InternLM/xtuner#1101",
         BALANCE, trainer(with_balance, logged=balance_summed), trainer(with_balance),
         balanced([0.02] * 4), "loss", 0.02, 0.08,
         "term multiplied by the number of micro-steps"),
    Case("B66", "an accuracy with two masks", "sgl-project/SpecForge eagle3",
         TOKENS, evaluating(over_attended), right_log,
         right_answers(), "eval_loss", 0.75, 0.5, "unmasked count"),
)
# fmt: on
