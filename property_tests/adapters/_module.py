"""Params into a module and gradients out of it, by the names of the bare module."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = [
    "UnfitWorld",
    "bare_name",
    "load",
    "make_step",
    "named_params",
    "require_micro_steps",
    "require_ranks",
    "values_of",
    "whole",
]

WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before a name."""

StepFn = TypeVar("StepFn", bound=Callable[..., Any])


def make_step(step: StepFn, name: str, subject: Any, ranks: int | None) -> StepFn:
    """``step`` with a name for reports, and the one number of ranks that it runs on, if any."""
    of = getattr(subject, "__name__", type(subject).__name__)
    step.__name__ = step.__qualname__ = f"{name}({of})"
    if ranks is not None:
        step.ranks = ranks  # pyright: ignore[reportFunctionMemberAccess]
    return step


class UnfitWorld(ValueError):
    """A world that a framework cannot be given, which says nothing about its arithmetic."""


def require_ranks(name: str, world: Sequence[Any], num_ranks: int | None) -> None:
    """Refuse a world of another number of ranks than ``num_ranks``, if that is not None."""
    if num_ranks not in (None, len(world)):
        raise UnfitWorld(
            f"{name}: runs on num_ranks={num_ranks}, got windows for {len(world)} ranks. Draw "
            "worlds of that many, or make a step for each number of ranks."
        )


def require_micro_steps(name: str, world: Sequence[Any], *, equal: bool = False) -> None:
    """Refuse a world with a window without micro-steps, or not of ``equal`` length."""
    lengths = [len(window) for window in world]
    if 0 in lengths or (equal and len(set(lengths)) > 1):
        rule = "as many micro-batches as the others" if equal else "a micro-batch"
        raise UnfitWorld(
            f"{name}: each rank needs {rule}, got windows of {lengths} micro-steps. Draw others."
        )


def load(module: nn.Module, params: Any) -> None:
    """Copy ``params`` into ``module``, in place; ``.grad`` and other state stay as they are.

    Args:
        module: the module.
        params: tensors by name, or a module. Each parameter needs one; buffers may have one.

    Raises:
        ValueError: names, shapes or dtypes are not those of the module.
    """
    given = values_of(params)
    places = dict(module.named_parameters()) | dict(module.named_buffers())
    missing = [name for name, _ in module.named_parameters() if name not in given]
    unknown = [name for name in given if name not in places]
    if missing or unknown:
        raise ValueError(
            f"load: params must have the names of the module's parameters, got none for {missing} "
            f"and unknown {unknown}. Give dict(module.named_parameters())."
        )
    for name, value in given.items():
        place = places[name]
        if (place.shape, place.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"load: params must be like the module's, got {_kind(value)} for {name!r}, which "
                f"is {_kind(place)} there. Convert the module, as by module.double()."
            )
        with torch.no_grad():
            place.copy_(value)


def values_of(params: Any) -> Mapping[str, Tensor]:
    """Tensors by name of what a step gets as params: a mapping, or a module with its buffers."""
    if isinstance(params, nn.Module):
        return dict(params.named_parameters()) | dict(params.named_buffers())
    if isinstance(params, Mapping) and all(isinstance(value, Tensor) for value in params.values()):
        return params
    raise ValueError(
        f"load: params must be tensors by name, or a module, got {type(params).__name__}. "
        "Give dict(module.named_parameters())."
    )


def named_params(module: nn.Module, known: Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters of a module, wrapped or not, by the ``known`` names of the bare module."""
    known = set(known)
    return {bare_name(name, known): param for name, param in module.named_parameters()}


def bare_name(name: str, known: Container[str]) -> str:
    """The name that a parameter had before its module was wrapped, if it is a ``known`` one."""
    bare = name
    for wrapper in WRAPPERS * 2:
        bare = bare if bare in known else bare.replace(wrapper, "", 1)
    return bare if bare in known else name


def whole(value: Any) -> Any:
    """A tensor of its own: detached, and gathered from all ranks if it is a DTensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _kind(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)}"
