"""The values of a step as vectors, beside the right ones."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pure import tree
from ..worlds.problems import Problem
from ..worlds.reference import Reference, as_tree, leaf_names, reference_of
from ..worlds.world import StepResult, World
from .recipe import Finish, finished

__all__ = ["Leaf", "Observation", "Quantity", "close", "observe", "wrong_leaves"]


class Leaf(NamedTuple):
    """A named slice of a vector of values.

    Attributes:
        name: as code, such as ``grads['w']``.
        place: its slice.
    """

    name: str
    place: slice


class Quantity(NamedTuple):
    """Something that a step shows, beside what is right; float64, in one vector.

    Attributes:
        name: ``"gradient"``, ``"update"``, ``"logged loss"`` or ``"evaluation loss"``.
        expected: the right values, ``[D]``.
        got: the values of the step, ``[D]``.
        leaves: what the values belong to.
        eps: the machine epsilon of the coarsest dtype that took part.
    """

    name: str
    expected: Tensor
    got: Tensor
    leaves: tuple[Leaf, ...]
    eps: float


class Observation(NamedTuple):
    """One run of a step.

    Attributes:
        world: what it ran on.
        reference: what is right there.
        quantities: what it showed, by name.
    """

    world: World
    reference: Reference
    quantities: dict[str, Quantity]


def observe(
    problem: Problem, world: World, result: StepResult, finish: Finish, lr: float
) -> Observation:
    """Put what a step returned beside what is right.

    Raises:
        ValueError: the gradient or the new params have other leaves or shapes than the params.
    """
    reference = reference_of(problem, world)
    grads = torch.cat(
        [torch.zeros(0), *[g.reshape(-1).cpu() for g in reference.grads.values()]]
    ).double()
    right = finished(grads, finish)
    eps = max((_eps(leaf) for leaf in reference.grads.values()), default=0.0)
    quantities: dict[str, Quantity] = {}
    if result.grads is not None:
        got, own = _flat(result.grads, problem.params, "grads")
        leaves = _leaves(reference, "grads")
        quantities["gradient"] = Quantity("gradient", right, got, leaves, max(eps, own))
    if result.params is not None:
        old, _ = _flat(problem.params, problem.params, "params")
        new, own = _flat(result.params, problem.params, "params")
        leaves = _leaves(reference, "params")
        got = new - old if finish.update else (old - new) / lr
        # The update is a small difference of large values: as exact as these are.
        scale = float(old.abs().max() / got.abs().max().clamp(min=1e-300)) if len(old) else 1.0
        noise = max(eps, own) * max(1.0, scale / lr)
        quantities["update"] = Quantity("update", right, got, leaves, noise)
    for name, loss in (("logged loss", result.loss), ("evaluation loss", result.eval_loss)):
        if loss is not None:
            got = torch.as_tensor(loss, dtype=torch.float64).detach().reshape(1).cpu()
            expected = reference.loss.double().reshape(1).cpu()
            own = _eps(loss) if isinstance(loss, Tensor) else 0.0
            whole = (Leaf(name, slice(0, 1)),)
            quantities[name] = Quantity(name, expected, got, whole, max(eps, own))
    return Observation(world, reference, quantities)


def wrong_leaves(quantity: Quantity, rtol: float | None = None) -> list[Leaf]:
    """The leaves in which a quantity is wrong."""
    floor = 1000 * quantity.eps * _size(quantity.expected)
    return [
        leaf
        for leaf in quantity.leaves
        if not close(
            quantity.expected[leaf.place], quantity.got[leaf.place], quantity.eps, rtol, floor
        )
    ]


def close(
    expected: Tensor, got: Tensor, eps: float, rtol: float | None = None, floor: float = 0.0
) -> bool:
    """Whether two vectors agree to the root of ``eps``, relative to the largest element.

    NaN agrees with NaN, and an infinity with itself. Sums in another order differ by a few
    epsilons, wrong formulas by more than the root of one.
    """
    if expected.shape != got.shape or not torch.equal(expected.isnan(), got.isnan()):
        return False
    same = (expected == got) | expected.isnan()
    size = max(_size(expected), _size(got))
    tolerance = floor + (math.sqrt(eps) if rtol is None else rtol) * size
    return bool((same | ((expected - got).abs() <= tolerance)).all())


def _size(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


def _eps(value: Tensor) -> float:
    return torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0


def _leaves(reference: Reference, root: str) -> tuple[Leaf, ...]:
    leaves, start = [], 0
    for name, grad in reference.grads.items():
        leaves.append(Leaf(f"{root}{name}", slice(start, start + grad.numel())))
        start += grad.numel()
    return tuple(leaves)


def _flat(values: Any, params: Any, root: str) -> tuple[Tensor, float]:
    """The leaves of ``values`` that belong to the differentiable leaves of ``params``."""
    values = as_tree(values)
    if isinstance(values, Mapping):  # A leaf without a gradient may be missing, or None.
        values = {key: value for key, value in values.items() if value is not None}
    got, known = tree.named(values), tree.named(as_tree(params))
    if unknown := [name for name in got if name not in known]:
        raise ValueError(
            f"check_step: {root} must be a tree like the params, got {root}{unknown[0]}, and the "
            f"params have {[f'params{name}' for name in known]}. Return one tensor for each."
        )
    eps, parts = 0.0, [torch.zeros(0, dtype=torch.float64)]
    for name in leaf_names(params):
        leaf = got.get(name, torch.zeros_like(known[name]))
        leaf = torch.as_tensor(leaf).detach()
        if leaf.shape != known[name].shape:
            raise ValueError(
                f"check_step: {root}{name} must have the shape {list(known[name].shape)} of the "
                f"param, got {list(leaf.shape)}. Gather shards before returning them."
            )
        eps = max(eps, _eps(leaf))
        parts.append(leaf.double().reshape(-1).cpu())
    return torch.cat(parts), eps
