"""Steps made of other people's trainers, for ``check_step``.

A step is ``(params, world) -> StepResult``. Each adapter makes one of a module and the code that
trains it: a raw loop (``from_loop``), one over ranks (``on_ranks``, ``ddp``, ``fsdp2``),
``accelerate``, the ``Trainer`` of transformers or of Lightning, or any command that reads and
writes files. What the code under test should do is left to it: an adapter loads the params and
reads off the result.

Each adapter imports its framework when it is called, and this package none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._processes import ReplicasDiffer as ReplicasDiffer
    from ._reading import Window as Window
    from .loop import from_loop as from_loop
    from .ranks import ddp as ddp
    from .ranks import fsdp2 as fsdp2
    from .ranks import on_ranks as on_ranks

_HOMES = {
    "ReplicasDiffer": "_processes",
    "Window": "_reading",
    "ddp": "ranks",
    "from_loop": "loop",
    "fsdp2": "ranks",
    "on_ranks": "ranks",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")


def __dir__() -> list[str]:
    return __all__
