"""The network of DSpine: that of ``backbone``, causal in a block, with an injection in each layer.

Slot 0 of the block at anchor a holds its token; slots 1 to Q - 1 hold the mask token, and slot i
predicts token ``a + i``. Values of drafted slots have Q - 1 entries, that of slot i at i - 1.

Shapes: B rows, S tokens in a row, N blocks in a row, Q slots in a block, H width, K captured layers
of the target, V vocabulary, r rank of the transfer space.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pure import random
from . import backbone, injection
from .anchors import block_tokens, take_slots
from .backbone import read_context, run_layer, slot_tables
from .block_attention import Attend, block_attention, choose_kernel
from .dspine_config import Config
from .layers import embed, rms_norm
from .module import call

__all__ = ["States", "apply", "init", "refine"]

Params = Any
Batch = dict[str, Tensor]


def init(
    config: Config,
    key: Tensor,
    basis: Tensor,
    *,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
) -> Params:
    """Params of ``backbone``, and ``injection``, which changes nothing until it has learned.

    Args:
        config: the drafter.
        key: int64 ``[2]``, from ``random.key``; its device is that of the params.
        basis: ``[r, H]``, from ``transfer_space``, where each layer's readout starts.
        std: deviation of the backbone's normal weights.
        dtype: of all params.

    Raises:
        ValueError: the shape of ``basis`` is not that of the config.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3,
        ...                 transfer_rank=4, message_size=5, top_k=3)
        >>> sorted(init(config, random.key(0), torch.eye(4, 8)))
        ['context', 'injection', 'layers', 'norm']
    """
    expected = (config.transfer_rank, config.hidden_size)
    if tuple(basis.shape) != expected:
        raise ValueError(
            f"dspine.init: basis must be [r, H] = {list(expected)}, got {list(basis.shape)}. "
            "Take that of transfer_space(head, config.transfer_rank)."
        )
    backbone_key, injection_key = random.split(key)
    sizes = {"num_layers": config.num_layers, "message_size": config.message_size}
    params = backbone.init(config, backbone_key, std=std, dtype=dtype)
    return params | {"injection": injection.init(injection_key, basis, **sizes, dtype=dtype)}


class States(NamedTuple):
    """What the network says of the drafted slots.

    Attributes:
        hidden: ``[..., Q - 1, H]``, whose logits are the draft's.
        before: ``[..., Q - 1, H]``, the last layer's before injection, for ``refine``.
        features: ``[..., Q - 1, r]`` for each layer, read after injection.
    """

    hidden: Tensor
    before: Tensor
    features: tuple[Tensor, ...]


def apply(params: Params, batch: Batch, config: Config, target: Params) -> States:
    """All drafted slots of all blocks of a batch.

    ``tokens`` behind an anchor are read where the block is replaced, and nowhere else.

    Args:
        params: see ``init``.
        batch: a dict with ``tokens`` ``[B, S]`` int64, ``captured`` ``[B, S, K * H]``,
            ``anchors`` ``[B, N]`` int64, ``keep`` ``[B, N]`` bool and, where blocks are replaced,
            ``replaced`` ``[B, N]`` bool.
        config: the drafter.
        target: the frozen embedding and codes.

    Returns:
        Values of leading shape ``[B, N, Q - 1]``.
    """
    tokens, anchors, keep = (batch[name] for name in ("tokens", "anchors", "keep"))
    size, shared = config.block_size, params["injection"]
    ids = block_tokens(tokens, anchors, keep, size, mask_token_id=config.mask_token_id)
    hidden = embed(ids, target["embed"].detach()).flatten(1, 2)
    previous = take_slots(tokens, anchors, config.num_drafted)
    previous = injection.token_features(target["codes"], previous, hidden.dtype)
    context = read_context(params["context"], batch["captured"], config)
    tables = slot_tables(anchors, context.shape[1], size, config, hidden.dtype)
    features, before = [], hidden
    sees = _attention(hidden, batch, config)
    for i, (layer, attend) in enumerate(zip(params["layers"], sees, strict=True)):
        replaced = batch.get("replaced") if i < config.replacement_layers else None
        own = shared["layers"][i]
        before = call(run_layer, layer, hidden, context, tables, attend, config)
        before = before.unflatten(1, ids.shape[1:])
        told = injection.inject(shared, own, before, previous, replaced)
        features.append(injection.read(own, told[..., 1:, :]))
        hidden = told.flatten(1, 2)
    hidden = rms_norm(hidden, params["norm"], config.norm_eps).unflatten(1, ids.shape[1:])
    return States(hidden[..., 1:, :], before[..., 1:, :], tuple(features))


def _attention(hidden: Tensor, batch: Batch, config: Config) -> Iterator[Attend]:
    """That of each layer: causal in a block, since a window that hides nothing leaves that."""
    size = batch["captured"].shape[1], config.block_size
    kernel = choose_kernel(config.kernel, hidden, config.head_dim)
    wide = functools.partial(block_attention, batch["anchors"], batch["keep"], *size, kernel=kernel)
    everything = wide(window=sum(size))
    sliding = wide(window=config.sliding_window) if config.sliding_layers else everything
    for i in range(config.num_layers):
        yield sliding if i in config.sliding_layers else everything


def refine(params: Params, before: Tensor, previous: Tensor, config: Config) -> Tensor:
    """States that know the token before them: the last injection with it, and the last norm.

    Args:
        params: with ``injection`` and ``norm``, see ``init``.
        before: ``[..., H]``, see ``States``.
        previous: ``[..., r]``, the feature of the token before, see ``injection.token_features``.
        config: the drafter.

    Returns:
        ``[..., H]``, whose products with rows of the head are refined logits.
    """
    last = params["injection"]["layers"][-1]
    feature = injection.read(last, before)
    told = injection.write(params["injection"], last, before, feature, previous)
    return rms_norm(told, params["norm"], config.norm_eps)
