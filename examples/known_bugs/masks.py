"""Bugs of masks, weights and empty batches: what is counted is not what is summed."""

from collections.abc import Callable

import torch
from torch import Tensor

from numden.property_tests.worlds.problems import token_batch, tokens_packed
from numden.property_tests.worlds.world import Step, World

from .case import Case
from .loop import (
    Batch,
    LossOf,
    Micro,
    Params,
    loss_sum,
    mean,
    num_tokens,
    sum_over_ranks,
    total,
    trainer,
)
from .problems import filtered, router_mean, weighted
from .ranks import of_own_window, ranks
from .windows import TOKENS, of_window, summed, window

__all__ = ["CASES"]


def over(count: Callable[[Batch], Tensor]) -> LossOf:
    """The right sum over another count of the windows."""

    def loss_of(params: Params, micro: Micro) -> Tensor:
        return mean(loss_sum(params, micro.batch), total(count, micro.all_batches))

    return loss_of


def labels_before_shift(batch: Batch) -> Tensor:
    """Labels, also that of position 0, which nothing predicts."""
    return (batch["labels"] != -100).sum()


def attended(batch: Batch) -> Tensor:
    """Positions that are no padding; prompts and masked turns too."""
    return batch["attention_mask"][:, 1:].sum()


def less_boundaries(batch: Batch) -> Tensor:
    """Documents meet at boundaries, which the collator has masked already."""
    documents = torch.stack([row.max() - row.min() + 1 for row in batch["sample_ids"]])
    return num_tokens(batch) - (documents - 1).sum()


def over_less_boundaries(params: Params, micro: Micro) -> Tensor:
    """The count may reach 0, or less."""
    return loss_sum(params, micro.batch) / total(less_boundaries, micro.all_batches)


def kept(batch: Batch) -> Tensor:
    """Tokens that are scored and have a finite probability."""
    return batch["mask"] & batch["finite"]


def kept_sum(params: Params, batch: Batch) -> Tensor:
    """Sum of the losses of those."""
    return params["w"] * (batch["losses"] * kept(batch)).sum()


def kept_over_all(params: Params, micro: Micro) -> Tensor:
    """Dropped tokens leave the sum and stay in the count."""
    return mean(kept_sum(params, micro.batch), micro.all_tokens)


def kept_over_kept(params: Params, micro: Micro) -> Tensor:
    """Right: one mask."""
    count = total(lambda batch: kept(batch).sum(), micro.all_batches)
    return mean(kept_sum(params, micro.batch), count)


def mean_of_padded_rows(params: Params, micro: Micro) -> Tensor:
    """Each row is averaged over its padded length; then the sum is divided by tokens."""
    of_rows = params["w"] * (micro.batch["losses"] * micro.batch["mask"]).mean(1)
    return mean(of_rows.sum(), micro.all_tokens)


def rank_mean_weighted(params: Params, micro: Micro) -> Tensor:
    """The mean of a rank's window, weighted by its tokens: 0/0 if it has none."""
    share = mean(micro.window_tokens, micro.all_tokens)
    return loss_sum(params, micro.batch) / micro.window_tokens * share


def micro_mean_weighted(params: Params, micro: Micro) -> Tensor:
    """The mean that the model returns, weighted by its tokens: 0/0 if it has none."""
    return loss_sum(params, micro.batch) / micro.tokens * mean(micro.tokens, micro.all_tokens)


def weighted_sum(params: Params, batch: Batch) -> Tensor:
    """Sum of weighted losses."""
    return params["w"] * (batch["weights"] * batch["losses"] * batch["mask"]).sum()


def weight_sum(batch: Batch) -> Tensor:
    """Sum of the weights of scored tokens."""
    return (batch["weights"] * batch["mask"]).sum()


def with_weights(params: Params, micro: Micro) -> Tensor:
    """Right: weighted losses over tokens."""
    return mean(weighted_sum(params, micro.batch), micro.all_tokens)


def over_weights(params: Params, micro: Micro) -> Tensor:
    """Right: weighted losses over weights."""
    count = total(weight_sum, micro.all_batches)
    return weighted_sum(params, micro.batch) / count.clamp(min=1e-9)


def reweighted_by_labels(params: Params, micro: Micro) -> Tensor:
    """A micro-step's weighted mean, weighted by its number of labels in the window."""
    own = weighted_sum(params, micro.batch) / weight_sum(micro.batch).clamp(min=1e-9)
    return own * mean(micro.tokens, micro.all_tokens)


def router(mask: str | None) -> LossOf:
    """The mean of a router's quantity over positions, beside the loss of tokens."""

    def chosen(batch: Batch) -> Tensor:
        return torch.ones_like(batch["router"]) if mask is None else batch[mask].double()

    def loss_of(params: Params, micro: Micro) -> Tensor:
        summed = params["w"] * (micro.batch["router"] * chosen(micro.batch)).sum()
        count = total(lambda batch: chosen(batch).sum(), micro.all_batches)
        return of_window(params, micro) + mean(summed, count)

    return loss_of


