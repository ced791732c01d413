"""Optimizers as two pure functions, made from those of ``torch.optim``.

    optimizer = chain(clip_by_global_norm(1.0), from_torch(torch.optim.AdamW, lr=1e-3))
    state = optimizer.init(params)
    for window in windows:
        result = window_grad(loss_fn)(params, window)
        params, state = optimizer.update(result.grads, state, params)

A transform is any function from gradients to gradients. It acts once per window, on gradients that
are normalised already.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import tree
from ._norm import Transform, clip_by_global_norm, global_norm, sum_of_squares
from ._transforms import inside
from .tree import PyTree

__all__ = [
    "Optimizer",
    "Transform",
    "chain",
    "clip_by_global_norm",
    "from_torch",
    "global_norm",
    "schedule_from_torch",
    "sum_of_squares",
]

Schedule = Callable[[int], float]
"""From the number of updates so far to the learning rate."""


class Update(Protocol):
    """``update(grads, state, params) -> (new_params, new_state)``."""

    def __call__(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        *,
        valid: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """One step of the optimizer.

        Args:
            grads: a pytree of the structure of ``params``; rounded to their dtypes.
            state: what ``init`` or the last update returned.
            params: a pytree of tensors.
            valid: a bool scalar tensor, ``WindowGrad.valid``. Where it is False, params and state
                keep their values, without a host sync; it costs a copy of both.
            donate: work in place: the tensors of ``params`` and ``state`` get the new values.
                Otherwise no argument is changed. ``grads`` never is.

        Returns:
            The new params and the new state, detached.
        """
        ...


class Optimizer(NamedTuple):
    """A pair of pure functions.

    Attributes:
        init: ``init(params) -> state``, a pytree of tensors and numbers to be checkpointed; its
            structure never changes.
        update: ``update(grads, state, params, *, valid=None, donate=False)`` gives
            ``(new_params, new_state)``; see ``Update``.
    """

    init: Callable[[PyTree], PyTree]
    update: Update


def from_torch(
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    lr: float | Schedule | None = None,
    **options: Any,
) -> Optimizer:
    """An optimizer of ``torch.optim`` as ``init`` and ``update``, equal to it to the bit.

    The state is ``{"count": number of updates, "leaves": params with a dict for each tensor}``.
    A schedule is a function of that count, which the host knows: a skipped window counts.

    Args:
        optimizer: a class like ``torch.optim.AdamW``; LBFGS and SparseAdam are not supported.
        lr: the learning rate or a schedule; default: the class's own.
        **options: for the class. With ``differentiable=True`` updates can be differentiated, also
            by ``torch.func``. On an accelerator ``valid`` needs ``fused=True`` or
            ``capturable=True``, which keep the optimizer's step count on the device.

    Raises:
        TypeError: (init) the class cannot make its state before its first step. (update) it is
            called inside a ``torch.func`` transform, without ``differentiable=True``.
        ValueError: (init) SGD with dampening. (update) ``grads`` do not fit ``params``, or
            ``valid`` is on a device from which the state cannot be reached without a sync.

    Examples:
        >>> sgd = from_torch(torch.optim.SGD, lr=lambda step: 0.5 / (step + 1))
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> state = sgd.init(params)
        >>> for _ in range(2):
        ...     params, state = sgd.update({"w": torch.ones(2)}, state, params)
        >>> params, state["count"]
        ({'w': tensor([0.2500, 1.2500])}, 2)
    """
    attached = options.get("differentiable", False)

    def construct(tensors: list[Tensor], count: int) -> torch.optim.Optimizer:
        rate = lr(count) if callable(lr) else lr
        return optimizer(tensors, **options, **({} if rate is None else {"lr": rate}))

    def init(params: PyTree) -> PyTree:
        leaves, structure = tree.flatten(params)
        tensors = [leaf.detach() for leaf in leaves]
        states = _initial_states(construct(tensors, 0), tensors)
        return {"count": 0, "leaves": tree.unflatten(structure, states)}

    def update(
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        *,
        valid: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[PyTree, PyTree]:
        _require_fitting(grads, params)
        _require_transformable(attached)
        old = params, state["leaves"]
        old = old if attached and not donate else tree.map(_detach, old)
        work = old if donate else tree.map(_copy, old)
        # A step in place leaves nothing of the old values.
        kept = tree.map(_copy, old) if donate and valid is not None else old
        new = _step(partial(construct, count=state["count"]), grads, *work)
        if valid is not None:
            _require_reachable(valid, state)
            new = tree.map(partial(_select, valid), new, kept)
        return new[0], {"count": state["count"] + 1, "leaves": new[1]}

    return Optimizer(init, update)


def chain(*transforms: Transform | Optimizer) -> Optimizer:
    """An optimizer that sends the gradients through transforms first, from left to right.

    Args:
        *transforms: functions from gradients to gradients, and an ``Optimizer`` as the last.

    Raises:
        TypeError: the last is no ``Optimizer``, or another is one.

    Examples:
        >>> optimizer = chain(clip_by_global_norm(1.0), from_torch(torch.optim.SGD, lr=1.0))
        >>> grads, params = torch.tensor([3.0, 4.0]), torch.zeros(2)
        >>> optimizer.update(grads, optimizer.init(params), params)[0]
        tensor([-0.6000, -0.8000])
    """
    *before, last = transforms or (None,)
    if not isinstance(last, Optimizer) or any(isinstance(t, Optimizer) for t in before):
        raise TypeError(
            "chain: takes transforms and then one Optimizer, got "
            f"{[type(t).__name__ for t in transforms]}. End with from_torch(...)."
        )

    def update(
        grads: PyTree, state: PyTree, params: PyTree, **options: Any
    ) -> tuple[PyTree, PyTree]:
        for transform in before:
            grads = transform(grads)  # pyright: ignore[reportCallIssue]
        return last.update(grads, state, params, **options)

    return Optimizer(last.init, update)


def schedule_from_torch(
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    *,
    lr: float,
    num_steps: int,
) -> Schedule:
    """A schedule of ``torch.optim.lr_scheduler`` as a function of the step.

    Args:
        scheduler: from a torch optimizer to its scheduler.
        lr: the rate that the scheduler starts from.
        num_steps: how many steps are tabulated; afterwards the last rate stays.

    Examples:
        >>> from torch.optim.lr_scheduler import StepLR
        >>> halved = schedule_from_torch(lambda o: StepLR(o, 2, gamma=0.5), lr=1.0, num_steps=5)
        >>> [halved(step) for step in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    stepper = torch.optim.SGD([torch.zeros(())], lr)
    stepping = scheduler(stepper)
    rates = []
    for _ in range(num_steps):
        rates.append(float(stepper.param_groups[0]["lr"]))
        stepper.step()
        stepping.step()
    return lambda step: rates[min(step, num_steps - 1)]


def _initial_states(stepper: torch.optim.Optimizer, tensors: list[Tensor]) -> list[PyTree]:
    """What the class itself makes in its first step, so that the structure never changes."""
    make = getattr(stepper, "_init_group", None)
    if make is None:
        raise TypeError(
            "from_torch: the optimizer must make its state without a step, which "
            f"{type(stepper).__name__} cannot. Use another of torch.optim, or write "
            "Optimizer(init, update) for it."
        )
    for tensor in tensors:
        tensor.grad = tensor.detach()
    (group,) = stepper.param_groups
    make(group, *([] for _ in range(len(inspect.signature(make).parameters) - 1)))
    if group.get("momentum"):
        _add_momentum(group, stepper, tensors)
    return [dict(stepper.state[tensor]) for tensor in tensors]


def _add_momentum(group: Any, stepper: torch.optim.Optimizer, tensors: list[Tensor]) -> None:
    """SGD's first buffer is the first gradient: what zeros become, unless it is dampened."""
    if group.get("dampening"):
        raise ValueError(
            "from_torch: SGD dampens all gradients but the first, which a state that is there "
            f"from the start cannot tell, got dampening={group['dampening']}. Leave it 0."
        )
    for tensor in tensors:
        stepper.state[tensor].setdefault("momentum_buffer", torch.zeros_like(tensor))


def _step(
    construct: Callable[[list[Tensor]], torch.optim.Optimizer],
    grads: PyTree,
    params: PyTree,
    states: PyTree,
) -> tuple[PyTree, PyTree]:
    """One step in place; the same trees again."""
    tensors, structure = tree.flatten(params)
    stepper = construct(tensors)
    for tensor, grad, state in zip(
        tensors, tree.leaves(grads), structure.flatten_up_to(states), strict=True
    ):
        tensor.grad = grad.to(tensor.dtype)
        stepper.state[tensor] = state
    stepper.step()
    for tensor in tensors:
        tensor.grad = None
    return params, tree.unflatten(structure, [dict(stepper.state[t]) for t in tensors])


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _select(valid: Tensor, new: Any, old: Any) -> Any:
    if not isinstance(new, Tensor):
        return new
    return new.copy_(torch.where(valid.to(new.device), new, old))


def _require_fitting(grads: PyTree, params: PyTree) -> None:
    if tree.structure(grads) != tree.structure(params):
        raise ValueError(
            "update: grads must have the structure of params, got "
            f"{tree.structure(grads)} and {tree.structure(params)}. "
            "A parameter without a gradient has zeros."
        )
    for name, grad, param in zip(
        tree.names(params, "grads"), tree.leaves(grads), tree.leaves(params), strict=True
    ):
        if grad.shape != param.shape:
            raise ValueError(
                f"update: a gradient must have its parameter's shape, got {name} of shape "
                f"{tuple(grad.shape)} for {tuple(param.shape)}. Was it sharded and the other not?"
            )


def _require_transformable(attached: bool) -> None:
    if inside() and not attached:
        raise TypeError(
            "update: inside torch.func the step must be differentiable, got an optimizer that "
            "would detach it. Make it with from_torch(..., differentiable=True)."
        )


def _require_reachable(valid: Tensor, state: PyTree) -> None:
    devices = {leaf.device.type for leaf in tree.leaves(state) if isinstance(leaf, Tensor)}
    if "cpu" in devices and valid.device.type != "cpu":
        raise ValueError(
            "update: valid must reach the state without a host sync, got valid on "
            f"{valid.device} and state on the CPU. Make the optimizer with fused=True or "
            "capturable=True, which keeps its step count on the device."
        )
