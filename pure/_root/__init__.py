"""Training losses as ratios of sums: sums first, one division, SUM-reduced gradients.

The parts are ``numden.pure`` (loss terms, windows, plans), ``numden.dist`` (ranks),
``numden.models`` (models and their loss terms) and ``numden.property_tests`` (the laws, for
your own suite). A part is imported when it is first named.
"""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

__all__ = ["dist", "models", "property_tests", "pure"]

__version__ = version("numden")


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'numden' has no attribute {name!r}; its parts are {__all__}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