def masked_turns() -> World:
    """Ten completion tokens, four of which are kept."""
    batch = token_batch([[3.0] * 10])
    batch["mask"] &= torch.arange(11) < 5
    return World([[batch]])


def dropped_tokens() -> World:
    """Five tokens, two of which have no finite probability."""
    batch = token_batch([[2.0] * 5])
    return World([[batch | {"finite": torch.tensor([[True] * 4 + [False] * 2])}]])


def two_documents() -> World:
    """Documents of five and three tokens in one row; the first of each is not scored."""
    batch = token_batch([[1.0] * 7])
    batch["mask"][0, 5] = False
    batch["labels"][0, 5] = -100
    return World([[batch | {"sample_ids": torch.tensor([[0] * 5 + [1] * 3])}]])


def padded_row() -> World:
    """Five positions, two of which count."""
    return World([[token_batch([[3.0, 3.0]], columns=5)]])


def weights(*micro_steps: tuple[list[float], list[float]]) -> World:
    """One rank; the losses and the weights of the tokens of each micro-step."""
    batches = [
        token_batch([losses]) | {"weights": torch.tensor([[1.0, *values]]).double()}
        for losses, values in micro_steps
    ]
    return World([batches])


def padded_router() -> World:
    """Two real positions with a router's quantity of 1/2, two of padding with 9/10."""
    batch = token_batch([[0.0]], columns=4)
    return World([[batch | {"router": torch.tensor([[0.5, 0.5, 0.9, 0.9]]).double()}]])


def summing(loss_of: LossOf) -> Step:
    """A loop that adds up gradients over micro-steps and ranks."""
    return trainer(loss_of, reduce=sum_over_ranks)


NAN = float("nan")

# fmt: off
CASES = (
    Case("B05", "labels are counted before the shift", "huggingface/transformers#46204",
         TOKENS, summing(over(labels_before_shift)), summed,
         World([[token_batch([[1.0] * 4] * 2)]]), "loss", 1.0, 0.8,
         "count before the label shift"),
    Case("B15", "masked turns are counted", "huggingface/trl#6439",
         TOKENS, summing(over(attended)), summed,
         masked_turns(), "grads", 3.0, 1.2, "unmasked count"),
    Case("B23", "dropped tokens stay in the count", "pytorch/torchtitan#4174",
         filtered(), summing(kept_over_all), summing(kept_over_kept),
         dropped_tokens(), "grads", 2.0, 1.2, "unmasked count"),
    Case("B56", "boundaries of documents are taken off twice", "unslothai/unsloth-zoo#1066",
         tokens_packed(), summing(over_less_boundaries), summed,
         two_documents(), "grads", 1.0, 1.2, "documents subtracted from the count"),
    Case("B59", "a rank without tokens divides by zero", "allenai/OLMo-core#657",
         TOKENS, summing(rank_mean_weighted), summed,
         ranks([[2.0] * 4], [[]]), "grads", 2.0, NAN, "0/0 in an empty rank"),
    Case("B59b", "the work-around: such a rank counts with a mean of 0", "allenai/OLMo-core#452",
         TOKENS, trainer(of_own_window), summed,
         ranks([[2.0] * 4], [[]]), "grads", 2.0, 1.0, "mean of rank means"),
    Case("B60", "a micro-step without tokens divides by zero", "NVIDIA-NeMo/Automodel#3797",
         TOKENS, summing(micro_mean_weighted), summed,
         window([], [2.0, 2.0]), "grads", 2.0, NAN, "0/0 in an empty micro-step"),
    Case("B64", "a mean over padded rows, then over tokens", "d2l-ai/d2l-en#2076",
         TOKENS, summing(mean_of_padded_rows), summed,
         padded_row(), "grads", 3.0, 0.6, "divided by the padded length"),
    Case("B65", "weights do not reach the gradient", "linkedin/Liger-Kernel#968",
         weighted(over_weights=False), summed, summing(with_weights),
         weights(([2.0, 0.0], [0.0, 2.0])), "grads", 0.0, 1.0, "weights ignored"),
    Case("B75", "padding goes through the router's statistics", "NVIDIA/Megatron-LM#1984",
         router_mean(), summing(router(None)), summing(router("attention_mask")),
         padded_router(), "grads", 0.5, 0.7, "padding in num and den"),
    Case("B77", "weighted means are weighted by labels", "hiyouga/LLaMA-Factory base_trainer.py",
         weighted(over_weights=True), summing(reweighted_by_labels), summing(over_weights),
         weights(([4.0, 4.0], [0.5, 0.5]), ([1.0, 1.0], [1.0, 1.0])), "grads", 2.0, 2.5,
         "micro-step means weighted by another count"),
)
# fmt: on
