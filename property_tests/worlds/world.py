"""What a step gets and what it gives: the windows of all ranks, and the result of one update."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["REPLICATED", "Step", "StepResult", "World", "as_result", "windows_of"]

REPLICATED = ("tp", "pp")
"""Mesh axes whose ranks see the same data; on any other axis each rank has data of its own."""


class World(tuple[tuple[Any, ...], ...]):
    """The windows of all ranks: ``world[rank][micro_step]`` is a batch.

    A tuple of tuples, so a step may treat it as the windows and no more. Ranks are numbered along
    ``mesh`` in row-major order. A token is in one batch of the world, except that the ranks along
    ``tp`` and ``pp`` hold the same batches.

    Attributes:
        mesh: the size of each mesh axis by its name; ``{"dp": number of ranks}`` if not given.
        accumulation: how many micro-steps the trainer is configured for; a window that has fewer
            is the last one of an epoch. The longest window if not given.
        rest: by rank, micro-batches that were generated together with these, and which other
            windows train on; the generation batch of reinforcement learning.

    Examples:
        >>> world = World([["a", "b"], ["c"]])
        >>> world[1], world.mesh, world.accumulation
        (('c',), {'dp': 2}, 2)
        >>> World([["a"], ["a"]], mesh={"dp": 1, "tp": 2}).data_ranks
        [0]
    """

    mesh: dict[str, int]
    accumulation: int
    rest: tuple[tuple[Any, ...], ...]

    def __new__(
        cls,
        windows: Iterable[Iterable[Any]],
        *,
        mesh: Mapping[str, int] | None = None,
        accumulation: int | None = None,
        rest: Iterable[Iterable[Any]] = (),
    ) -> "World":
        """A world of ``windows`` by rank.

        Raises:
            ValueError: the mesh has another number of ranks, or a window is longer than
                ``accumulation``.
        """
        self = super().__new__(cls, (tuple(window) for window in windows))
        self.mesh = dict(mesh) if mesh is not None else {"dp": len(self)}
        longest = max((len(window) for window in self), default=0)
        self.accumulation = longest if accumulation is None else accumulation
        self.rest = tuple(tuple(window) for window in rest) or ((),) * len(self)
        if math.prod(self.mesh.values()) != len(self) or len(self.rest) != len(self):
            raise ValueError(
                f"World: needs a window for each rank of the mesh, got {len(self)} windows, "
                f"{len(self.rest)} rests and mesh={self.mesh}. Give one for each."
            )
        if longest > self.accumulation:
            raise ValueError(
                f"World: no window may be longer than accumulation, got {longest} micro-steps and "
                f"accumulation={accumulation}. Leave accumulation out, or raise it."
            )
        return self

    @property
    def coordinates(self) -> list[dict[str, int]]:
        """The place of each rank on the mesh."""
        places = product(*(range(size) for size in self.mesh.values()))
        return [dict(zip(self.mesh, place, strict=True)) for place in places]

    @property
    def data_ranks(self) -> list[int]:
        """The ranks that hold each token once: one for each place along the data axes."""
        replicated = [axis for axis in self.mesh if axis in REPLICATED]
        return [
            rank
            for rank, place in enumerate(self.coordinates)
            if not any(place[axis] for axis in replicated)
        ]


class StepResult(NamedTuple):
    """What a step made of a world. Fields that the trainer does not show stay None.

    Attributes:
        grads: the gradient that the optimizer gets, a tree like the params.
        params: the params after the update, a tree like the params.
        loss: the loss that the trainer logs for the window.
        eval_loss: the loss that it reports when it evaluates on the same micro-batches, with the
            params from before the update.
    """

    grads: Any = None
    params: Any = None
    loss: Tensor | float | None = None
    eval_loss: Tensor | float | None = None


Step = Callable[[Any, World], Any]
"""``(params, world) -> StepResult``, or a bare tree: the gradient.

A step that works on one number of ranks only says so by an attribute ``ranks``.
"""


def as_result(result: Any) -> StepResult:
    """What a step returned as a ``StepResult``; a bare tree, a tensor too, is the gradient.

    Anything that has fields ``grads`` or ``params`` beside ``loss`` will do, a ``WindowGrad`` too.

    Examples:
        >>> as_result({"w": 1.0})
        StepResult(grads={'w': 1.0}, params=None, loss=None, eval_loss=None)
    """
    if isinstance(result, StepResult):
        return result
    fields = [field for field in StepResult._fields if hasattr(result, field)]
    if isinstance(result, Mapping | Tensor) or not {"grads", "params"} & set(fields):
        return StepResult(grads=result)
    return StepResult(**{field: getattr(result, field) for field in fields})


def windows_of(world: Sequence[Sequence[Any]]) -> World:
    """``world`` as a ``World``, its attributes kept if it has them."""
    return world if isinstance(world, World) else World(world)
