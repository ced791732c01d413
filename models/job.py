"""What ``numden train`` trains: rows of text, a target decoder, a DSpark drafter on its states.

Everything here is a function of the configuration; who runs it, on how many ranks, is decided in
``cli``.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from ..pure import LossFn, optim, random, tree
from . import dspark
from .corpus import read_conversations, read_texts, stdlib_sources
from .data import Batch, Row, conversation_rows, text_rows, windows
from .decoder import Config, hidden_states
from .decoder import loss_terms as decoder_loss
from .decoding import Decoded, cached_decoder, greedy, speculative_greedy
from .dspark_draft import draft
from .module import call
from .tokens import ByteTokenizer, Tokenizer, train_bpe
from .train_config import TrainConfig

__all__ = [
    "Corpus",
    "decode",
    "drafter_config",
    "drafter_init",
    "drafter_loss",
    "drafter_windows",
    "one_cycle",
    "read_corpus",
    "target_config",
    "target_init",
    "target_loss",
    "target_windows",
    "with_states",
]

# Folded into the seed: one stream of draws for each purpose.
_CUT, _ORDER, _TARGET, _DRAFTER = range(4)


class Corpus(NamedTuple):
    """Rows to train on, rows that are held out, and the tokenizer that made them."""

    tokenizer: Tokenizer
    rows: list[Row]
    held_out: list[Row]


def read_corpus(config: TrainConfig) -> Corpus:
    """Read the text, train a tokenizer on it if one is asked for, and cut it into rows."""
    data, key = config.data, _key(config, _CUT)
    if data.files and all(name.endswith(".jsonl") for name in data.files):
        conversations = read_conversations(data.files)
        said = (message["content"] for talk in conversations for message in talk)
        tokenizer = _tokenizer(said, data.vocab_size)
        rows = conversation_rows(
            conversations, tokenizer, max_length=data.max_length, on_long="truncate"
        )
    else:
        texts = _texts(data.files, data.max_bytes)
        tokenizer = _tokenizer(texts, data.vocab_size)
        lengths = {"min_length": data.min_length, "max_length": data.max_length}
        rows = text_rows(texts, tokenizer, key=key, **lengths)
    rows = [row for row in rows if len(row.tokens) >= data.min_length]
    if len(rows) <= data.held_out:
        raise ValueError(
            f"data: there must be more rows than are held out, got {len(rows)} rows and "
            f"data.held_out={data.held_out}. Give more text, or hold out fewer."
        )
    order = random.permutation(key, len(rows)).tolist()
    shuffled = [rows[i] for i in order]
    return Corpus(tokenizer, shuffled[data.held_out :], shuffled[: data.held_out])


def _texts(files: tuple[str, ...], max_bytes: int) -> list[str]:
    return read_texts(files) if files else list(stdlib_sources(max_bytes=max_bytes))


def _tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    return train_bpe(texts, vocab_size=vocab_size) if vocab_size else ByteTokenizer()


def _key(config: TrainConfig, purpose: int) -> Tensor:
    return random.fold_in(random.key(config.run.seed), purpose)


def one_cycle(lr: float, num_windows: int) -> optim.Schedule:
    """A tenth of the windows up to ``lr``, then a cosine down."""
    cycle = partial(OneCycleLR, max_lr=lr, total_steps=num_windows + 1, pct_start=0.1)
    return optim.schedule_from_torch(
        partial(cycle, cycle_momentum=False), lr=lr, num_steps=num_windows
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
    from .decoder import init

    return init(shape, _key(config, _TARGET))


def target_loss(shape: Config) -> LossFn:
    """The target's loss terms, on params or on a module of them."""
    return partial(call, partial(decoder_loss, config=shape))


