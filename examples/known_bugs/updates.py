"""Bugs of what follows the gradient: clipping, weight decay, params that are left out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from numden.property_tests.worlds.problems import token_batch
from numden.property_tests.worlds.world import Step, StepResult, World
from numden.pure.optim import Optimizer, from_torch

from .case import Case
from .loop import (
    Micro,
    Params,
    added,
    by_rank,
    mean,
    scaled,
    sum_over_ranks,
    trainer,
)
from .problems import ROUTED, routed
from .windows import TOKENS, averaged, micro_mean, of_window, window

__all__ = ["CASES"]

MAX_NORM = 1.0
LOSS_SCALE = 1024.0


def clipped(grads: Params, max_norm: float = MAX_NORM) -> Params:
    """Scaled down to ``max_norm``, if the global norm is larger."""
    norm = torch.stack([leaf.detach() for leaf in grads.values()]).norm()
    return scaled(grads, (max_norm / norm.clamp(min=1e-300)).clamp(max=1.0))


def clipping(step: Step, scale: float = 1.0) -> Step:
    """Clips what a loop has, at the end of the window; while it is still times ``scale``."""

    def clipped_step(params: Params, world: World) -> StepResult:
        grads = step(params, world).grads
        return StepResult(grads=scaled(clipped(scaled(grads, scale)), 1 / scale))

    return clipped_step


def of_experts(params: Params, micro: Micro) -> Tensor:
    """Right: each row has its expert; the sum over the tokens of all windows."""
    batch = micro.batch
    by_expert = torch.stack([params[name] for name in ROUTED])[batch["expert"]]
    rows = by_expert * (batch["losses"] * batch["mask"]).sum(1)
    return mean(rows.sum(), micro.all_tokens)


def clipping_each_micro_step(params: Params, world: World) -> StepResult:
    """Clips what has been accumulated after each micro-step, ranks summed."""
    micro_grads = by_rank(of_experts, params, world)
    held = scaled(params, 0.0)
    for at in range(max(map(len, micro_grads))):
        present = [
            _leaves(grads[at], params) if at < len(grads) else scaled(params, 0.0)
            for grads in micro_grads
        ]
        held = clipped(added([held, sum_over_ranks(present, world)]))
    return StepResult(grads=held)


def paired_by_position(params: Params, world: World) -> StepResult:
    """Buffers hold the gradients that a rank has; elements that meet are of different params."""
    ranks = _used_and_grads(params, world)
    reduced = torch.stack([_flattened(grads, used) for used, grads in ranks]).mean(0)
    values = iter(reduced)
    own = {name: next(values) for name in ROUTED if name in ranks[0][0]}
    return StepResult(grads=scaled(params, 0.0) | own)


def _flattened(grads: Params, names: set[str]) -> Tensor:
    """The gradients of some params, one after the other."""
    values = [grads[name] for name in ROUTED if name in names]
    return torch.stack([*values, *[torch.zeros(()).double()] * (len(ROUTED) - len(values))])


def _used_and_grads(params: Params, world: World) -> list[tuple[set[str], Params]]:
    """By rank: which experts its rows reached, and its gradients, for an average over ranks."""
    zero = scaled(params, 0.0)
    grads = [
        scaled(added([zero, *[_leaves(each, params) for each in window]]), len(world.data_ranks))
        for window in by_rank(of_experts, params, world)
    ]
    return list(zip([_reached(window) for window in world], grads, strict=True))


def _reached(window: Sequence[dict[str, Tensor]]) -> set[str]:
    """The experts that scored tokens are sent to."""
    sent = [batch["expert"][batch["mask"].any(1)] for batch in window]
    return {ROUTED[int(expert)] for rows in sent for expert in rows}


def _leaves(tree: Params, params: Params) -> Params:
    return {name: tree[name] for name in params}


def updating(step: Step, optimizer: Optimizer) -> Step:
    """New params by a fresh optimizer from the gradient of a loop."""

    def updated(params: Params, world: World) -> StepResult:
        grads = step(params, world).grads
        return StepResult(params=optimizer.update(grads, optimizer.init(params), params)[0])

    return updated


def updating_each_micro_step(params: Params, world: World) -> StepResult:
    """The optimizer, with its weight decay, runs after each micro-step."""
    micro_grads, state = by_rank(of_window, params, world), SGD.init(params)
    for at in range(max(map(len, micro_grads))):
        present = [_leaves(grads[at], params) for grads in micro_grads if at < len(grads)]
        params, state = SGD.update(added(present), state, params)
    return StepResult(params=params)


def unused_left_out(params: Params, world: World) -> StepResult:
    """An expert that no row reached has no gradient, so the optimizer passes over it."""
    used = set().union(*map(_reached, world))
    updated = updating(expert_grads, ADAMW)(params, world).params
    return StepResult(params={name: (updated if name in used else params)[name] for name in params})


def experts(*ranks: Sequence[tuple[str, float]]) -> World:
    """Windows by rank; each micro-step is a token of an expert, with its loss."""
    return World(
        [
            [
                token_batch([[loss]]) | {"expert": torch.tensor([ROUTED.index(name)])}
                for name, loss in window
            ]
            for window in ranks
        ]
    )


def shared_buffer() -> World:
    """Rank 0 has gradients 1 for a and 2 for b, rank 1 has none for a and 4 for b."""
    both = token_batch([[1.5], [3.0]]) | {"expert": torch.tensor([0, 1])}
    one = token_batch([[6.0]]) | {"expert": torch.tensor([1])}
    return World([[both], [one]])


SGD = from_torch(torch.optim.SGD, lr=0.5, weight_decay=0.2)
ADAMW = from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
EXPERTS = routed()
expert_grads = trainer(of_experts, reduce=sum_over_ranks)
CLIPS = {"max_norm": MAX_NORM}

# fmt: off
CASES = (
    Case("B40", "gradients that a rank lacks shift the others", "deepspeedai/DeepSpeed#545",
         EXPERTS, paired_by_position, expert_grads,
         shared_buffer(), "grads", 0.5, 2.5, (), leaf="a", options={"ranks": 2}),
    Case("B53", "weight decay runs in each micro-step", "keras-team/keras#19990",
         TOKENS, updating_each_micro_step, updating(averaged, SGD),
         window([0.0], [0.0], [0.0]), "params", 0.9, 0.729, "optimizer step per micro-step",
         options={"returns": "params", "optimizer": SGD}),
    Case("B54", "clipped after each micro-step", "huggingface/transformers#986",
         EXPERTS, clipping_each_micro_step, clipping(expert_grads),
         experts([("a", 4.0), ("b", 4.0)]), "grads", 0.7071067811865476, 0.4472135954999579,
         "clipped in each micro-step", leaf="a", options=CLIPS),
    Case("B55", "clipped while still times the loss scale", "milesial/Pytorch-UNet#468",
         TOKENS, clipping(averaged, LOSS_SCALE), clipping(averaged),
         window([0.5]), "grads", 0.5, 1 / 1024, "clipped before normalisation", options=CLIPS),
    Case("B62", "experts without tokens are not decayed", "NVIDIA-NeMo/Automodel#2995",
         EXPERTS, unused_left_out, updating(expert_grads, ADAMW),
         experts([("b", 1.0)]), "params", 0.99, 1.0, "params without a gradient left out", leaf="a",
         options={"returns": "params", "optimizer": ADAMW}),
    Case("B68", "a missing division that clipping hides", "paiml/aprender#2123",
         TOKENS, clipping(trainer(micro_mean)), clipping(averaged),
         window(*[[0.1]] * 8), "grads", 0.1, 0.8,
         "missing division by the number of micro-steps", options=CLIPS | {"ranks": 1}),
)
# fmt: on
