"""The configuration of a DSpine drafter, and the schedule of its training."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from . import block_drafter
from .backbone import require, require_size

__all__ = ["Config", "Schedule", "schedule"]


@dataclass(frozen=True, kw_only=True)
class Config(block_drafter.Config):
    """A DSpine drafter and what it is trained on; see ``block_drafter.Config`` for the rest.

    Attributes:
        block_size: Q slots, of which the first holds the known token and Q - 1 are drafted.
        decay_gamma: drafted slots after which the weight has fallen by e; None: equal weights.
        transfer_rank: r, dimensions of the transfer space, at most H and V - 1.
        message_size: m, width of the message from a slot to the next.
        top_k: k, tokens among which refinement chooses.
        ce_weight: c, the share of cross-entropy in the loss; that of the L1 distance is 1 - c.
        alignment_weight: of the alignment of features with the codes of the labels.
        alignment_warmup_steps: optimizer steps over which that weight grows from 0.
        replacement_layers: layers that are given true previous tokens in a replaced block.
        replacement_probability: that a block is replaced, at the start of training.
        replacement_hold_ratio: the share of training for which that probability stays.
        replacement_end_ratio: the share of training at whose end it has fallen to 0.
        candidate_mass_threshold: refinement learns the target's distribution over the candidates
            where the target gives them more than that.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    block_size: int = 16
    decay_gamma: float | None = 7.0
    transfer_rank: int = 1024
    message_size: int = 512
    top_k: int = 16
    ce_weight: float = 0.1
    alignment_weight: float = 0.5
    alignment_warmup_steps: int = 146
    replacement_layers: int = 3
    replacement_probability: float = 0.5
    replacement_hold_ratio: float = 1 / 6
    replacement_end_ratio: float = 1 / 3
    candidate_mass_threshold: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("transfer_rank", "message_size", "top_k"):
            require_size(self, name)
        for name in ("alignment_warmup_steps", "replacement_layers"):
            count = getattr(self, name)
            require(self, name, type(count) is int and count >= 0, "an integer, not negative")
        for name in ("ce_weight", "replacement_probability", "replacement_end_ratio"):
            require(self, name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        most = min(self.hidden_size, self.vocab_size - 1)
        require(self, "transfer_rank", self.transfer_rank <= most, "at most H and V - 1")
        require(self, "top_k", self.top_k <= self.vocab_size, "at most vocab_size")
        require(self, "block_size", self.block_size >= 2, "at least 2, one slot is known")
        # In a block causality is the only limit: a shorter window would be another model.
        wide = self.sliding_window is None or self.sliding_window >= self.block_size
        require(self, "sliding_window", wide, "at least block_size")
        weight = 0 <= self.alignment_weight < math.inf
        require(self, "alignment_weight", weight, "finite and not negative")
        before = 0 <= self.replacement_hold_ratio < self.replacement_end_ratio
        require(self, "replacement_hold_ratio", before, "from 0 to below replacement_end_ratio")
        mass = 0 <= self.candidate_mass_threshold < 1
        require(self, "candidate_mass_threshold", mass, "from 0 to below 1")

    @property
    def num_drafted(self) -> int:
        """Q - 1, the slots that are drafted."""
        return self.block_size - 1


class Schedule(NamedTuple):
    """What changes with the optimizer step.

    Attributes:
        alignment: the weight of alignment, for ``dspine.objective``.
        replacement: the probability that a block is replaced, for ``dspine.prepare``.
    """

    alignment: float
    replacement: float


def schedule(config: Config, step: int, num_steps: int | None = None) -> Schedule:
    """The schedule at an optimizer step.

    ``alignment`` grows linearly over ``alignment_warmup_steps``. ``replacement`` stays for the hold
    ratio of the steps, then falls linearly to 0 at the end ratio.

    Args:
        config: the drafter.
        step: steps that are done, from 0.
        num_steps: of the training; None or 0: unknown, and no block is replaced.

    Examples:
        >>> config = Config(vocab_size=9, mask_token_id=8, hidden_size=8, intermediate_size=12,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_target_layers=3,
        ...                 transfer_rank=4, top_k=3)
        >>> [schedule(config, step, num_steps=600).replacement for step in (0, 100, 200)]
        [0.5, 0.5, 0.0]
        >>> schedule(config, step=73)
        Schedule(alignment=0.25, replacement=0.0)
    """
    step, warmup = max(step, 0), config.alignment_warmup_steps
    warm = min(step / warmup, 1.0) if warmup else 1.0
    alignment = config.alignment_weight * warm
    if not num_steps or num_steps < 0:
        return Schedule(alignment, 0.0)
    hold, end = config.replacement_hold_ratio, config.replacement_end_ratio
    left = min(max((end - step / num_steps) / (end - hold), 0.0), 1.0)
    return Schedule(alignment, config.replacement_probability * left)