def target_windows(
    config: TrainConfig, corpus: Corpus, rank: int = 0, num_ranks: int = 1
) -> Iterator[list[Batch]]:
    """This rank's windows for the target: micro-steps filled to a budget of tokens."""
    target = config.target
    tokens = target.tokens_per_micro_step
    stream = windows(
        corpus.rows,
        key=_key(config, _ORDER),
        num_micro_steps=max(1, target.tokens_per_window // tokens),
        num_tokens=tokens,
        rank=rank,
        num_ranks=num_ranks,
    )
    return (window for window, _ in stream)


def drafter_config(config: TrainConfig, shape: Config, mask_token_id: int) -> dspark.Config:
    """The drafter's shape: as wide as the target, whose embedding and head it borrows."""
    drafter = config.drafter
    return dspark.Config(
        vocab_size=shape.vocab_size,
        mask_token_id=mask_token_id,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=drafter.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_target_layers=drafter.num_target_layers,
        block_size=drafter.block_size,
        num_anchors=drafter.num_anchors,
        markov_rank=drafter.markov_rank,
        decay_gamma=drafter.decay_gamma,
    )


def drafter_init(config: TrainConfig, shape: dspark.Config) -> Any:
    """The untrained drafter."""
    return dspark.init(shape, _key(config, _DRAFTER))


def drafter_loss(shape: dspark.Config, target: Any) -> LossFn:
    """The drafter's loss terms, on params or on a module of them."""
    return partial(call, partial(dspark.loss_terms, config=shape, target=frozen(target)))


def frozen(target: Any) -> Any:
    """What a drafter borrows of the target's params: embedding and head."""
    return {name: target[name] for name in ("embed", "head") if name in target}


def captured_layers(shape: Config, drafter: dspark.Config) -> tuple[int, ...]:
    """The target's layers that the drafter reads: spread evenly, without the outermost of many.

    Examples:
        >>> from types import SimpleNamespace as Shape
        >>> captured_layers(Shape(num_layers=36), Shape(num_target_layers=5))
        (1, 9, 17, 25, 33)
    """
    depth, count = shape.num_layers, drafter.num_target_layers
    if count == 1:
        return (depth // 2,)
    first, last = (1, depth - 3) if depth >= count + 3 else (0, depth - 1)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def with_states(batch: Batch, target: Any, shape: Config, drafter: dspark.Config) -> Batch:
    """The batch with the frozen target's hidden states, and with anchors."""
    with torch.no_grad():
        captured, final = hidden_states(
            target, batch["tokens"], shape, layers=captured_layers(shape, drafter)
        )
    return dspark.prepare({**batch, "captured": captured, "final": final}, drafter)


def drafter_windows(
    config: TrainConfig,
    corpus: Corpus,
    target: Any,
    shape: Config,
    drafter: dspark.Config,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[list[Batch]]:
    """This rank's windows for the drafter, hidden states computed on the fly."""
    stream = windows(
        corpus.rows,
        key=_key(config, _ORDER),
        num_micro_steps=config.drafter.micro_steps,
        num_rows=config.drafter.rows_per_micro_step,
        rank=rank,
        num_ranks=num_ranks,
    )
    for window, _ in stream:
        yield [with_states(batch, target, shape, drafter) for batch in window]


class Decodings(NamedTuple):
    """What decoding some prompts gave.

    Attributes:
        by_drafter: speculative decodings, one for each prompt, by drafter.
        plain: the target's own.
    """

    by_drafter: dict[str, list[Decoded]]
    plain: list[Tensor]


def decode(
    prompts: list[Tensor],
    target: Any,
    shape: Config,
    drafters: dict[str, Any],
    drafter: dspark.Config,
    *,
    new_tokens: int,
) -> Decodings:
    """Decode prompts greedily by the target alone and with each drafter, in float64.

    In float64 the target's best logits are never closer than rounding, so that the tokens must be
    the same one by one.
    """
    target, drafters = tree.map(Tensor.double, (target, drafters))
    capacity = max(len(prompt) for prompt in prompts) + new_tokens + drafter.block_size + 1
    layers = captured_layers(shape, drafter)
    model = cached_decoder(target, shape, capacity=capacity, layers=layers)

    def drafted(params: Any, captured: Tensor, token: Tensor) -> Tensor:
        return draft(params, captured, token, drafter, frozen(target)).tokens

    by_drafter = {
        name: [
            speculative_greedy(model, partial(drafted, params), prompt, new_tokens)
            for prompt in prompts
        ]
        for name, params in drafters.items()
    }
    return Decodings(by_drafter, [greedy(model, prompt, new_tokens) for prompt in prompts])
