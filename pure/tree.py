"""Pytrees: the one module of the package that calls optree.

A tree is any nesting of dicts, lists, tuples and named tuples. ``None`` is a node without leaves.
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

PyTree = Any
Structure = optree.PyTreeSpec

__all__ = [
    "PyTree",
    "Structure",
    "broadcast_prefix",
    "flatten",
    "leaves",
    "map",
    "named",
    "names",
    "structure",
    "unflatten",
    "zeros_like",
]


def map(fun: Callable[..., Any], tree: PyTree, *rests: PyTree) -> PyTree:
    """Apply ``fun`` to each leaf of ``tree`` and the leaves at the same places of ``rests``.

    Examples:
        >>> map(lambda a, b: a + b, {"x": 1}, {"x": 2})
        {'x': 3}
    """
    return optree.tree_map(fun, tree, *rests)


def leaves(tree: PyTree) -> list[Any]:
    """The leaves of ``tree``, dicts in the order of their sorted keys."""
    return optree.tree_leaves(tree)


def flatten(tree: PyTree) -> tuple[list[Any], Structure]:
    """The leaves of ``tree`` and the structure that ``unflatten`` puts them back into."""
    return optree.tree_flatten(tree)


def unflatten(structure: Structure, leaves: list[Any]) -> PyTree:
    """The tree of the given structure that has ``leaves``."""
    return optree.tree_unflatten(structure, leaves)


def structure(tree: PyTree) -> Structure:
    """The structure of ``tree``, to compare with ``==``."""
    return optree.tree_structure(tree)


def names(tree: PyTree, root: str = "") -> list[str]:
    """The place of each leaf as code, in the order of ``leaves``.

    Examples:
        >>> names({"ce": 1.0, "aux": [2.0, 3.0]}, "num")
        ["num['aux'][0]", "num['aux'][1]", "num['ce']"]
    """
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree)]


def named(tree: PyTree, root: str = "") -> dict[str, Any]:
    """The leaves of ``tree`` by their ``names``.

    Examples:
        >>> named({"ce": 1.0, "aux": [2.0, 3.0]}, "num")
        {"num['aux'][0]": 2.0, "num['aux'][1]": 3.0, "num['ce']": 1.0}
    """
    return dict(zip(names(tree, root), leaves(tree), strict=True))


def broadcast_prefix(prefix: PyTree, tree: PyTree) -> list[Any]:
    """One leaf of ``prefix`` for each leaf of ``tree``, whose upper part ``prefix`` is.

    Raises:
        ValueError: ``prefix`` is not a prefix of ``tree``.

    Examples:
        >>> broadcast_prefix(1.0, {"a": 2.0, "b": 3.0})
        [1.0, 1.0]
    """
    return optree.broadcast_prefix(prefix, tree)


def zeros_like(tree: PyTree) -> PyTree:
    """A tree of zeros with the shapes, dtypes and devices of ``tree``."""
    return map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else 0 * leaf, tree)
