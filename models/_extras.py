"""Packages that only some functions need."""

from importlib import import_module
from typing import Any

__all__ = ["require"]


def require(module: str, needed_by: str) -> Any:
    """Import a package of the extra ``train``.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by}: needs the package {module.partition('.')[0]}, which is not installed. "
            "Run: pip install 'numden[train]'"
        ) from error
