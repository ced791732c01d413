"""The drafters that ``numden train`` knows: of each, the functions that training and decoding need.

A new drafter joins by one entry of ``DRAFTERS``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..pure import Objective
from ..pure.terms import LossTerms, Metrics
from . import (
    block_drafter,
    decoder,
    dflash,
    dflash_draft,
    domino,
    domino_draft,
    dspark,
    dspark_draft,
    dspine,
    dspine_draft,
    mtp,
    mtp_draft,
)
from .data import Batch
from .decoding import Target, cached_decoder
from .train_config import Drafter as Options
from .transfer_space import transfer_space

__all__ = ["DRAFTERS", "Drafter", "Progress", "captured_layers"]

Params = Any


class Progress(NamedTuple):
    """Where a training is: windows that are done, of how many."""

    step: int = 0
    num_steps: int | None = None


class Drafter(NamedTuple):
    """A kind of drafter.

    Attributes:
        title: its name in print.
        config: ``(options, target's shape, mask token) -> config``.
        init: ``(config, key, target) -> params``.
        prepare: ``(batch, config, progress) -> batch``, with what is drawn for it.
        loss_terms: ``(params, batch, config, target) -> (LossTerms, Metrics)``.
        objective: ``(config, progress) -> objective`` of that window.
        draft: ``(params, captured, token, config, target) -> tokens`` ``[B, D]``, greedily.
        num_drafted: ``config -> D``, the most tokens of a draft.
        target: ``(target's params, config) -> params``, what it reads of the frozen target.
        layers: ``(config, target's shape) -> indices`` of the target's layers that it reads.
        decoder: ``(target's params, its shape, capacity, layers) -> Target`` that captures what
            ``draft`` reads of a token.
        den: ``(batch, config) -> den``, where terms have dens of their own; None where they share
            one, which needs no counting before a window.
    """

    title: str
    config: Callable[[Options, decoder.Config, int], Any]
    init: Callable[[Any, Tensor, Params], Params]
    prepare: Callable[[Batch, Any, Progress], Batch]
    loss_terms: Callable[..., tuple[LossTerms, Metrics]]
    objective: Callable[[Any, Progress], Objective]
    draft: Callable[[Params, Tensor, Tensor, Any, Params], Tensor]
    num_drafted: Callable[[Any], int]
    target: Callable[[Params, Any], Params]
    layers: Callable[[Any, decoder.Config], Sequence[int]]
    decoder: Callable[[Params, decoder.Config, int, Sequence[int]], Target]
    den: Callable[[Batch, Any], Any] | None = None


def captured_layers(depth: int, count: int) -> tuple[int, ...]:
    """``count`` of ``depth`` layers: spread evenly, without the outermost of many.

    Examples:
        >>> captured_layers(36, 5)
        (1, 9, 17, 25, 33)
    """
    if count == 1:
        return (depth // 2,)
    first, last = (1, depth - 3) if depth >= count + 3 else (0, depth - 1)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def _of_target(config: Any, target: decoder.Config) -> tuple[int, ...]:
    return captured_layers(target.num_layers, config.num_target_layers)


def _cached(params: Params, shape: decoder.Config, capacity: int, layers: Sequence[int]) -> Target:
    return cached_decoder(params, shape, capacity=capacity, layers=layers)


def _shape(options: Options, target: decoder.Config, mask_token_id: int) -> dict[str, Any]:
    """What every block drafter has: the target's width, and its embedding and head."""
    return {
        "vocab_size": target.vocab_size,
        "mask_token_id": mask_token_id,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_layers": options.num_layers,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_target_layers": options.num_target_layers,
        "block_size": options.block_size,
        "num_anchors": options.num_anchors,
        "decay_gamma": options.decay_gamma,
    }


def _dspark(options: Options, target: decoder.Config, mask_token_id: int) -> dspark.Config:
    shape = _shape(options, target, mask_token_id)
    return dspark.Config(**shape, markov_rank=options.markov_rank)


def _dflash(options: Options, target: decoder.Config, mask_token_id: int) -> dflash.Config:
    # Its first slot holds the last known token, and drafts none.
    return dflash.Config(**_one_slot_more(_shape(options, target, mask_token_id)))


def _domino(options: Options, target: decoder.Config, mask_token_id: int) -> domino.Config:
    return domino.Config(
        **_one_slot_more(_shape(options, target, mask_token_id)),
        gru_size=target.hidden_size,
        correction_rank=options.markov_rank or 1,
    )


def _dspine(options: Options, target: decoder.Config, mask_token_id: int) -> dspine.Config:
    return dspine.Config(
        **_one_slot_more(_shape(options, target, mask_token_id)),
        transfer_rank=min(target.hidden_size, target.vocab_size - 1) // 2,
        message_size=target.hidden_size,
        alignment_warmup_steps=options.num_windows // 10,
    )


def _one_slot_more(shape: dict[str, Any]) -> dict[str, Any]:
    return {**shape, "block_size": shape["block_size"] + 1}


def _anchors(batch: Batch, config: Any, progress: Progress) -> Batch:
    return block_drafter.prepare(batch, config)


def _mtp(options: Options, target: decoder.Config, mask_token_id: int) -> mtp.Config:
    return mtp.Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        num_steps=options.block_size,
        chain_context="prefix",
    )


def _embedding_and_head(target: Params, config: Any = None) -> Params:
    return {name: target[name] for name in ("embed", "head") if name in target}


def _with_codes(target: Params, config: dspine.Config) -> Params:
    frozen = _embedding_and_head(target)
    head = frozen["head" if "head" in frozen else "embed"]
    space = transfer_space(head.detach(), config.transfer_rank)
    return {**frozen, "codes": space.codes, "basis": space.basis}


def _prepare_domino(batch: Batch, config: domino.Config, progress: Progress) -> Batch:
    return domino.prepare(batch, config, step=progress.step, num_steps=progress.num_steps)


def _prepare_dspine(batch: Batch, config: dspine.Config, progress: Progress) -> Batch:
    replacement = dspine.schedule(config, *progress).replacement
    return dspine.prepare(batch, config, replacement=replacement)


DRAFTERS = {
    "dspark": Drafter(
        title="DSpark",
        config=_dspark,
        init=lambda config, key, target: dspark.init(config, key),
        prepare=_anchors,
        loss_terms=dspark.loss_terms,
        objective=lambda config, progress: dspark.objective(config),
        draft=lambda *args: dspark_draft.draft(*args).tokens,
        num_drafted=lambda config: config.block_size,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=_cached,
    ),
    "dflash": Drafter(
        title="DFlash",
        config=_dflash,
        init=lambda config, key, target: dflash.init(config, key),
        prepare=_anchors,
        loss_terms=dflash.loss_terms,
        objective=lambda config, progress: dflash.objective(config),
        draft=lambda *args: dflash_draft.draft(*args).tokens,
        num_drafted=lambda config: config.block_size - 1,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=_cached,
    ),
    "domino": Drafter(
        title="Domino",
        config=_domino,
        init=lambda config, key, target: domino.init(config, key),
        prepare=_prepare_domino,
        loss_terms=domino.loss_terms,
        objective=lambda config, progress: domino.objective(config),
        draft=lambda *args: domino_draft.draft(*args).tokens,
        num_drafted=lambda config: config.num_drafted,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=_cached,
    ),
    "dspine": Drafter(
        title="DSpine",
        config=_dspine,
        init=lambda config, key, target: dspine.init(config, key, target["basis"]),
        prepare=_prepare_dspine,
        loss_terms=dspine.loss_terms,
        objective=lambda config, progress: dspine.objective(
            config, alignment=dspine.schedule(config, *progress).alignment
        ),
        draft=lambda *args: dspine_draft.draft(*args).tokens,
        num_drafted=lambda config: config.block_size - 1,
        target=_with_codes,
        layers=_of_target,
        decoder=_cached,
    ),
    "mtp": Drafter(
        title="MTP",
        config=_mtp,
        init=lambda config, key, target: mtp.init(config, key),
        prepare=lambda batch, config, progress: mtp.prepare(batch, config),
        loss_terms=mtp.loss_terms,
        objective=lambda config, progress: mtp.objective(config),
        draft=lambda *args: mtp_draft.draft(*args).tokens,
        num_drafted=lambda config: config.num_steps,
        target=_embedding_and_head,
        layers=lambda config, target: (),
        decoder=lambda params, shape, capacity, layers: mtp_draft.cached_target(
            params, shape, capacity=capacity
        ),
        den=mtp.den,
    ),
}
"""By the name that ``drafter.model`` of the configuration gives."""
