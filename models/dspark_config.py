"""The configuration of a DSpark drafter, checked when it is made."""

import math
from dataclasses import dataclass

from . import backbone, markov
from .backbone import require, require_size

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config(backbone.Config):
    """A DSpark drafter and what it is trained on; see ``backbone.Config`` for the network.

    Attributes:
        vocab_size: V of the target.
        mask_token_id: the token in the slots that are to be drafted.
        block_size: Q, tokens that are drafted at once.
        num_anchors: the most blocks of a row that are trained.
        markov_rank: r; 0 for no Markov head.
        markov_head: how the previous token corrects a slot: "vanilla", "gated" or "rnn".
        confidence_with_markov: the confidence head also reads the previous token's vector.
        ce_alpha: weight of the cross-entropy with the labels.
        l1_alpha: weight of the L1 distance to the target's distribution; 0 leaves it out.
        confidence_alpha: weight of the confidence head's loss; 0 leaves out the head.
        decay_gamma: slots after which the weight of a slot has fallen by e; None: equal weights.
        chunk_blocks: blocks whose logits are held at once; 0: all of them, without recomputation.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    vocab_size: int
    mask_token_id: int
    block_size: int = 7
    num_anchors: int = 512
    markov_rank: int = 256
    markov_head: markov.MarkovHead = "vanilla"
    confidence_with_markov: bool = True
    ce_alpha: float = 0.1
    l1_alpha: float = 0.9
    confidence_alpha: float = 1.0
    decay_gamma: float | None = None
    chunk_blocks: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab_size", "num_anchors"):
            require_size(self, name)
        for name in ("markov_rank", "ce_alpha", "l1_alpha", "confidence_alpha", "chunk_blocks"):
            require(self, name, 0 <= getattr(self, name) < math.inf, "finite and not negative")
        require(self, "ce_alpha", bool(self.alphas), "positive, or another alpha")
        inside = 0 <= self.mask_token_id < self.vocab_size
        require(self, "mask_token_id", inside, "a token below vocab_size")
        known = self.markov_head in markov.KINDS
        require(self, "markov_head", known, f"one of {markov.KINDS}")
        positive = self.decay_gamma is None or self.decay_gamma > 0
        require(self, "decay_gamma", positive, "positive or None")

    @property
    def alphas(self) -> dict[str, float]:
        """The weight of each loss term that is not left out."""
        named = {"ce": self.ce_alpha, "l1": self.l1_alpha, "confidence": self.confidence_alpha}
        return {name: alpha for name, alpha in named.items() if alpha > 0}

    @property
    def needs_teacher(self) -> bool:
        """Whether a loss term reads the target's distribution."""
        return self.l1_alpha > 0 or self.confidence_alpha > 0
