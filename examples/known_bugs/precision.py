"""Bugs of short dtypes: gradients and counts that round."""

import torch
from torch import Tensor

from numden.property_tests.worlds.problems import token_batch
from numden.property_tests.worlds.world import Step, StepResult, World

from .case import Case
from .loop import Batch, Micro, Params, backward, by_rank, loss_sum, sum_over_ranks, trainer
from .problems import long_rows
from .ranks import without_log
from .windows import TOKENS, of_window, summed, window

__all__ = ["CASES"]


def accumulating(dtype: torch.dtype) -> Step:
    """A loop that adds up micro-steps in ``dtype``."""

    def step(params: Params, world: World) -> StepResult:
        held = []
        for grads in by_rank(of_window, params, world):
            held.append({"w": torch.zeros((), dtype=dtype)})
            for micro_grads in grads:
                held[-1]["w"] += micro_grads["w"].to(dtype)
        wide = [{"w": grads["w"].double()} for grads in held]
        return StepResult(grads=sum_over_ranks(wide, world))

    return step


def chunked(dtype: torch.dtype) -> Step:
    """A fused loss that goes through rows one by one and adds their gradients in ``dtype``."""

    def of_batch(params: Params, micro: Micro) -> Params:
        held = torch.zeros((), dtype=dtype)
        for chunk in chunks(micro.batch):
            loss = of_window(params, micro._replace(batch=chunk, window=(chunk,)))
            held += backward(loss, params)["w"].to(dtype)
        return {"w": held.double()}

    def step(params: Params, world: World) -> StepResult:
        leaf = {"w": params["w"].detach().clone().requires_grad_()}
        by_rank = [
            [of_batch(leaf, Micro(batch, window, world, rank)) for batch in window]
            for rank, window in enumerate(world)
        ]
        zero = torch.zeros(()).double()
        sums = [{"w": torch.stack([zero, *[g["w"] for g in grads]]).sum()} for grads in by_rank]
        return StepResult(grads=sum_over_ranks(sums, world))

    return step


def chunks(batch: Batch) -> list[Batch]:
    """The rows of a batch, one by one."""
    return [
        {name: field[i : i + 1] for name, field in batch.items()} for i in range(len(batch["mask"]))
    ]


def counted_in_bf16(params: Params, micro: Micro) -> Tensor:
    """A count that is stacked with a bf16 loss becomes bf16."""
    total = loss_sum(params, micro.batch)
    stacked = torch.stack([total.detach().bfloat16(), micro.all_tokens.bfloat16()])
    return total / stacked[1].double().clamp(min=1)


def many_chunks() -> World:
    """4096 rows of a token each, which add 0.01 each to the gradient."""
    return World([[token_batch([[40.96]] * 4096)]])


# fmt: off
CASES = (
    Case("B47", "micro-steps are added in bf16", "pytorch/pytorch#194434",
         TOKENS, accumulating(torch.bfloat16), accumulating(torch.float64),
         window([768.0], [3.0], [-768.0]), "grads", 1.0, 0.0, "bf16 accumulation"),
    Case("B48", "chunks of a fused loss are added in bf16", "linkedin/Liger-Kernel#512",
         TOKENS, chunked(torch.bfloat16), chunked(torch.float64),
         many_chunks(), "grads", 40.96, 4.0, "bf16 accumulation"),
    # The report's number is the count, 257 that becomes 256; so a mean of 256 becomes 257.
    Case("B72", "a count that travels with a bf16 loss", "hpcaitech/ColossalAI dist_cross_entropy",
         long_rows(), without_log(trainer(counted_in_bf16, reduce=sum_over_ranks)),
         without_log(summed), window([256.0] * 257), "grads", 256.0, 257.0, "bf16 count"),
)
# fmt: on
