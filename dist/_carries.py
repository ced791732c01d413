"""Carries of unfinished windows on disk: what they look like, and what their shares add up to.

A carry's sums have the structure that the loss function gave them, which a new process does not
know before its first micro-step. So the structure is written beside the tensors, as JSON.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..pure import FirstPass, LossTerms, tree
from ..pure._carry import Carry
from ..pure._sums import Sums

__all__ = ["describe", "empty_share", "from_description", "whole_share"]

_TUPLES: dict[str, Any] = {each.__name__: each for each in (Carry, FirstPass, LossTerms, Sums)}


def describe(carry: Any) -> Any:
    """The structure of a carry in dicts, lists and strings.

    Raises:
        TypeError: there is something else in it than tensors in dicts, lists and tuples.
    """
    if carry is None:
        return None
    if isinstance(carry, Tensor) and not hasattr(carry, "to_local"):
        # Sums of squares round by the order in memory, so that it is kept.
        return ",".join(map(str, carry.stride()))
    if isinstance(carry, dict) and all(isinstance(key, str) for key in carry):
        return {"dict": {key: describe(value) for key, value in carry.items()}}
    kind = type(carry).__name__
    if isinstance(carry, list) or type(carry) in (tuple, *_TUPLES.values()):
        return {kind: [describe(value) for value in carry]}
    raise TypeError(
        "save: a carry must consist of this rank's tensors, in dicts by strings, lists and tuples, "
        f"got {kind} in it. Save between micro-steps, before last=True."
    )


def from_description(description: Any) -> Any:
    """A tree of that structure, with the strides of its tensors as leaves: ``"3,1"``."""
    if description is None or isinstance(description, str):
        return description
    ((kind, parts),) = description.items()
    if kind == "dict":
        return {key: from_description(value) for key, value in parts.items()}
    values = [from_description(value) for value in parts]
    if kind in _TUPLES:
        return _TUPLES[kind](*values)
    return values if kind == "list" else tuple(values)


def whole_share(carries: Iterable[Carry]) -> Carry:
    """One carry with what all ranks did in their unfinished windows.

    Raises:
        ValueError: they cannot be added.
    """
    return reduce(_add, carries)


def empty_share(carry: Carry) -> Carry:
    """A carry that goes together with ``carry`` and adds nothing to it."""
    return carry._replace(
        grads=tree.zeros_like(carry.grads),
        sums=tree.zeros_like(carry.sums),
        faults=None if carry.faults is None else torch.full_like(carry.faults, -1),
        step=torch.zeros_like(carry.step),
    )


def _add(a: Carry, b: Carry) -> Carry:
    if a.faults is None or b.faults is None:  # one had no micro-step yet
        return b if a.faults is None else a
    _require_addable(a, b)
    return a._replace(
        grads=tree.map(torch.add, a.grads, b.grads),
        sums=tree.map(torch.add, a.sums, b.sums),
        faults=torch.where(a.faults >= 0, a.faults, b.faults),
        step=a.step + b.step,
    )


def _require_addable(a: Carry, b: Carry) -> None:
    if isinstance(a.known, FirstPass):
        why = "plan 'replay' goes twice over what each rank has"
    elif not _same(a.directions, b.directions):
        why = "each rank has weighted its sums in its own way, as it does for float16 params"
    else:
        return
    raise ValueError(
        f"load: this unfinished window must be resumed on as many ranks as it was saved on: {why}. "
        "Start as many, or take a checkpoint between windows."
    )


def _same(a: Any, b: Any) -> bool:
    return tree.structure(a) == tree.structure(b) and all(
        map(torch.equal, tree.leaves(a), tree.leaves(b))
    )
