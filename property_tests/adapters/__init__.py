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
    from ._module import UnfitWorld as UnfitWorld
    from ._processes import ReplicasDiffer as ReplicasDiffer
    from ._reading import Window as Window
    from .accelerate import from_accelerate as from_accelerate
    from .command import from_command as from_command
    from .lightning import from_lightning as from_lightning
    from .loop import from_loop as from_loop
    from .ranks import ddp as ddp
    from .ranks import fsdp2 as fsdp2
    from .ranks import on_ranks as on_ranks
    from .transformers import from_trainer as from_trainer

_HOMES = {
    "ReplicasDiffer": "_processes",
    "UnfitWorld": "_module",
    "Window": "_reading",
    "ddp": "ranks",
    "from_accelerate": "accelerate",
    "from_command": "command",
    "from_lightning": "lightning",
    "from_loop": "loop",
    "from_trainer": "transformers",
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
