"""Run a loop on one window and read off what it made: a gradient, or an update."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ...pure import tree
from ..worlds.world import StepResult, World, as_result, windows_of
from ._module import bare_name, named_params, values_of, whole

__all__ = [
    "Loop",
    "OptimizerSteps",
    "Window",
    "as_it_is",
    "loader_of",
    "rank_windows",
    "read_gradients",
    "read_update",
]

Loop = Callable[[Any, Any], Any]
"""``(module, window) -> loss``, or None, or what has fields ``grads`` or ``params``."""


class Window(tuple[Any, ...]):
    """The micro-batches of one rank: a tuple, and what its trainer is configured for.

    Attributes:
        rank: the number of the rank.
        lengths: the number of micro-steps of each rank.
        accumulation: see ``World``.
        mesh: see ``World``.
        rest: this rank's part of ``World.rest``.
    """

    rank: int
    lengths: tuple[int, ...]
    accumulation: int
    mesh: dict[str, int]
    rest: tuple[Any, ...]


def rank_windows(world: Any) -> list[Window]:
    """The window of each rank of a world, which may be bare windows by rank."""
    world = windows_of(world)
    return [_window(world, rank) for rank in range(len(world))]


def _window(world: World, rank: int) -> Window:
    window = Window(world[rank])
    window.rank, window.lengths = rank, tuple(map(len, world))
    window.accumulation = world.accumulation
    window.mesh, window.rest = world.mesh, world.rest[rank]
    return window


def loader_of(window: Window) -> DataLoader[Any]:
    """The micro-batches as those of a data loader, each as it is."""
    return DataLoader(list(window), batch_size=None, collate_fn=as_it_is)  # pyright: ignore[reportArgumentType]


def as_it_is(batch: Any) -> Any:
    """The ``collate_fn`` for batches that are batches already."""
    return batch


def read_gradients(loop: Loop, module: Any, params: Any, window: Any) -> StepResult:
    """Run a loop that leaves the gradient in ``.grad``, or returns it.

    Args:
        loop: the loop.
        module: what it gets; a module has ``params`` loaded already.
        params: tensors by the names that the result shall have.
        window: what it gets.

    Raises:
        ValueError: the loop changed the params.
    """
    result = _returned(loop(module, window))
    if result.grads is None and isinstance(module, nn.Module):
        given = values_of(params)
        ours = named_params(module, given)
        moved = [name for name in ours if not torch.equal(whole(ours[name]), given[name])]
        if moved:
            raise ValueError(
                f"loop: must leave the params as they are, got other values of {moved}. "
                "Say updates=True if the loop takes an optimizer step."
            )
        result = result._replace(grads={name: _grad(param) for name, param in ours.items()})
    return _whole(result, params)


def read_update(loop: Loop, module: nn.Module, params: Any, window: Any) -> StepResult:
    """Run a loop that updates the params: what its optimizer got, and the params after.

    The gradient is None unless each parameter had one optimizer step or none. The params are None
    if an optimizer is not plain SGD with lr 1, as they then do not show the gradient.

    Raises:
        ValueError: neither can be told.
    """
    seen = OptimizerSteps(module, params)
    with seen.watch():
        result = _returned(loop(module, window))
    return _whole(seen.complete(result), params)


class OptimizerSteps:
    """What the optimizers of a module get while they are watched.

    Attributes:
        grads: by parameter, its gradient at each step.
        plain: whether all optimizers are plain SGD with lr 1.
    """

    def __init__(self, module: nn.Module, params: Any):
        self.module, self.names = module, tuple(values_of(params))
        self.grads: dict[str, list[Any]] = {}
        self.plain = True

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note each optimizer step, of whatever optimizer."""
        hook = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        finally:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        bound = dict(zip(("self", "closure"), args, strict=False)) | kwargs
        closure = bound.get("closure")
        if closure is None:
            return self._note(optimizer)

        def noted() -> Any:  # as the gradient is not there before the closure has run
            value = closure()
            self._note(optimizer)
            return value

        return args[:1], kwargs | {"closure": noted}

    def _note(self, optimizer: Optimizer) -> None:
        ours = {id(param): name for name, param in named_params(self.module, self.names).items()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in [param for param in params if id(param) in ours]:
            self.grads.setdefault(ours[id(param)], []).append(_grad(param))
            self.plain &= _is_plain_sgd(optimizer)

    def complete(self, result: StepResult) -> StepResult:
        """``result`` with the gradient and the params that were seen."""
        ours = named_params(self.module, self.names)
        once = self.grads and all(len(grads) == 1 for grads in self.grads.values())
        if not (once or self.plain):
            raise ValueError(
                "loop: must take one optimizer step in a window, or use plain SGD with lr=1, got "
                f"{max(map(len, self.grads.values()))} steps of another optimizer. Use SGD."
            )
        if once and result.grads is None:
            grads = {n: self.grads[n][0] if n in self.grads else _zeros(p) for n, p in ours.items()}
            result = result._replace(grads=grads)
        if self.plain and result.params is None:
            result = result._replace(params=dict(ours))
        return result


def _returned(value: Any) -> StepResult:
    if isinstance(value, StepResult):
        return value
    if value is None or isinstance(value, Tensor | float | int):
        return StepResult(loss=value)
    return as_result(value)


def _grad(param: nn.Parameter) -> Tensor:
    return _zeros(param) if param.grad is None else param.grad.detach().clone()


def _zeros(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param, requires_grad=False)


def _is_plain_sgd(optimizer: Optimizer) -> bool:
    plain = {"lr": 1, "momentum": 0, "dampening": 0, "weight_decay": 0, "maximize": False}
    return type(optimizer) is torch.optim.SGD and all(
        group[key] == value for group in optimizer.param_groups for key, value in plain.items()
    )


def _whole(result: StepResult, params: Any) -> StepResult:
    """All of a result as tensors of its own, by the names of the bare module."""
    known = values_of(params) if isinstance(params, nn.Module) else params

    def named(value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            value = {bare_name(name, known): each for name, each in value.items()}
        return tree.map(whole, value)

    return StepResult(*(None if value is None else named(value) for value in result))
