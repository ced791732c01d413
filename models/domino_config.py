"""The configuration of a Domino drafter, checked when it is made."""

from dataclasses import dataclass

from . import block_drafter
from .backbone import require, require_size

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config(block_drafter.Config):
    """A Domino drafter and what it is trained on; see ``block_drafter.Config`` for the rest.

    Attributes:
        block_size: Q, the slots of a block; one more than it drafts, unless ``shift_label``.
        shift_label: slots predict the token behind their own position; so slot 0 predicts, too.
        gru_size: G, width of the recurrent state.
        correction_rank: r, of the correction.
        prefix_size: the first drafted tokens, which are not corrected.
        base_start: the weight of the uncorrected logits' loss at step 0, from 0 to 1.
        base_decay_ratio: the share of training after which that weight is 0.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    shift_label: bool = False
    gru_size: int = 1024
    correction_rank: int = 256
    prefix_size: int = 0
    base_start: float = 1.0
    base_decay_ratio: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gru_size", "correction_rank"):
            require_size(self, name)
        require(self, "block_size", self.num_drafted >= 1, "at least 2, or labels shifted")
        prefix = 0 <= self.prefix_size < self.num_drafted
        require(self, "prefix_size", prefix, "less than the drafted tokens, and not negative")
        for name in ("base_start", "base_decay_ratio"):
            require(self, name, 0 <= getattr(self, name) <= 1, "from 0 to 1")

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 0 if self.shift_label else 1

    @property
    def num_drafted(self) -> int:
        """D, the tokens that are drafted at once."""
        return self.block_size - self.first_slot
