"""What ``numden train`` trains: a target decoder on rows of text, a drafter on its states.

Everything here is a function of the configuration; who runs it, on how many ranks, is decided in
``cli``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from ..pure import LossFn, Objective, optim, tree
from .data import Batch, windows
from .decoder import Config, hidden_states, init
from .decoder import loss_terms as decoder_loss
from .decoding import Decoded, cached_decoder, greedy, speculative_greedy
from .drafters import DRAFTERS, Drafter, Progress
from .features import load_features, save_features
from .job_rows import DRAFTER, ORDER, TARGET, Corpus, drafter_rows, stream_key
from .module import call
from .train_config import TrainConfig

__all__ = [
    "decode",
    "drafter_config",
    "drafter_den",
    "drafter_init",
    "drafter_kind",
    "drafter_loss",
    "drafter_objective",
    "drafter_target",
    "drafter_windows",
    "one_cycle",
    "read_states",
    "save_states",
    "states",
    "target_config",
    "target_init",
    "target_loss",
    "target_windows",
]

_ROWS_PER_FILE = 1024


def one_cycle(lr: float, num_windows: int) -> optim.Schedule:
    """A tenth of the windows up to ``lr``, then a cosine down to nearly zero.

    Examples:
        >>> schedule = one_cycle(1.0, 20)
        >>> [round(schedule(window), 2) for window in (0, 1, 2, 11, 19)]
        [0.04, 0.52, 1.0, 0.5, 0.01]
    """
    up = max(1, num_windows // 10)
    cycle = partial(OneCycleLR, max_lr=lr, total_steps=num_windows + 1, cycle_momentum=False)
    # torch puts the peak at pct_start * total_steps - 1.
    return optim.schedule_from_torch(
        partial(cycle, pct_start=(up + 1) / (num_windows + 1)), lr=lr, num_steps=num_windows
    )


def target_config(config: TrainConfig, vocab_size: int) -> Config:
    """The target's shape."""
    target = config.target
    return Config(
        vocab_size=vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=3 * target.hidden_size,
        num_layers=target.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.hidden_size // target.num_heads,
        tie_embeddings=True,
    )


def target_init(config: TrainConfig, shape: Config) -> Any:
    """The untrained target."""
    return init(shape, stream_key(config, TARGET))


def target_loss(shape: Config) -> LossFn:
    """The target's loss terms, on params or on a module of them."""
    return partial(call, partial(decoder_loss, config=shape))


