"""Bugs of meshes: the size of a tensor, context, sequence, expert or pipeline axis in the scale."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from numden.property_tests.strategies import meshes
from numden.property_tests.worlds.problems import token_batch
from numden.property_tests.worlds.world import StepResult, World

from .case import Case
from .loop import (
    LossOf,
    Micro,
    Params,
    all_reduce,
    average_over,
    loss_sum,
    mean,
    mean_over_ranks,
    scaled,
    size,
    sum_over_ranks,
    trainer,
)
from .problems import layers
from .ranks import TOKENS, of_own_window
from .windows import averaged, of_window, summed

__all__ = ["CASES"]

EXPERTS = ("dense", "expert")


def undo_all_processes(params: Params, micro: Micro) -> Tensor:
    """Undoes an average over all processes; but it is taken over dp."""
    return of_window(params, micro) * len(micro.world)


def counted_by_all_processes(params: Params, micro: Micro) -> Tensor:
    """The count is summed over all processes, though those along tp hold the same tokens."""
    held = [{"tokens": micro._replace(window=window).window_tokens} for window in micro.world]
    everywhere = all_reduce(held, micro.world, *micro.world.mesh)[0]["tokens"]
    return mean(loss_sum(params, micro.batch), everywhere) * micro.num_ranks


def counted_by_context(params: Params, micro: Micro) -> Tensor:
    """Each cp rank has the mask of whole sequences, and counts are summed over dp and cp."""
    shards = [{"tokens": micro._replace(window=window).window_tokens} for window in micro.world]
    sequences = all_reduce(shards, micro.world, "cp")
    everywhere = all_reduce(sequences, micro.world, "dp", "cp")[0]["tokens"]
    return mean(loss_sum(params, micro.batch), everywhere)


def undo(*axes: str) -> LossOf:
    """A loss that undoes an average over ``axes``."""
    return lambda params, micro: of_window(params, micro) * size(micro.world, *axes)


def with_experts(params: Params, micro: Micro) -> Tensor:
    """A dense layer and an expert; undoes the average over all ranks."""
    scale = params["dense"] * params["expert"]
    return mean(loss_sum({"w": scale}, micro.batch), micro.all_tokens) * micro.num_ranks


def experts_over_their_group(trees: Sequence[Params], world: World) -> Params:
    """Dispatch has brought the tokens of all ep ranks to the expert; dp ranks are averaged."""
    dispatched = all_reduce(trees, world, "ep")
    expert = scaled(all_reduce(dispatched, world, "dp")[0], 1 / size(world, "dp"))
    return mean_over_ranks(trees, world) | {"expert": expert["expert"]}


def factor_needs_a_group(trees: Sequence[Params], world: World) -> Params:
    """The divide factor of the expert is applied by its reduction; a group of one has none."""
    dispatched = all_reduce(trees, world, "ep")[0]["expert"]
    right = mean_over_ranks(trees, world)
    return right if size(world, "dp") > 1 else right | {"expert": dispatched}


def summed_by_schedule(params: Params, world: World) -> StepResult:
    """The pipeline schedule calls backward on sums; the log is divided afterwards."""
    undivided = trainer(lambda p, micro: loss_sum(p, micro.batch), reduce=sum_over_ranks)
    return StepResult(grads=undivided(params, world).grads, loss=summed(params, world).loss)


def mesh(windows: Sequence[Sequence[list[float]]], **axes: int) -> World:
    """Windows by rank on a mesh; each micro-step is one row of tokens."""
    return World([[token_batch([row]) for row in window] for window in windows], mesh=axes)


def on(*axes: str) -> dict[str, Any]:
    """Options: worlds are drawn on meshes with these axes."""
    return {"mesh": meshes(axes, max_ranks=6)}


TWICE = [[[8.0]], [[8.0]], [[2.0, 2.0, 2.0]], [[2.0, 2.0, 2.0]]]  # dp 2, tp 2

# fmt: off
CASES = (
    Case("B09", "undoes an average over too many ranks", "huggingface/transformers#39648",
         TOKENS, trainer(undo_all_processes), averaged,
         mesh(TWICE, dp=2, tp=2), "grads", 3.5, 7.0, "times the size of tp",
         options=on("dp", "tp")),
    Case("B22", "a per-token loss without the factor for cp", "THUDM/slime#990",
         TOKENS, trainer(undo("dp")), averaged,
         mesh([[[1.0]] * 4, [[1.0]] * 4], dp=1, cp=2), "grads", 1.0, 0.5,
         "divided by the size of cp", options=on("dp", "cp")),
    Case("B24", "cp ranks have one mask, and each counts it", "PrimeIntellect-ai/prime-rl#2358",
         TOKENS, trainer(counted_by_context, reduce=sum_over_ranks), summed,
         mesh([[[1.0] * 2], [[1.0] * 2], [[1.0] * 6], [[1.0] * 6]], dp=2, cp=2), "grads", 1.0, 0.5,
         "divided by the size of cp", options=on("dp", "cp")),
    Case("B26", "times cp, for an average that is over dp alone", "NVIDIA/Megatron-LM#673",
         TOKENS, trainer(undo("dp", "cp"), reduce=average_over("dp")),
         trainer(undo("dp"), reduce=average_over("dp")),
         mesh([[[1.0] * 4], [[1.0] * 4]], dp=1, cp=2), "grads", 1.0, 2.0,
         "times the size of cp", options=on("dp", "cp")),
    Case("B26b", "the reverse: an average over dp and cp, undone for dp", "NVIDIA/Megatron-LM#906",
         TOKENS, trainer(undo("dp")), trainer(undo("dp", "cp")),
         mesh([[[1.0] * 4], [[1.0] * 4]], dp=1, cp=2), "grads", 1.0, 0.5,
         "divided by the size of cp", options=on("dp", "cp")),
    Case("B27", "each cp shard divides by its own count", "NVIDIA/Megatron-LM#7513",
         TOKENS, trainer(of_own_window), averaged,
         mesh([[[6.0]], [[]]], cp=2), "grads", 6.0, 3.0, "mean of rank means", options=on("cp")),
    Case("B33", "experts are averaged over too small a group", "NVIDIA/Megatron-LM#5956",
         layers(*EXPERTS), trainer(with_experts, reduce=experts_over_their_group),
         trainer(with_experts), mesh([[[4.0]]] * 4, dp=2, ep=2), "grads", 4.0, 8.0,
         "times the size of ep", leaf="expert", options=on("dp", "ep")),
    Case("B39", "an average over dp and sp, undone for dp", "deepspeedai/DeepSpeed#5555",
         TOKENS, trainer(undo("dp")), trainer(undo("dp", "sp")),
         mesh([[[1.0] * 100]] * 8, dp=1, sp=8), "loss", 1.0, 0.125,
         "divided by the size of sp", options=on("dp", "sp")),
    Case("B41", "the pipeline's backward sees the undivided sum", "pytorch/torchtitan#2972",
         TOKENS, summed_by_schedule, summed,
         mesh([[[2.0] * 4, [2.0] * 4]] * 2, dp=1, pp=2), "grads", 2.0, 16.0,
         "no division at all", options=on("dp", "pp")),
    Case("B43", "a group of one skips the divide factor", "pytorch/pytorch#167178",
         layers(*EXPERTS), trainer(with_experts, reduce=factor_needs_a_group),
         trainer(with_experts), mesh([[[4.0]]] * 4, dp=1, ep=4), "grads", 4.0, 16.0,
         "times the size of ep", leaf="expert", options={"mesh": {"dp": 1, "ep": 4}}),
    Case("B67", "tokens are counted on tp ranks too", "meta-pytorch/torchtune full_finetune",
         TOKENS, trainer(counted_by_all_processes), averaged,
         mesh(TWICE, dp=2, tp=2), "grads", 3.5, 1.75, "divided by the size of tp",
         options=on("dp", "tp")),
    Case("B71", "a factor that looks stray is removed", "ByteDance-Seed/VeOmni#1079",
         TOKENS, trainer(undo("dp")), trainer(undo("dp", "sp")),
         mesh([[[1.0]]] * 4, dp=1, sp=4), "grads", 1.0, 0.25,
         "divided by the size of sp", options=on("dp", "sp")),
)
# fmt: on
