"""Windows whose passes sleep as long as given, on ranks of their own: what a simulator predicts.

More ranks than cores cannot compute at once, but they can sleep at once. All else is real: the
autograd passes, the collectives, FSDP2.
"""

import itertools
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from normalising import Step, per_micro_step, per_window
from simulator import SCHEMES, SHARERS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from numden.pure import LossTerms

LAYOUTS = ("replicated", "FSDP2")

NUM_UNITS = 2
UNIT = 64 * 1024
"""Numbers in a unit."""

NUM_BYTES = NUM_UNITS * UNIT * 4

Batch = tuple[float, float]
"""Seconds of the forward and the backward pass."""


class Found(NamedTuple):
    """Seconds of each round that one rank found, by layout and scheme.

    Attributes:
        seconds: of the window.
        empty: of a window whose passes take no time: collectives and bookkeeping.
    """

    seconds: dict[str, dict[str, list[float]]]
    empty: dict[str, dict[str, list[float]]]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, batch: Batch) -> Tensor:
        time.sleep(batch[0])
        ctx.backward_seconds, ctx.shape = batch[1], weight.shape
        return weight.new_ones(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_seconds)
        return grads[0].expand(ctx.shape), None


class Unit(nn.Module):
    """Sleeps for its share of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(UNIT))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """A product, so that the backward pass comes to units one after the other."""
        return x * _Sleep.apply(self.weight, batch)


def loss_of_tree(params: Any, batch: Batch) -> LossTerms:
    """One sum over one token."""
    return LossTerms({"x": _Sleep.apply(params["weight"], batch)}, 1.0)


def loss_of_units(module: Any, batch: Batch) -> LossTerms:
    """One sum over one token."""
    return LossTerms({"x": module(torch.ones(()), (batch[0] / NUM_UNITS, batch[1] / NUM_UNITS))}, 1)


class Units(nn.Module):
    """Units, one after the other."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(NUM_UNITS))
        for unit in self.units:
            fully_shard(unit, mesh=mesh)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """All of them."""
        for unit in self.units:
            x = unit(x, batch)
        return x


def steps(layout: str, window: list[Batch], *, sharers: int | None = None) -> dict[str, Step]:
    """A window by each scheme; ``sharers`` in place of the layout's own."""
    num_ranks = c10d.get_world_size()
    sharers = sharers or SHARERS[layout] or num_ranks
    if sharers == 1:
        problem = loss_of_tree, {"x": 1.0}, {"weight": torch.ones(NUM_BYTES // 4)}, window
        made = per_micro_step(*problem), per_window(*problem)
    else:
        shape = (num_ranks,) if sharers == num_ranks else (num_ranks // sharers, sharers)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "fsdp")[-len(shape) :])
        problem = loss_of_units, {"x": 1.0}, fully_shard(Units(mesh), mesh=mesh), window
        made = per_micro_step(*problem), per_window(*problem, mesh=mesh)
    return dict(zip(SCHEMES, made, strict=True))


def on_rank(compute: Tensor, rounds: int) -> Found:
    """All layouts and schemes in turn, after a round that does not count."""
    mine = compute[c10d.get_rank()]
    windows = [[(f, b) for f, b in times.tolist()] for times in (mine, mine * 0)]
    made = [{layout: steps(layout, window) for layout in LAYOUTS} for window in windows]
    found = Found(*({layout: {s: [] for s in SCHEMES} for layout in LAYOUTS} for _ in windows))
    for round_ in range(rounds + 1):
        for kind, by_layout in zip(made, found, strict=True):
            for layout, scheme in itertools.product(LAYOUTS, SCHEMES):
                seconds = _seconds(kind[layout][scheme])
                if round_:
                    by_layout[layout][scheme].append(seconds)
    return found


def _seconds(run: Step) -> float:
    c10d.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
