"""The configuration of an EAGLE-3 drafter, checked when it is made."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from . import eagle_layer
from .backbone import require, require_size

__all__ = ["Average", "Config", "Loss"]

Loss = Literal["kl", "lk_alpha", "lk_lambda"]
Average = Literal["step", "token", "position"]


@dataclass(frozen=True, kw_only=True)
class Config(eagle_layer.Config):
    """An EAGLE-3 drafter and what it is trained on; see ``eagle_layer.Config`` for the rest.

    Attributes:
        num_steps: K, tokens that are drafted one after the other, in training and decoding.
        step_decay: step k weighs ``step_decay ** k``.
        normed_steps: a step gives the next its normed state, as EAGLE-3.1 does.
        loss: "kl"; "lk_alpha", the logarithm of the acceptance; or "lk_lambda", for each step
            ``w kl + (1 - w) rejection`` with ``w = kl_scale exp(-kl_decay acceptance)``, the mean
            acceptance of the step over the whole window, without a gradient.
        average: what the loss is a mean over. "step": each step over the positions that it is
            taught at. "token": all steps over those of the first. "position": kl over all B S
            positions, padding included, which is how SpecForge averages.
        kl_scale: see ``loss``.
        kl_decay: see ``loss``.
        chunk_queries: queries that have attention scores at one time; 0 for all.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    num_steps: int = 7
    step_decay: float = 0.8
    normed_steps: bool = False
    loss: Loss = "kl"
    average: Average = "step"
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    chunk_queries: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size(self, "num_steps")
        require(self, "step_decay", 0 < self.step_decay <= 1, "above 0 and at most 1")
        require(self, "loss", self.loss in get_args(Loss), f"one of {get_args(Loss)}")
        known = self.average in get_args(Average)
        require(self, "average", known, f"one of {get_args(Average)}")
        for name in ("kl_scale", "kl_decay", "chunk_queries"):
            require(self, name, 0 <= getattr(self, name) < math.inf, "finite and not negative")

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the losses that have loss terms, one for each step."""
        return {"kl": ("kl",), "lk_alpha": ("lk",), "lk_lambda": ("kl", "rejection")}[self.loss]

    @property
    def step_weights(self) -> list[float]:
        """The weight of each step."""
        return [self.step_decay**step for step in range(self.num_steps)]
