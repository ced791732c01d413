"""Params as an ``nn.Module``, for what needs one: ``fully_shard``, DDP, torch optimizers.

A model stays a pure function of nested dicts and lists. ``as_module`` makes a module of the same
nesting that is read like a dict, so the function runs on it unchanged. A model enters each of its
blocks by ``call``, which goes through the module's ``__call__``: that is where FSDP2's hooks gather
the block's parameters before they are read and free them afterwards.

One loss function serves both, ``partial(call, loss_terms)``:

    loss_fn = partial(call, partial(decoder.loss_terms, config=config))
    loss_fn(params, batch)                        # a pure function of params
    loss_fn(as_module(apply, params), batch)      # the same numbers, through hooks
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..pure.tree import PyTree

__all__ = ["ParamsModule", "as_module", "as_params", "call"]


def as_module(apply: Callable[..., Any], params: PyTree) -> "ParamsModule":
    """A module whose forward is ``apply(params, *args)``, its parameters named as in ``params``.

    Values and gradients are those of the pure function, bit for bit. The parameters share memory
    with ``params``, no copy is made: train the one or keep the other.

    Args:
        apply: a pure function ``(params, *args, **kwargs) -> outputs`` that enters its blocks by
            ``call``.
        params: dicts and lists, nested, of tensors. Integer and bool tensors become buffers.

    Returns:
        A module with a submodule for each dict (``module.layers[0].attn``).

    Raises:
        TypeError: a node of ``params`` is neither dict, list nor tensor, or a key is no string.
        ValueError: a key cannot name a submodule or parameter.

    Examples:
        >>> import torch
        >>> module = as_module(lambda params, x: params["a"]["w"] * x, {"a": {"w": torch.ones(2)}})
        >>> module(torch.tensor(3.0))
        tensor([3., 3.], grad_fn=<MulBackward0>)
        >>> [name for name, _ in module.named_parameters()]
        ['a.w']
    """
    if not isinstance(params, dict):
        raise TypeError(f"as_module: params must be a dict, got {type(params).__name__}.")
    return ParamsModule(params, apply)


def as_params(module: Any) -> PyTree:
    """The dicts, lists and tensors that ``as_module`` made ``module`` of.

    Returns:
        The current parameters and buffers, detached, sharing memory with the module. Those that
        ``fully_shard`` sharded are DTensors.

    Examples:
        >>> import torch
        >>> as_params(as_module(print, {"layers": [{"w": torch.ones(1)}]}))
        {'layers': [{'w': tensor([1.])}]}
    """
    if isinstance(module, ParamsModule):
        return {key: as_params(module[key]) for key in module}
    if isinstance(module, nn.ModuleList | nn.ParameterList):
        return [as_params(child) for child in module]
    return module.detach()


def call(fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    """``fun(params, *args, **kwargs)``, through the module's hooks where ``params`` is a module.

    A model enters a block with this, and reads the block's params in ``fun`` only.

    Examples:
        >>> call(lambda layer, x: layer["w"] * x, {"w": 2.0}, 3.0)
        6.0
    """
    if isinstance(params, ParamsModule):
        return params(*args, fun=fun, **kwargs)
    return fun(params, *args, **kwargs)


class ParamsModule(nn.Module):
    """A dict of params as a module: read it by key, run a function on it by ``call``."""

    def __init__(self, params: dict[str, Any], fun: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._fun = fun
        self._keys = tuple(params)
        for key, value in params.items():
            _register(self, key, value)

    def forward(self, *args: Any, fun: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """``fun(self, *args, **kwargs)``; without ``fun``, the function given to ``as_module``."""
        fun = fun or self._fun
        if fun is None:
            raise TypeError(
                "ParamsModule: a part of a model has no function of its own. "
                "Use call(fun, part, ...)."
            )
        return fun(self, *args, **kwargs)

    def keys(self) -> tuple[str, ...]:
        """The keys of the dict, in its order."""
        return self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return getattr(self, key)


def _register(module: nn.Module, key: Any, value: Any) -> None:
    _check_key(module, key)
    if not isinstance(value, Tensor):
        module.add_module(key, _submodule(key, value))
    elif _is_trainable(value):
        module.register_parameter(key, nn.Parameter(value.detach()))
    else:
        module.register_buffer(key, value.detach())


def _submodule(key: str, value: Any) -> nn.Module:
    if isinstance(value, dict):
        return ParamsModule(value)
    if not isinstance(value, list):
        raise TypeError(
            f"as_module: params must be nested dicts and lists of tensors, got {key}="
            f"{type(value).__name__}. What is no tensor belongs into the config."
        )
    if value and all(isinstance(item, Tensor) and _is_trainable(item) for item in value):
        return nn.ParameterList(nn.Parameter(item.detach()) for item in value)
    return nn.ModuleList(_submodule(f"{key}.{i}", item) for i, item in enumerate(value))


def _is_trainable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_key(module: nn.Module, key: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(f"as_module: keys of params must be strings, got {key!r}.")
    if not key or "." in key or hasattr(module, key):
        raise ValueError(
            f"as_module: a key of params must not be empty, hold a dot or be an attribute of "
            f"nn.Module, got {key!r}. Rename it."
        )
