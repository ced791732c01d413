"""Laws of effects: a loss function is a function, and costs a micro-step nothing extra."""

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..pure import tree
from ..pure.terms import LossFn
from .counters import Calls, count_collectives, count_host_syncs
from .evaluation import backward, differentiable, evaluate, forward, leaves_of, run
from .violation import Difference, LawViolation, check_equal

__all__ = ["no_collective", "no_host_sync", "purity", "repeatability"]


def purity(loss_fn: LossFn, params: Any, batch: Any) -> None:
    """A forward and a backward pass leave the world as it was.

    Unchanged are: the values, structure and ``.grad`` of ``params``, the buffers and the train
    mode of a module, the values and structure of ``batch``, and the state of the global random
    generators of Python, NumPy (if imported) and torch, on each device that is in use.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors.

    Raises:
        LawViolation: something changed.

    Examples:
        >>> from numden.pure import LossTerms
        >>> def greedy(w, batch):
        ...     x = batch.pop("x")
        ...     return LossTerms((w * x).sum(), x.numel())
        >>> purity(greedy, torch.tensor(1.0), {"x": torch.ones(2), "y": torch.ones(2)})
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: purity: nothing outside may change.
          batch['x']: expected tensor([1., 1.]), got none
        Usual cause: ...
    """
    params, leaves = differentiable(params)
    before = _world(params, leaves, batch)
    backward(run(loss_fn, params, leaves, batch))
    changed = _changes(before, _world(params, leaves, batch))
    if changed:
        raise LawViolation(
            "purity",
            "nothing outside may change.",
            changed,
            "an operation in place, batch.pop, .backward() inside the loss, a draw from a global "
            "generator (dropout), or a module in train mode that keeps running averages.",
        )


def repeatability(loss_fn: LossFn, params: Any, batch: Any) -> None:
    """The same input gives the same bits, each time.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors.

    Raises:
        LawViolation: the second time a sum or a gradient differs.

    Examples:
        >>> from numden.pure import LossTerms
        >>> noisy = lambda w, batch: LossTerms(w * torch.rand(()), 1)
        >>> repeatability(noisy, torch.tensor(1.0), {})
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: repeatability: the same input must ...
        Usual cause: ...
    """
    check_equal(
        "repeatability",
        "the same input must give the same bits each time.",
        "draws from a global generator, state that the loss keeps, or atomic additions on a "
        "GPU. Key the draws by numden.pure.random.",
        evaluate(loss_fn, params, batch),
        evaluate(loss_fn, params, batch),
        exact=True,
    )


def no_collective(loss_fn: LossFn, params: Any, batch: Any) -> None:
    """No collective is issued, neither forward nor backward.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors.

    Raises:
        LawViolation: a collective was issued; it is listed with its line of code.

    Examples:
        >>> from numden.pure import LossTerms
        >>> no_collective(lambda w, batch: LossTerms(w.sum(), 1), torch.ones(2), {})
    """
    _count_none(
        "no_collective",
        "a loss function must issue no collective.",
        "a count or a mean summed over ranks inside the loss. Return the local sums: they are "
        "summed over ranks once per window, and a rank with fewer micro-steps would hang.",
        count_collectives,
        loss_fn,
        params,
        batch,
    )


def no_host_sync(loss_fn: LossFn, params: Any, batch: Any) -> None:
    """Nothing makes the host wait for the device, neither forward nor backward.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors.

    Raises:
        LawViolation: a value was read; the read is listed with its line of code.

    Examples:
        >>> from numden.pure import LossTerms
        >>> read = lambda w, batch: LossTerms(w.sum() if w.sum() > 0 else 0 * w.sum(), 1)
        >>> no_host_sync(read, torch.ones(2), {})
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: no_host_sync: a loss function must ...
          forward: expected none, got aten._local_scalar_dense at ...
        Usual cause: ...
    """
    _count_none(
        "no_host_sync",
        "a loss function must not make the host wait for the device.",
        "item(), bool(tensor), nonzero, or x[mask]. Use torch.where and sums over masks; make "
        "indices on the host when the batch is built.",
        count_host_syncs,
        loss_fn,
        params,
        batch,
    )


def _count_none(
    law: str,
    rule: str,
    cause: str,
    count: Callable[[], AbstractContextManager[Calls]],
    loss_fn: LossFn,
    params: Any,
    batch: Any,
) -> None:
    with count() as in_forward:
        passed = forward(loss_fn, params, batch)
    with count() as in_backward:
        backward(passed)
    seen = [("forward", place) for place in in_forward.places]
    seen += [("backward", place) for place in in_backward.places]
    if seen:
        raise LawViolation(law, rule, [Difference(when, "none", at) for when, at in seen], cause)


def _world(params: Any, leaves: dict[str, Tensor], batch: Any) -> dict[str, Any]:
    """All that a loss function could change, by name; tensors copied."""
    values = leaves_of(params) | tree.named(batch, "batch")
    if isinstance(params, nn.Module):
        values |= {f"params.{name}": buffer for name, buffer in params.named_buffers()}
        values |= {f"params.{n}.training": part.training for n, part in params.named_modules()}
    values |= {f"{name}.grad": leaf.grad for name, leaf in leaves.items()}
    values |= _generator_states()
    return {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in values.items()}


def _generator_states() -> dict[str, Any]:
    states = {
        "random.getstate()": random.getstate(),
        "torch.get_rng_state()": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        _, words, place, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random.get_state()"] = (words.tobytes(), place, *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"torch.cuda.get_rng_state({device})"] = state
    return states


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    names = list(before) + [name for name in after if name not in before]
    pairs = [(name, before.get(name, "none"), after.get(name, "none")) for name in names]
    return [Difference(name, *_brief(name, a, b)) for name, a, b in pairs if not _same(a, b)]


def _brief(name: str, before: Any, after: Any) -> tuple[Any, Any]:
    return ("the state before", "another") if name.endswith(")") else (before, after)


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and (a is b or bool(a == b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)  # NaN equals itself, as it should here.