def target_windows(
    config: TrainConfig, corpus: Corpus, rank: int = 0, num_ranks: int = 1, *, first: int = 0
) -> Iterator[list[Batch]]:
    """This rank's windows for the target, from one on: micro-steps filled to a budget of tokens."""
    target = config.target
    tokens = target.tokens_per_micro_step
    stream = windows(
        corpus.rows,
        key=stream_key(config, ORDER),
        num_micro_steps=max(1, target.tokens_per_window // tokens),
        num_tokens=tokens,
        rank=rank,
        num_ranks=num_ranks,
    )
    return (window for window, _ in islice(stream, first, None))


def drafter_kind(config: TrainConfig) -> Drafter:
    """The drafter that is to be trained.

    Raises:
        ValueError: there is none of this name.
    """
    name = config.drafter.model
    if name not in DRAFTERS:
        raise ValueError(f"config: drafter.model must be one of {', '.join(DRAFTERS)}, got {name}.")
    return DRAFTERS[name]


def drafter_config(config: TrainConfig, shape: Config, mask_token_id: int) -> Any:
    """The drafter's shape: as wide as the target, whose embedding and head it borrows."""
    return drafter_kind(config).config(config.drafter, shape, mask_token_id)


def drafter_target(config: TrainConfig, shape: Any, target: Any) -> Any:
    """What the drafter reads of the frozen target: to be computed once, and kept."""
    return drafter_kind(config).target(target, shape)


def drafter_init(config: TrainConfig, shape: Any, frozen: Any) -> Any:
    """The untrained drafter; ``frozen`` is from ``drafter_target``."""
    return drafter_kind(config).init(shape, stream_key(config, DRAFTER), frozen)


def drafter_loss(config: TrainConfig, shape: Any, frozen: Any) -> LossFn:
    """The drafter's loss terms, on params or on a module of them."""
    loss_terms = drafter_kind(config).loss_terms
    return partial(call, partial(loss_terms, config=shape, target=frozen))


def drafter_den(config: TrainConfig, shape: Any, frozen: Any) -> Callable[[Batch], Any] | None:
    """What counts the dens of a batch before a window; None where that is not needed."""
    den = drafter_kind(config).den
    return None if den is None else lambda batch: den(batch, shape, frozen)


def drafter_objective(config: TrainConfig, shape: Any, step: int) -> Objective:
    """The objective of the drafter's window of this number."""
    return drafter_kind(config).objective(shape, Progress(step, config.drafter.num_windows))


def states(batch: Batch, target: Any, shape: Config, layers: Sequence[int]) -> dict[str, Tensor]:
    """What a drafter reads of the frozen target.

    Returns:
        ``captured`` ``[B, S, K * H]``, the outputs of K layers, and ``final`` ``[B, S, H]``, the
        input of the head.
    """
    with torch.no_grad():
        captured, final = hidden_states(target, batch["tokens"], shape, layers=layers)
    return {"captured": captured, "final": final}


def save_states(
    config: TrainConfig,
    corpus: Corpus,
    shape: Config,
    drafter: Any,
    target: Any,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Write this rank's share of the ``states`` of all rows into ``config.drafter.features``."""
    paths = _paths(config, corpus)
    Path(config.drafter.features).mkdir(parents=True, exist_ok=True)
    layers = drafter_kind(config).layers(drafter, shape)
    features = partial(states, target=target, shape=shape, layers=layers)
    for i in range(rank, len(paths), num_ranks):
        save_features(paths[i], corpus.rows[i * _ROWS_PER_FILE :][:_ROWS_PER_FILE], features)


def read_states(config: TrainConfig, corpus: Corpus) -> Corpus:
    """The corpus with what ``save_states`` wrote of its rows on all ranks."""
    return corpus._replace(rows=load_features(*_paths(config, corpus)))


def _paths(config: TrainConfig, corpus: Corpus) -> list[Path]:
    folder, num_files = Path(config.drafter.features), -(-len(corpus.rows) // _ROWS_PER_FILE)
    return [folder / f"states-{i:05}.safetensors" for i in range(num_files)]


def drafter_windows(
    config: TrainConfig,
    corpus: Corpus,
    shape: Config,
    drafter: Any,
    target: Any,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    first: int = 0,
) -> Iterator[list[Batch]]:
    """This rank's windows for the drafter, from one on: with anchors drawn, and ``states``.

    The states that a corpus brings are taken as they are; else they are computed.
    """
    stream = windows(
        drafter_rows(config, corpus.rows),
        key=stream_key(config, ORDER),
        num_micro_steps=config.drafter.micro_steps,
        num_rows=config.drafter.rows_per_micro_step,
        rank=rank,
        num_ranks=num_ranks,
    )
    kind = drafter_kind(config)
    layers = kind.layers(drafter, shape)
    for step, (window, _) in enumerate(islice(stream, first, None), first):
        progress = Progress(step, config.drafter.num_windows)
        with_states = [_with_states(batch, target, shape, layers) for batch in window]
        yield [kind.prepare(batch, drafter, progress) for batch in with_states]


def _with_states(batch: Batch, target: Any, shape: Config, layers: Sequence[int]) -> Batch:
    if "captured" in batch:
        dtype = target["embed"].dtype
        found = {name: batch[name].to(dtype) for name in ("captured", "final")}
    else:
        found = states(batch, target, shape, layers)
    return batch | found


class Decodings(NamedTuple):
    """What decoding some prompts gave.

    Attributes:
        by_drafter: speculative decodings, one for each prompt, by drafter.
        plain: the target's own.
    """

    by_drafter: dict[str, list[Decoded]]
    plain: list[Tensor]


def decode(
    kind: Drafter,
    prompts: list[Tensor],
    target: Any,
    shape: Config,
    drafters: dict[str, Any],
    drafter: Any,
    frozen: Any,
    *,
    new_tokens: int,
) -> Decodings:
    """Decode prompts greedily by the target alone and with each drafter, in float64.

    In float64 the target's best logits are never closer than rounding, so that the tokens must be
    the same one by one.
    """
    target, drafters, frozen = tree.map(Tensor.double, (target, drafters, frozen))
    longest = max(len(prompt) for prompt in prompts)
    capacity = longest + new_tokens + kind.num_drafted(drafter) + 1
    layers = kind.layers(drafter, shape)
    plain = cached_decoder(target, shape, capacity=capacity)

    def drafted(params: Any, captured: Tensor, token: Tensor) -> Tensor:
        return kind.draft(params, captured, token, drafter, frozen).tokens

    def speculated(params: Any) -> list[Decoded]:
        model, draft = (
            kind.decoder(target, shape, capacity, layers, params),
            partial(drafted, params),
        )
        return [speculative_greedy(model, draft, prompt, new_tokens) for prompt in prompts]

    by_drafter = {name: speculated(params) for name, params in drafters.items()}
    return Decodings(by_drafter, [greedy(plain, prompt, new_tokens) for prompt in prompts])
