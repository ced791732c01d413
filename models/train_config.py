"""The configuration of ``numden train``: sections of plain fields, read from YAML or TOML."""

import dataclasses
import difflib
import math
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._extras import require

__all__ = ["Data", "Drafter", "Run", "Target", "TrainConfig", "load_config", "with_overrides"]

_MAY_BE_ZERO = {"markov_rank", "save_every", "seed", "vocab_size"}


class _Section:
    """Numbers that are counts, sizes or rates."""

    def __post_init__(self) -> None:
        section = type(self).__name__.lower()
        for name, value in vars(self).items():
            least = int(name not in _MAY_BE_ZERO)
            if isinstance(value, int) and value < least:
                raise ValueError(f"config: {section}.{name} must be at least {least}, got {value}.")
            if isinstance(value, float) and not 0 < value < math.inf:
                raise ValueError(f"config: {section}.{name} must be positive, got {value}.")


@dataclass(frozen=True, kw_only=True)
class Data(_Section):
    """What is read and how it is cut.

    Attributes:
        files: patterns of text files, or of conversations, then all .jsonl; empty: the sources of
            Python's standard library.
        max_bytes: how much text is used.
        vocab_size: 0 for bytes, else the size of a byte-pair encoding trained on the text.
        max_length: tokens in the longest row.
        min_length: tokens in the shortest row that is kept.
        held_out: rows kept back for evaluation.
    """

    files: tuple[str, ...] = ()
    max_bytes: int = 2_000_000
    vocab_size: int = 512
    max_length: int = 128
    min_length: int = 8
    held_out: int = 32


@dataclass(frozen=True, kw_only=True)
class Target(_Section):
    """The decoder that is trained first, and then drafted for.

    Attributes:
        hidden_size: its width.
        num_layers: its depth.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        num_windows: optimizer steps.
        tokens_per_window: in a window, over all ranks, padding counted.
        tokens_per_micro_step: the budget that a micro-step fills with rows.
        lr: peak learning rate, reached after a tenth of the windows, then a cosine to zero.
    """

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    num_windows: int = 240
    tokens_per_window: int = 4096
    tokens_per_micro_step: int = 1024
    lr: float = 3e-3


@dataclass(frozen=True, kw_only=True)
class Drafter(_Section):
    """The drafter; see the ``Config`` of its model.

    Attributes:
        model: its kind, a key of ``drafters.DRAFTERS``.
        block_size: tokens drafted at once.
        num_layers: its depth.
        num_target_layers: how many of the target's layers it reads.
        num_anchors: the most blocks of a row that are trained in a window.
        markov_rank: of what corrects a slot by the token before it.
        decay_gamma: slots after which the weight of a slot has fallen by e.
        num_windows: optimizer steps.
        micro_steps: micro-steps in a window, over all ranks.
        rows_per_micro_step: rows in a micro-step, of ragged lengths.
        min_answer: the least share of a row of text, from its end, that is trained on, as answers
            to prompts are; each row draws its own. Conversations say themselves what is.
        features: a folder for the target's hidden states, which are then computed once for all
            rows and read into memory (of a width for each layer read, and one more); empty: they
            are computed for each window.
        lr: peak learning rate, reached after a tenth of the windows, then a cosine to zero.
    """

    model: str = "dspark"
    block_size: int = 7
    num_layers: int = 2
    num_target_layers: int = 3
    num_anchors: int = 12
    markov_rank: int = 32
    decay_gamma: float = 7.0
    num_windows: int = 120
    micro_steps: int = 8
    rows_per_micro_step: int = 2
    min_answer: float = 0.05
    features: str = ""
    lr: float = 2e-3


