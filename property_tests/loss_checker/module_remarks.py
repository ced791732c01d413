"""Which parts of a module draw at random, keep state, or mix rows; and how to undo it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["drawing_parts", "kept_state", "mixing_parts", "tracking_parts"]


def drawing_parts(run: Callable[[], Any], module: nn.Module) -> list[str]:
    """The innermost parts of ``module`` in whose forward pass the global generator moves.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        >>> drawing_parts(lambda: model(torch.ones(1, 2)), model)
        ['params.1 (Dropout) is in train mode and draws from the global generator']
    """
    moved: list[str] = []
    before: dict[str, torch.Tensor] = {}

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: before.__setitem__(name, torch.get_rng_state())

    def leave(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if name not in moved and not torch.equal(before[name], torch.get_rng_state()):
                moved.append(name)

        return hook

    parts = dict(module.named_modules())
    handles = [part.register_forward_pre_hook(enter(name)) for name, part in parts.items()]
    handles += [part.register_forward_hook(leave(name)) for name, part in parts.items()]
    try:
        with kept_state(module):
            run()
    finally:
        for handle in handles:
            handle.remove()
    innermost = [n for n in moved if not any(_inside(other, n) for other in moved)]
    return [f"{_title(n, parts[n])} and draws from the global generator" for n in innermost]


def tracking_parts(run: Callable[[], Any], module: nn.Module) -> list[str]:
    """The parts of ``module`` whose buffers a run changes."""
    with kept_state(module):
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        run()
        changed = [n for n, b in module.named_buffers() if not torch.equal(b, before[n])]
    parts = dict(module.named_modules())
    owners = {name.rpartition(".")[0] for name in changed}
    return [f"{_title(n, parts[n])} and {_tracking(parts[n])}" for n in sorted(owners)]


def mixing_parts(module: nn.Module) -> list[str]:
    """The parts of ``module`` that use statistics of the batch: batch norms, unless in eval."""
    return [
        f"{_title(name, part)} and uses statistics of each micro-batch"
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats)
    ]


@contextmanager
def kept_state(module: nn.Module) -> Iterator[None]:
    """Put the parameters, buffers, train modes and ``.grad`` of ``module`` back afterwards."""
    tensors = [*module.parameters(), *module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [parameter.grad for parameter in module.parameters()]
    modes = [part.training for part in module.modules()]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            if not torch.equal(tensor, value):
                # Not seen by autograd: a backward pass through this state may still come.
                tensor.data.copy_(value)
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            parameter.grad = grad
        for part, mode in zip(module.modules(), modes, strict=True):
            part.training = mode


def _tracking(part: nn.Module) -> str:
    statistics = "uses statistics of each micro-batch and keeps running averages of them"
    return statistics if isinstance(part, _BatchNorm) else "changes its buffers"


def _title(name: str, part: nn.Module) -> str:
    mode = "train" if part.training else "eval"
    return f"{'params' if not name else f'params.{name}'} ({type(part).__name__}) is in {mode} mode"


def _inside(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))
