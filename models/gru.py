"""A gated recurrent unit of one layer without biases, as a pure function."""

from typing import Any

import torch
from torch import Tensor

from ..pure import random
from .layers import init_weight, linear

__all__ = ["init", "initial_state", "scan", "step"]

Params = Any


def init(
    key: Tensor,
    *,
    input_size: int,
    state_size: int,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
) -> Params:
    """Normal weights: ``input`` ``[3 G, I]`` and ``state`` ``[3 G, G]``, in torch's order r, z, n.

    Examples:
        >>> params = init(random.key(0), input_size=4, state_size=2)
        >>> {name: tuple(value.shape) for name, value in params.items()}
        {'input': (6, 4), 'state': (6, 2)}
    """
    input_key, state_key = random.split(key)
    return {
        "input": init_weight(input_key, 3 * state_size, input_size, std=std, dtype=dtype),
        "state": init_weight(state_key, 3 * state_size, state_size, std=std, dtype=dtype),
    }


def initial_state(params: Params, inputs: Tensor) -> Tensor:
    """The state that nothing was read to: zeros ``[..., G]`` for inputs ``[..., I]``."""
    return inputs.new_zeros(*inputs.shape[:-1], params["state"].shape[-1])


def step(params: Params, state: Tensor, inputs: Tensor) -> Tensor:
    """The state after one more input.

    ::

        r = sigmoid(Wr x + Ur h);  z = sigmoid(Wz x + Uz h);  n = tanh(Wn x + r * Un h)
        h = (1 - z) * n + z * h

    Args:
        params: see ``init``.
        state: h, ``[..., G]``.
        inputs: x, ``[..., I]``.

    Returns:
        ``[..., G]``.

    Examples:
        >>> params = {"input": torch.ones(3, 1), "state": torch.zeros(3, 1)}
        >>> step(params, torch.tensor([2.0]), torch.tensor([0.0]))
        tensor([1.])

    References:
        Cho et al., Learning Phrase Representations using RNN Encoder-Decoder, 2014, in the form of
        ``torch.nn.GRU``.
    """
    return _step(params, state, linear(inputs, params["input"]))


def _step(params: Params, state: Tensor, projected: Tensor) -> Tensor:
    reset_x, update_x, new_x = projected.chunk(3, -1)
    reset_h, update_h, new_h = linear(state, params["state"]).chunk(3, -1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return (1 - update) * new + update * state


def scan(params: Params, inputs: Tensor) -> Tensor:
    """The state after each input of a sequence.

    Args:
        params: see ``init``.
        inputs: ``[..., L, I]``.

    Returns:
        ``[..., L, G]``.

    Examples:
        >>> params = {"input": torch.ones(3, 1), "state": torch.zeros(3, 1)}
        >>> scan(params, torch.zeros(2, 5, 1)).shape
        torch.Size([2, 5, 1])
    """
    state, states = initial_state(params, inputs[..., 0, :]), []
    for projected in linear(inputs, params["input"]).unbind(-2):
        state = _step(params, state, projected)
        states.append(state)
    return torch.stack(states, -2)
