"""Markov heads: a low-rank correction of a slot's logits by the token before it.

All three kinds read the vector ``e = embed[previous]`` of rank r and the slot's hidden state o,
and give a vector u of rank r; ``out @ u`` is added to the logits. With it in ``[..., r]`` the sum
over the vocabulary is made where the logits are.

Shapes: ``...`` any leading dims, Q slots, H width, r rank, V vocabulary.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..pure import random
from .layers import init_weight, linear

__all__ = ["KINDS", "MarkovHead", "init", "initial_state", "scan_slots", "step"]

MarkovHead = Literal["vanilla", "gated", "rnn"]
KINDS: tuple[MarkovHead, ...] = get_args(MarkovHead)
Params = Any


def init(
    kind: MarkovHead,
    key: Tensor,
    *,
    vocab_size: int,
    hidden_size: int,
    rank: int,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
) -> Params:
    """Params of a Markov head: ``embed`` and ``out`` ``[V, r]``, and the ``weight`` of its kind.

    ``out`` is zero, so that an untrained head corrects nothing; ``embed`` has deviation 1, so that
    ``out`` learns soon; ``weight`` has deviation ``std``.

    Examples:
        >>> params = init("gated", random.key(0), vocab_size=9, hidden_size=4, rank=2)
        >>> {name: tuple(value.shape) for name, value in params.items()}
        {'embed': (9, 2), 'out': (9, 2), 'weight': (2, 6), 'bias': (2,)}
    """
    embed_key, weight_key = random.split(key)
    params = {
        "embed": init_weight(embed_key, vocab_size, rank, std=1.0, dtype=dtype),
        "out": torch.zeros(vocab_size, rank, dtype=dtype, device=key.device),
    }
    if kind == "vanilla":
        return params
    rows, columns = (
        (rank, hidden_size + rank) if kind == "gated" else (3 * rank, 2 * rank + hidden_size)
    )
    params["weight"] = init_weight(weight_key, rows, columns, std=std, dtype=dtype)
    params["bias"] = torch.zeros(rows, dtype=dtype, device=key.device)
    return params


def initial_state(params: Params, hidden: Tensor) -> Tensor:
    """The state before slot 0: zeros ``[..., r]`` for hidden states ``[..., H]``."""
    return hidden.new_zeros(*hidden.shape[:-1], params["out"].shape[-1])


def step(
    params: Params, kind: MarkovHead, state: Tensor, previous: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """One slot: the state and the vector u.

    ::

        vanilla:  u = e
        gated:    u = sigmoid(weight [o; e] + bias) * e
        rnn:      g, c, h = weight [state; e; o] + bias
                  state = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c);  u = tanh(h)

    Args:
        params: see ``init``.
        kind: of the head.
        state: ``[..., r]``.
        previous: e, the Markov vector of the token before the slot, ``[..., r]``.
        hidden: o, ``[..., H]``.

    Returns:
        ``(state, u)``, both ``[..., r]``.

    Examples:
        >>> head = {"out": torch.zeros(9, 2)}
        >>> step(head, "vanilla", torch.zeros(2), torch.tensor([1.0, 2.0]), torch.zeros(4))[1]
        tensor([1., 2.])
    """
    if kind == "vanilla":
        return state, previous
    if kind == "gated":
        joined = torch.cat([hidden, previous], -1)
        return state, linear(joined, params["weight"], params["bias"]).sigmoid() * previous
    joined = torch.cat([state, previous, hidden], -1)
    gate, candidate, output = linear(joined, params["weight"], params["bias"]).chunk(3, -1)
    gate = gate.sigmoid()
    return gate * state + (1 - gate) * candidate.tanh(), output.tanh()


def scan_slots(params: Params, kind: MarkovHead, previous: Tensor, hidden: Tensor) -> Tensor:
    """``step`` over the slots of blocks whose previous tokens are known.

    Args:
        params: see ``init``.
        kind: of the head.
        previous: Markov vectors ``[..., Q, r]``.
        hidden: ``[..., Q, H]``.

    Returns:
        u of each slot, ``[..., Q, r]``.

    Examples:
        >>> vectors = torch.ones(3, 5, 2)
        >>> scan_slots({"out": torch.zeros(9, 2)}, "vanilla", vectors, torch.zeros(3, 5, 4)).shape
        torch.Size([3, 5, 2])
    """
    state = initial_state(params, hidden[..., 0, :])
    outputs = []
    for slot in range(previous.shape[-2]):
        state, output = step(params, kind, state, previous[..., slot, :], hidden[..., slot, :])
        outputs.append(output)
    return torch.stack(outputs, -2)
