"""The configuration of ``numden train``: sections of plain fields, read from YAML or TOML."""

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Data", "Drafter", "Run", "Target", "TrainConfig", "load_config", "with_overrides"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read and how it is cut.

    Attributes:
        files: globs of text files, or of .jsonl conversations; empty: the sources of Python's
            standard library.
        max_bytes: how much of them is read.
        vocab_size: 0 for bytes, else the size of a byte-pair encoding trained on the text.
        max_length: tokens in the longest row.
        min_length: tokens in the shortest row that is kept.
        held_out: rows kept back for evaluation.
    """

    files: tuple[str, ...] = ()
    max_bytes: int = 2_000_000
    vocab_size: int = 512
    max_length: int = 128
    min_length: int = 16
    held_out: int = 32


@dataclass(frozen=True, kw_only=True)
class Target:
    """The decoder that is trained first, and then drafted for.

    Attributes:
        hidden_size: its width.
        num_layers: its depth.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        num_windows: optimizer steps.
        tokens_per_window: in a window, over all ranks, padding counted.
        tokens_per_micro_step: the budget that a micro-step fills with rows.
        lr: peak learning rate, with a warm-up and a cosine to a tenth.
    """

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    num_windows: int = 300
    tokens_per_window: int = 4096
    tokens_per_micro_step: int = 1024
    lr: float = 3e-3


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """The DSpark drafter; see ``models.dspark.Config``.

    Attributes:
        block_size: tokens drafted at once.
        num_layers: its depth.
        num_target_layers: how many of the target's layers it reads.
        num_anchors: the most blocks of a row that are trained in a window.
        markov_rank: of the Markov head.
        decay_gamma: slots after which the weight of a slot has fallen by e.
        num_windows: optimizer steps.
        micro_steps: micro-steps in a window, over all ranks.
        rows_per_micro_step: rows in a micro-step, of ragged lengths.
        lr: peak learning rate, with a warm-up and a cosine to a tenth.
    """

    block_size: int = 7
    num_layers: int = 2
    num_target_layers: int = 3
    num_anchors: int = 12
    markov_rank: int = 32
    decay_gamma: float = 7.0
    num_windows: int = 150
    micro_steps: int = 8
    rows_per_micro_step: int = 4
    lr: float = 2e-3


@dataclass(frozen=True, kw_only=True)
class Run:
    """How it runs.

    Attributes:
        ranks: gloo ranks on this machine; under torchrun its own ranks are taken.
        seed: of every draw.
        max_norm: the global norm that gradients are clipped to.
        log_every: windows from record to record.
        prompts: held-out rows that are decoded.
        new_tokens: tokens decoded behind each prompt.
    """

    ranks: int = 2
    seed: int = 0
    max_norm: float = 1.0
    log_every: int = 10
    prompts: int = 8
    new_tokens: int = 64


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All sections."""

    data: Data = field(default_factory=Data)
    target: Target = field(default_factory=Target)
    drafter: Drafter = field(default_factory=Drafter)
    run: Run = field(default_factory=Run)


def load_config(path: Path) -> TrainConfig:
    """Read a configuration; what it does not name keeps its default.

    Args:
        path: a .toml, .yaml or .yml file with the sections of ``TrainConfig``.

    Raises:
        ValueError: an unknown section or key, or a value of the wrong type; the message names it.
    """
    if path.suffix == ".toml":
        values = tomllib.loads(path.read_text())
    elif path.suffix in (".yaml", ".yml"):
        import yaml

        values = yaml.safe_load(path.read_text()) or {}
    else:
        raise ValueError(f"config: must be a .toml, .yaml or .yml file, got {path.name}.")
    return _build(TrainConfig(), values, "")


def with_overrides(config: TrainConfig, overrides: list[str]) -> TrainConfig:
    """Set fields by dotted names.

    Args:
        config: what is changed.
        overrides: texts like ``"drafter.num_windows=20"``; values are read as TOML, or else as
            text.

    Raises:
        ValueError: an unknown name, or a value of the wrong type.

    Examples:
        >>> with_overrides(TrainConfig(), ["run.seed=3"]).run.seed
        3
        >>> with_overrides(TrainConfig(), ["run.sed=3"])
        Traceback (most recent call last):
            ...
        ValueError: config: there is no key 'run.sed'. Did you mean 'run.seed'?
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or "." not in name:
            raise ValueError(f"config: an override is section.key=value, got {override!r}.")
        section, _, key = name.strip().partition(".")
        config = _build(config, {section: {key: _value(text.strip())}}, "")
    return config


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
            raise ValueError(f"config: there is no key {name!r}.{_hint(key, list(known), place)}")
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
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(old):
        raise ValueError(
            f"config: {name} must be {type(old).__name__}, got {value!r} ({type(value).__name__})."
        )
    return value
