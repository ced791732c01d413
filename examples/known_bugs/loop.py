"""The pieces of a raw training loop: backward, all-reduce over axes of the mesh, the window.

Ranks are simulated: a loop visits them in turn, and a collective is a sum over a list.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from numden.property_tests.worlds.world import REPLICATED, Step, StepResult, World

__all__ = [
    "Batch",
    "LossOf",
    "Micro",
    "Params",
    "Reduce",
    "added",
    "all_reduce",
    "average_over",
    "backward",
    "by_rank",
    "loss_sum",
    "mean",
    "mean_over_ranks",
    "num_tokens",
    "scaled",
    "size",
    "sum_over_ranks",
    "total",
    "trainer",
]

Batch = dict[str, Tensor]
Params = dict[str, Tensor]
LossOf = Callable[[Params, "Micro"], Tensor]
"""``(params, micro) -> scalar``: what ``backward`` is called on."""
Reduce = Callable[[Sequence[Params], World], Params]
"""``(trees by rank, world) -> tree``: what every rank has after the collective."""


class Micro(NamedTuple):
    """Where a trainer is when it computes the loss of a micro-step.

    Attributes:
        batch: the micro-batch.
        window: the micro-batches of this rank.
        world: the windows of all ranks.
        rank: this rank.
    """

    batch: Batch
    window: tuple[Batch, ...]
    world: World
    rank: int

    @property
    def tokens(self) -> Tensor:
        """Scored tokens of the micro-batch."""
        return num_tokens(self.batch)

    @property
    def window_tokens(self) -> Tensor:
        """Scored tokens of this rank's window."""
        return total(num_tokens, self.window)

    @property
    def all_tokens(self) -> Tensor:
        """Scored tokens of all windows, each once."""
        return total(num_tokens, self.all_batches)

    @property
    def all_batches(self) -> list[Batch]:
        """The micro-batches of all ranks, each once."""
        return [batch for rank in self.world.data_ranks for batch in self.world[rank]]

    @property
    def num_ranks(self) -> int:
        """Ranks that hold data of their own."""
        return len(self.world.data_ranks)

    @property
    def steps_per_rank(self) -> float:
        """Micro-steps of a window; the average, if ranks differ."""
        return len(self.all_batches) / self.num_ranks


def num_tokens(batch: Batch) -> Tensor:
    """Scored tokens."""
    return batch["mask"].sum()


def loss_sum(params: Params, batch: Batch) -> Tensor:
    """Sum of the losses of the scored tokens."""
    return params["w"] * (batch["losses"] * batch["mask"]).sum()


def total(count: Callable[[Batch], Tensor], batches: Sequence[Batch]) -> Tensor:
    """A count of several batches."""
    return torch.stack([torch.zeros(()).double(), *map(count, batches)]).sum()


def mean(summed: Tensor, count: Tensor) -> Tensor:
    """A sum over a count; 0 where nothing is counted."""
    return summed / count.clamp(min=1)


def backward(loss: Tensor, params: Params) -> Params:
    """The gradient of ``loss``; zeros for params that it does not use."""
    grads = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    return dict(zip(params, grads, strict=True))


def scaled(tree: Params, factor: float | Tensor) -> Params:
    """Each leaf times ``factor``."""
    return {name: leaf * factor for name, leaf in tree.items()}


def added(trees: Sequence[Params]) -> Params:
    """The sum of trees, leaf by leaf."""
    return {name: torch.stack([tree[name] for tree in trees]).sum(0) for name in trees[0]}


def size(world: World, *axes: str) -> int:
    """How many ranks the axes span; an axis that the mesh lacks has one."""
    return int(torch.tensor([world.mesh.get(axis, 1) for axis in axes]).prod())


def all_reduce(trees: Sequence[Params], world: World, *axes: str) -> list[Params]:
    """The SUM over ``axes``, by rank: ranks add up that differ on no other axis."""
    places = world.coordinates

    def group(rank: int) -> list[int]:
        rest = {axis: at for axis, at in places[rank].items() if axis not in axes}
        return [r for r, place in enumerate(places) if place.items() >= rest.items()]

    return [added([trees[peer] for peer in group(rank)]) for rank in range(len(world))]


def sum_over_ranks(trees: Sequence[Params], world: World) -> Params:
    """SUM over all ranks that hold data of their own."""
    axes = [axis for axis in world.mesh if axis not in REPLICATED]
    return all_reduce(trees, world, *axes)[0]


def mean_over_ranks(trees: Sequence[Params], world: World) -> Params:
    """AVG over all ranks that hold data of their own, as DDP and FSDP have it."""
    return scaled(sum_over_ranks(trees, world), 1 / len(world.data_ranks))


def average_over(*axes: str) -> Reduce:
    """A reduction: AVG over ``axes``, SUM over the other data axes."""
    return lambda trees, world: scaled(sum_over_ranks(trees, world), 1 / size(world, *axes))


def by_rank(loss_of: LossOf, params: Params, world: World) -> list:
    """``[rank][micro-step]``: the gradients, with the loss as one more leaf, before any sum."""
    params = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}

    def micro_step(micro: Micro) -> Params:
        loss = loss_of(params, micro)
        return backward(loss, params) | {"loss": loss.detach()}

    return [
        [micro_step(Micro(batch, world[rank], world, rank)) for batch in world[rank]]
        for rank in range(len(world))
    ]


def trainer(
    loss_of: LossOf,
    *,
    reduce: Reduce = mean_over_ranks,
    logged: LossOf | None = None,
    log_reduce: Reduce | None = None,
) -> Step:
    """A raw loop: backward in each micro-step, gradients add up, one reduction at the end.

    Args:
        loss_of: ``(params, micro) -> scalar``: what ``backward`` is called on.
        reduce: what happens to gradients at the end of the window.
        logged: ``(params, micro) -> scalar``, added up for the log, if that is not ``loss_of``.
        log_reduce: what happens to the log over ranks; ``reduce`` if not given.
    """

    def step(params: Params, world: World) -> StepResult:
        zero = dict.fromkeys([*params, "loss"], torch.zeros(()).double())
        grads = reduce([added([zero, *grads]) for grads in by_rank(loss_of, params, world)], world)
        shown = by_rank(logged or loss_of, params, world)
        log = (log_reduce or reduce)([added([zero, *each]) for each in shown], world)["loss"]
        return StepResult(grads={name: grads[name] for name in params}, loss=log)

    return step