@dataclass(frozen=True, kw_only=True)
class Run(_Section):
    """How it runs.

    Attributes:
        ranks: gloo ranks on this machine; under torchrun its own ranks are taken.
        seed: of every draw.
        max_norm: the global norm that gradients are clipped to.
        log_every: windows from record to record.
        prompts: held-out rows that are decoded.
        new_tokens: tokens decoded behind each prompt.
        save_every: windows from checkpoint to checkpoint, in the output folder, from which the same
            command goes on; 0: none.
        keep: how many checkpoints stay of each training.
    """

    ranks: int = 2
    seed: int = 0
    max_norm: float = 1.0
    log_every: int = 10
    prompts: int = 8
    new_tokens: int = 64
    save_every: int = 0
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All sections."""

    data: Data = field(default_factory=Data)
    target: Target = field(default_factory=Target)
    drafter: Drafter = field(default_factory=Drafter)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        longest, room = self.data.max_length, self.target.tokens_per_micro_step
        if longest > room:
            raise ValueError(
                "config: target.tokens_per_micro_step must have room for a row of data.max_length, "
                f"got {room} for {longest}."
            )
        depth, read = self.target.num_layers, self.drafter.num_target_layers
        if read > depth:
            raise ValueError(
                "config: drafter.num_target_layers must be at most target.num_layers, got "
                f"{read} of {depth}."
            )


def load_config(path: Path) -> TrainConfig:
    """Read a configuration; what it does not name keeps its default.

    Args:
        path: a .toml, .yaml or .yml file with the sections of ``TrainConfig``.

    Raises:
        ValueError: an unknown section or key, or a value of the wrong type or out of range; the
            message names it.
    """
    return _build(TrainConfig(), _values(path), "")


def _values(path: Path) -> Any:
    try:
        if path.suffix == ".toml":
            return tomllib.loads(path.read_text(encoding="utf-8"))
        if path.suffix in (".yaml", ".yml"):
            yaml = require("yaml", "numden train")
            return _parsed(yaml, path.read_text(encoding="utf-8")) or {}
    except ValueError as error:
        raise ValueError(f"config: {path} cannot be read: {error}.") from error
    raise ValueError(f"config: must be a .toml, .yaml or .yml file, got {path.name}.")


def _parsed(yaml: Any, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def with_overrides(config: TrainConfig, overrides: list[str]) -> TrainConfig:
    """Set fields by dotted names.

    Args:
        config: what is changed.
        overrides: texts like ``"drafter.num_windows=20"``; values are read as TOML, or else as
            text.

    Raises:
        ValueError: an unknown name, or a value of the wrong type or out of range.

    Examples:
        >>> with_overrides(TrainConfig(), ["run.seed=3"]).run.seed
        3
        >>> with_overrides(TrainConfig(), ["run.sed=3"])
        Traceback (most recent call last):
            ...
        ValueError: config: there is no key 'run.sed'. Did you mean 'run.seed'?
    """
    values: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or "." not in name:
            raise ValueError(f"config: an override is section.key=value, got {override!r}.")
        section, _, key = name.strip().partition(".")
        values.setdefault(section, {})[key] = _value(text.strip())
    return _build(config, values, "")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(default: Any, values: Any, place: str) -> Any:
    """``default`` with ``values`` in place of some of its fields, recursively."""
    if not isinstance(values, dict):
        raise ValueError(f"config: {place or 'the file'} must be a table of keys, got {values!r}.")
    known = {each.name: getattr(default, each.name) for each in dataclasses.fields(default)}
    changed = {}
    for key, value in values.items():
        name = f"{place}.{key}" if place else key
        if key not in known:
            hint = _hint(str(key), list(known), place)
            raise ValueError(f"config: there is no key {name!r}.{hint}")
        old = known[key]
        changed[key] = (
            _build(old, value, name) if dataclasses.is_dataclass(old) else _cast(old, value, name)
        )
    return dataclasses.replace(default, **changed)


def _hint(key: str, known: list[str], place: str) -> str:
    near = difflib.get_close_matches(key, known, 1)
    prefix = f"{place}." if place else ""
    if near:
        return f" Did you mean {prefix + near[0]!r}?"
    return f" Known: {', '.join(prefix + name for name in known)}."


def _cast(old: Any, value: Any, name: str) -> Any:
    if isinstance(old, tuple):
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"config: {name} must be a list of texts, got {value!r}.")
        return tuple(value)
    if isinstance(old, float) and type(value) in (int, str):
        # A number such as 1e-3 without a point is a text in YAML.
        with suppress(ValueError):
            return float(value)
    if type(value) is not type(old):
        raise ValueError(
            f"config: {name} must be {type(old).__name__}, got {value!r} ({type(value).__name__})."
        )
    return value
