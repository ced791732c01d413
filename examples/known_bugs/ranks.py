"""Bugs of data-parallel ranks: means of means, averages that are undone too often or never."""

from collections.abc import Sequence

from torch import Tensor

from numden.property_tests.worlds.problems import token_batch, tokens
from numden.property_tests.worlds.world import Step, StepResult, World

from .case import Case
from .loop import (
    Micro,
    Params,
    added,
    by_rank,
    loss_sum,
    mean,
    mean_over_ranks,
    scaled,
    sum_over_ranks,
    trainer,
)
from .problems import HORIZON, layers, sequences
from .windows import averaged, of_window, of_window_for_avg, summed

__all__ = ["CASES"]

LAYERS = ("root", "child")
AGAIN = "divided by the number of ranks again"
TIMES = "times the number of ranks"


def of_own_window(params: Params, micro: Micro) -> Tensor:
    """The count covers the accumulation, but not the other ranks."""
    return mean(loss_sum(params, micro.batch), micro.window_tokens)


def of_layers(params: Params, micro: Micro) -> Tensor:
    """A model of two layers; its sum over the tokens of all windows."""
    scale = params["root"] * params["child"]
    return mean(loss_sum({"w": scale}, micro.batch), micro.all_tokens)


def child_is_averaged(trees: Sequence[Params], world: World) -> Params:
    """The divide factor was set on the root; it does not reach the child."""
    grads, averages = sum_over_ranks(trees, world), mean_over_ranks(trees, world)
    return grads | {"child": averages["child"]}


def first_rank(trees: Sequence[Params], world: World) -> Params:
    """No reduction happens: each rank goes on with what it has. This is rank 0."""
    return trees[0]


def horizon_sum(params: Params, micro: Micro) -> Tensor:
    """Token sums over the horizon, not divided by the number of sequences."""
    return loss_sum(params, micro.batch) / HORIZON


def horizon_mean(params: Params, micro: Micro) -> Tensor:
    """Right: divided by the sequences of all windows too."""
    count = sum(len(batch["mask"]) for batch in micro.all_batches)
    return horizon_sum(params, micro) / count


def gathered(params: Params, micro: Micro) -> Tensor:
    """Each rank computes the mean of everything; what others sent carries no gradient."""
    own = of_window(params, micro)
    share = sum(
        of_window(params, micro._replace(batch=batch)).detach()
        for rank in micro.world.data_ranks
        if rank != micro.rank
        for batch in micro.world[rank]
    )
    # Others are in every micro-step's value; they are constants, so only the first one adds them.
    return own + (share if micro.batch is micro.window[0] else 0)


def psummed(params: Params, micro: Micro) -> Tensor:
    """The sum over ranks is inside of the loss, and its transpose sums over ranks again."""
    return of_window(params, micro) * micro.num_ranks


def reduced_too_early(params: Params, world: World) -> StepResult:
    """All-reduce runs before the last micro-step is added, so that one stays local."""
    micro_grads = by_rank(of_window_for_avg, params, world)
    zero = scaled(params | {"loss": params["w"]}, 0.0)
    early = mean_over_ranks([added([zero, *grads[:-1]]) for grads in micro_grads], world)
    last = added([zero, *micro_grads[0][-1:]])
    return StepResult(grads={"w": early["w"] + last["w"]})


def ranks(*windows: list[list[float]]) -> World:
    """Windows by rank; each micro-step is one row of tokens."""
    return World([[token_batch([row]) for row in window] for window in windows])


def without_log(step: Step) -> Step:
    """The step without its log."""
    return lambda params, world: StepResult(grads=step(params, world).grads)


TOKENS = tokens()
sum_of_layers = trainer(of_layers, reduce=sum_over_ranks)

# fmt: off
CASES = (
    Case("B02", "a count of the window, but not of all ranks", "huggingface/transformers#34242",
         TOKENS, trainer(of_own_window), averaged,
         ranks([[9.0]], [[1.0] * 9]), "grads", 1.8, 5.0, "mean of rank means"),
    Case("B08", "replicas divide by the full count, then average", "huggingface/transformers#37474",
         TOKENS, trainer(of_window), averaged,
         ranks([[8.0]], [[2.0, 2.0, 2.0]]), "loss", 3.5, 1.75, AGAIN),
    Case("B18", "no division by sequences, and an average over ranks", "verl-project/verl#5366",
         sequences(), trainer(horizon_sum), trainer(horizon_mean, reduce=sum_over_ranks),
         World([[token_batch([[6.0], [2.0]])], [token_batch([[4.0], [4.0]])]]), "grads", 1.0, 2.0,
         ("no division at all", AGAIN)),
    Case("B18b", "the first fix: still no division by sequences", "verl-project/verl#5417",
         sequences(), trainer(horizon_sum, reduce=sum_over_ranks),
         trainer(horizon_mean, reduce=sum_over_ranks),
         World([[token_batch([[6.0], [2.0]])], [token_batch([[4.0], [4.0]])]]), "grads", 1.0, 4.0,
         "no division at all"),
    Case("B34", "the scale is applied to another buffer", "NVIDIA/Megatron-LM#3023",
         TOKENS, trainer(of_window_for_avg, reduce=sum_over_ranks), averaged,
         ranks([[8.0]], [[8.0]]), "grads", 8.0, 16.0, TIMES),
    Case("B37", "all-reduce runs before the last micro-step is in", "deepspeedai/DeepSpeed#7985",
         TOKENS, reduced_too_early, without_log(averaged),
         ranks([[1.0], [3.0]], [[5.0], [7.0]]), "grads", 4.0, 3.0, "last micro-step not reduced"),
    Case("B44", "the divide factor is set on the root module only", "torch 2.14.1 FSDP2",
         layers(*LAYERS), trainer(of_layers, reduce=child_is_averaged), sum_of_layers,
         ranks([[2.0]], [[4.0]]), "grads", 3.0, 1.5, AGAIN, leaf="child"),
    Case("B45", "forcing SUM for communication still gives an average", "pytorch/pytorch#155903",
         layers(*LAYERS), trainer(of_layers), sum_of_layers,
         ranks([[4.0]], [[8.0]], [[12.0]], [[16.0]]), "grads", 10.0, 2.5, AGAIN, leaf="root"),
    Case("B46", "forward inside no_sync, backward outside", "pytorch DDP.no_sync",
         TOKENS, without_log(trainer(of_window_for_avg, reduce=first_rank)), without_log(averaged),
         ranks([[1.0]], [[2.0]]), "grads", 1.5, 1.0, "rank 0 only"),
    Case("B49", "a gather without gradient, then an average", "pytorch/pytorch#58005",
         TOKENS, trainer(gathered), summed,
         ranks([[4.0]], [[4.0]]), "grads", 4.0, 2.0, AGAIN),
    Case("B50", "a psum in the loss, and one after it", "jax-ml/jax#3970",
         TOKENS, trainer(psummed, reduce=sum_over_ranks), summed,
         ranks([[0.0]], [[4.0]]), "grads", 2.0, 4.0, TIMES),
)
# fmt: on
