"""Injection of DSpine: each slot of a block is told about the slot before it, after every layer.

A hidden state is read into the transfer space; so is a token, by its code. What slot i is told, its
predecessor p, is a feature of the hidden state of slot i - 1, or the code of the token there.

Shapes: ``...`` any leading dims, Q slots in a block, H width, r rank of the transfer space, m width
of a message, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..pure import random
from .layers import embed, init_weight, linear

__all__ = ["init", "inject", "read", "token_features", "write"]

Params = Any


def init(
    key: Tensor, basis: Tensor, *, num_layers: int, message_size: int, dtype: torch.dtype
) -> Params:
    """Params of injection, which writes nothing until it has learned.

    Args:
        key: int64 ``[2]``; its device is that of the params.
        basis: ``[r, H]`` of the transfer space, from which each layer's readout starts.
        num_layers: of the network.
        message_size: m.
        dtype: of all params.

    Returns:
        ``message``, ``receiver`` and ``predecessor`` ``[m, r]`` and ``bias`` ``[m]``, shared by
        the layers; and ``layers``, each a ``readout`` ``[r, H]`` and a ``write`` ``[H, m]``.

    Examples:
        >>> params = init(random.key(0), torch.eye(2, 3), num_layers=1, message_size=4,
        ...               dtype=torch.float32)
        >>> {name: tuple(value.shape) for name, value in params["layers"][0].items()}
        {'readout': (2, 3), 'write': (3, 4)}
    """
    rank, width = basis.shape
    message_key, receiver_key = random.split(key)
    std = 1 / math.sqrt(3 * rank)  # the deviation of what torch.nn.Linear draws
    layer = {
        "readout": basis.to(device=key.device, dtype=dtype),
        "write": torch.zeros(width, message_size, dtype=dtype, device=key.device),
    }
    return {
        "message": init_weight(message_key, message_size, rank, std=std, dtype=dtype),
        "receiver": init_weight(receiver_key, message_size, rank, std=std, dtype=dtype),
        "predecessor": torch.zeros(message_size, rank, dtype=dtype, device=key.device),
        "bias": torch.zeros(message_size, dtype=dtype, device=key.device),
        "layers": [{name: w.clone() for name, w in layer.items()} for _ in range(num_layers)],
    }


def read(layer: Params, hidden: Tensor) -> Tensor:
    """The feature of a hidden state: ``sqrt(r) R h / |R h|``.

    Args:
        layer: params of one layer.
        hidden: ``[..., H]``.

    Returns:
        ``[..., r]``, normalised in float32 or wider, with the dtype of ``hidden``.

    Examples:
        >>> read({"readout": torch.eye(2)}, torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
    """
    feature = linear(hidden, layer["readout"])
    wide = feature.to(torch.promote_types(feature.dtype, torch.float32))
    return (math.sqrt(wide.shape[-1]) * normalize(wide, dim=-1, eps=1e-12)).to(hidden.dtype)


def token_features(codes: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The feature of a token: ``sqrt(r)`` times its code, scaled before it is rounded to ``dtype``.

    Args:
        codes: ``[V, r]``, frozen.
        tokens: ``[...]`` int64.
        dtype: of the result, that of the hidden states it is to meet.

    Returns:
        ``[..., r]``.

    Examples:
        >>> token_features(torch.eye(4), torch.tensor([2]), torch.float32)
        tensor([[0., 0., 2., 0.]])
    """
    return (math.sqrt(codes.shape[-1]) * embed(tokens, codes.detach())).to(dtype)


def write(
    params: Params, layer: Params, hidden: Tensor, feature: Tensor, predecessor: Tensor
) -> Tensor:
    """A hidden state that is told what is before it.

    ``h + |h| / sqrt(H) W (sigmoid(A z + B p + b) * M p)``, with A, B, b and M of ``receiver``,
    ``predecessor``, ``bias`` and ``message``, and W of the layer's ``write``.

    Args:
        params: from ``init``.
        layer: params of one layer.
        hidden: ``[..., H]``, the h.
        feature: ``[..., r]``, the z: what ``read`` makes of h.
        predecessor: ``[..., r]``, the p.

    Returns:
        ``[..., H]``.
    """
    receiver = linear(feature, params["receiver"], params["bias"])
    gate = (receiver + linear(predecessor, params["predecessor"])).sigmoid()
    change = linear(gate * linear(predecessor, params["message"]), layer["write"])
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) / math.sqrt(hidden.shape[-1])
    return hidden + norm.to(hidden.dtype) * change


def inject(
    params: Params, layer: Params, hidden: Tensor, previous: Tensor, replaced: Tensor | None
) -> Tensor:
    """``write`` on all slots of a block but the first, which nothing is before.

    Slot 1 is told the token in slot 0; slot i is told what slot i - 1 was before this injection,
    or, in a block that is replaced, the true token there.

    Args:
        params: from ``init``.
        layer: params of one layer.
        hidden: ``[..., Q, H]``.
        previous: ``[..., Q - 1, r]``, features of the true tokens in slots 0 to Q - 2.
        replaced: ``[...]`` bool, blocks in which they take the place of what slots say; None: none.

    Returns:
        ``[..., Q, H]``.
    """
    feature = read(layer, hidden)
    told = torch.cat([previous[..., :1, :], feature[..., 1:-1, :]], -2)
    if replaced is not None:
        told = torch.where(replaced[..., None, None], previous, told)
    written = write(params, layer, hidden[..., 1:, :], feature[..., 1:, :], told)
    return torch.cat([hidden[..., :1, :], written], -2)
