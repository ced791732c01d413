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
    drafter_configs,
    dspark,
    dspark_draft,
    dspine,
    dspine_draft,
    eagle3,
    eagle3_draft,
    mtp,
    mtp_draft,
    peagle,
    peagle_draft,
)
from .block_drafter import Draft
from .data import Batch
from .decoding import Target, cached_decoder
from .eagle3_draft import with_embeddings
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
        draft: ``(params, captured, token, config, target) -> Draft``, greedily.
        num_drafted: ``config -> D``, the most tokens of a draft.
        target: ``(target's params, config) -> params``, what it reads of the frozen target.
        layers: ``(config, target's shape) -> indices`` of the target's layers that it reads.
        decoder: ``(target's params, its shape, capacity, layers, params) -> Target`` that captures
            what ``draft`` reads of a token.
        den: ``(batch, config, target) -> den``, where terms have dens of their own; None where they
            share one, which needs no counting before a window.
    """

    title: str
    config: Callable[[Options, decoder.Config, int], Any]
    init: Callable[[Any, Tensor, Params], Params]
    prepare: Callable[[Batch, Any, Progress], Batch]
    loss_terms: Callable[..., tuple[LossTerms, Metrics]]
    objective: Callable[[Any, Progress], Objective]
    draft: Callable[[Params, Tensor, Tensor, Any, Params], Draft]
    num_drafted: Callable[[Any], int]
    target: Callable[[Params, Any], Params]
    layers: Callable[[Any, decoder.Config], Sequence[int]]
    decoder: Callable[[Params, decoder.Config, int, Sequence[int], Params], Target]
    den: Callable[[Batch, Any, Params], Any] | None = None


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


def _cached(
    target: Params, shape: decoder.Config, capacity: int, layers: Sequence[int], params: Params
) -> Target:
    return cached_decoder(target, shape, capacity=capacity, layers=layers)


def _of_no_target(init: Callable[[Any, Tensor], Params]) -> Callable[[Any, Tensor, Params], Params]:
    return lambda config, key, target: init(config, key)


def _throughout(objective: Callable[[Any], Objective]) -> Callable[[Any, Progress], Objective]:
    return lambda config, progress: objective(config)


def _anchors(batch: Batch, config: Any, progress: Progress) -> Batch:
    return block_drafter.prepare(batch, config)


def _embedding_and_head(target: Params, config: Any = None) -> Params:
    return {name: target[name] for name in ("embed", "head") if name in target}


def _with_codes(target: Params, config: dspine.Config) -> Params:
    space = transfer_space(block_drafter.output_head(target), config.transfer_rank)
    return _embedding_and_head(target) | {"codes": space.codes, "basis": space.basis}


def _prepare_domino(batch: Batch, config: domino.Config, progress: Progress) -> Batch:
    return domino.prepare(batch, config, step=progress.step, num_steps=progress.num_steps)


def _prepare_dspine(batch: Batch, config: dspine.Config, progress: Progress) -> Batch:
    replacement = dspine.schedule(config, *progress).replacement
    return dspine.prepare(batch, config, replacement=replacement)


DRAFTERS = {
    "dspark": Drafter(
        title="DSpark",
        config=drafter_configs.dspark_config,
        init=_of_no_target(dspark.init),
        prepare=_anchors,
        loss_terms=dspark.loss_terms,
        objective=_throughout(dspark.objective),
        draft=dspark_draft.draft,
        num_drafted=lambda config: config.block_size,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=_cached,
    ),
    "dflash": Drafter(
        title="DFlash",
        config=drafter_configs.dflash_config,
        init=_of_no_target(dflash.init),
        prepare=_anchors,
        loss_terms=dflash.loss_terms,
        objective=_throughout(dflash.objective),
        draft=dflash_draft.draft,
        num_drafted=lambda config: config.block_size - 1,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=_cached,
    ),
    "domino": Drafter(
        title="Domino",
        config=drafter_configs.domino_config,
        init=_of_no_target(domino.init),
        prepare=_prepare_domino,
        loss_terms=domino.loss_terms,
        objective=_throughout(domino.objective),
        draft=domino_draft.draft,
        num_drafted=lambda config: config.num_drafted,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=_cached,
    ),
    "dspine": Drafter(
        title="DSpine",
        config=drafter_configs.dspine_config,
        init=lambda config, key, target: dspine.init(config, key, target["basis"]),
        prepare=_prepare_dspine,
        loss_terms=dspine.loss_terms,
        objective=lambda config, progress: dspine.objective(
            config, alignment=dspine.schedule(config, *progress).alignment
        ),
        draft=dspine_draft.draft,
        num_drafted=lambda config: config.block_size - 1,
        target=_with_codes,
        layers=_of_target,
        decoder=_cached,
    ),
    "mtp": Drafter(
        title="MTP",
        config=drafter_configs.mtp_config,
        init=_of_no_target(mtp.init),
        prepare=lambda batch, config, progress: mtp.prepare(batch, config),
        loss_terms=mtp.loss_terms,
        objective=_throughout(mtp.objective),
        draft=mtp_draft.draft,
        num_drafted=lambda config: config.num_steps,
        target=_embedding_and_head,
        layers=lambda config, target: (),
        decoder=lambda target, shape, capacity, layers, params: mtp_draft.cached_target(
            target, shape, capacity=capacity
        ),
        den=lambda batch, config, target: mtp.den(batch, config),
    ),
    "eagle3": Drafter(
        title="EAGLE-3",
        config=drafter_configs.eagle3_config,
        init=_of_no_target(eagle3.init),
        prepare=lambda batch, config, progress: batch,
        loss_terms=eagle3.loss_terms,
        objective=_throughout(eagle3.objective),
        draft=eagle3_draft.draft,
        num_drafted=lambda config: config.num_steps,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=lambda target, shape, capacity, layers, params: with_embeddings(
            _cached(target, shape, capacity, layers, params), target["embed"]
        ),
        den=eagle3.den,
    ),
    "peagle": Drafter(
        title="P-EAGLE",
        config=drafter_configs.peagle_config,
        init=_of_no_target(peagle.init),
        prepare=lambda batch, config, progress: peagle.prepare(batch, config),
        loss_terms=peagle.loss_terms,
        objective=_throughout(peagle.objective),
        draft=peagle_draft.draft,
        num_drafted=lambda config: config.num_depths,
        target=_embedding_and_head,
        layers=_of_target,
        decoder=lambda target, shape, capacity, layers, params: with_embeddings(
            _cached(target, shape, capacity, layers, params), params["embed"]
        ),
    ),
}
"""By the name that ``drafter.model`` of the configuration gives."""
