"""The configuration of a DSpark drafter, checked when it is made."""

import math
from dataclasses import dataclass

from . import block_drafter, markov
from .backbone import require

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config(block_drafter.Config):
    """A DSpark drafter and what it is trained on; see ``block_drafter.Config`` for the rest.

    Attributes:
        block_size: Q, tokens that are drafted at once.
        markov_rank: r; 0 for no Markov head.
        markov_head: how the previous token corrects a slot: "vanilla", "gated" or "rnn".
        confidence_with_markov: the confidence head also reads the previous token's vector.
        ce_alpha: weight of the cross-entropy with the labels; 0 leaves it out.
        l1_alpha: weight of the L1 distance to the target's distribution; 0 leaves it out.
        confidence_alpha: weight of the confidence head's loss; 0 leaves out the head.
        dpard_alpha: trains by D-PARD, in place of ce and l1, with this share of credit that does
            not depend on acceptance; None: not.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    block_size: int = 7
    markov_rank: int = 256
    markov_head: markov.MarkovHead = "vanilla"
    confidence_with_markov: bool = True
    ce_alpha: float = 0.1
    l1_alpha: float = 0.9
    confidence_alpha: float = 1.0
    dpard_alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("markov_rank", "ce_alpha", "l1_alpha", "confidence_alpha"):
            require(self, name, 0 <= getattr(self, name) < math.inf, "finite and not negative")
        require(self, "ce_alpha", bool(self.alphas), "positive, or another alpha")
        known = self.markov_head in markov.KINDS
        require(self, "markov_head", known, f"one of {markov.KINDS}")
        if self.dpard_alpha is not None:
            require(self, "dpard_alpha", 0 < self.dpard_alpha < 1, "between 0 and 1, or None")
            for name in ("ce_alpha", "l1_alpha"):
                require(self, name, getattr(self, name) == 0, "0 where dpard_alpha is given")

    @property
    def alphas(self) -> dict[str, float]:
        """The weight of each loss term that is not left out."""
        dpard = 0.0 if self.dpard_alpha is None else 1.0
        named = {"ce": self.ce_alpha, "l1": self.l1_alpha, "dpard": dpard}
        named |= {"confidence": self.confidence_alpha}
        return {name: alpha for name, alpha in named.items() if alpha > 0}

    @property
    def needs_teacher(self) -> bool:
        """Whether a loss term reads the target's distribution."""
        return bool(self.alphas.keys() - {"ce"})
