"""What all steps of ``numden train`` work with."""

from typing import Any, NamedTuple

from .. import job
from ..decoder import Config
from ..job_rows import Corpus, read_corpus
from ..train_config import TrainConfig

__all__ = ["Models", "Setup", "set_up"]


class Setup(NamedTuple):
    """What all steps of the command work with."""

    config: TrainConfig
    corpus: Corpus
    shape: Config
    drafter: Any


def set_up(config: TrainConfig) -> Setup:
    """Read the text, and check all shapes."""
    corpus = read_corpus(config)
    shape = job.target_config(config, corpus.tokenizer.vocab_size)
    drafter = job.drafter_config(config, shape, corpus.tokenizer.special_ids["mask"])
    return Setup(config, corpus, shape, drafter)


class Models(NamedTuple):
    """The trained target.

    Attributes:
        target: its params.
        frozen: what the drafter reads of them, from ``job.drafter_target``.
    """

    target: Any
    frozen: Any
