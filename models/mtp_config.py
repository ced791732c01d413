"""The configuration of a multi-token-prediction head, checked when it is made."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from .backbone import require, require_size

__all__ = ["CHAIN_CONTEXTS", "ChainContext", "Config"]

ChainContext = Literal["sequence", "prefix"]
CHAIN_CONTEXTS: tuple[ChainContext, ...] = get_args(ChainContext)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A multi-token-prediction head and what it is trained on.

    Attributes:
        vocab_size: V of the target.
        hidden_size: H, that of the target.
        intermediate_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``.
        head_dim: D, width of a head.
        rotary_dim: dims of each head that RoPE turns, the first ones, even; None: all.
        output_gate: the query projection gives each head a gate for its output, too.
        rope_theta: the base of RoPE's wavelengths.
        norm_eps: added to mean squares in the norms.
        num_steps: K, tokens that are predicted one after the other.
        step_decay: the weight of a step over that of the step before.
        step_weights: the weight of each step, in place of ``step_decay``; used as they are.
        chain_context: what a later step sees: "sequence", its own entries of all earlier
            positions; "prefix", the first step's entries of them and its own chain, as in serving.
        chunk_size: predictions whose logits are held at once; 0: all, without recomputation.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int | None = None
    output_gate: bool = False
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    num_steps: int = 1
    step_decay: float = 0.6
    step_weights: tuple[float, ...] | None = None
    chain_context: ChainContext = "sequence"
    chunk_size: int = 4096

    def __post_init__(self) -> None:
        for name in _SIZES:
            require_size(self, name)
        for name in ("rope_theta", "norm_eps", "step_decay"):
            require(self, name, 0 < getattr(self, name) < math.inf, "positive and finite")
        require(self, "num_kv_heads", self.num_heads % self.num_kv_heads == 0, "a divisor of heads")
        dims = self.turned_dims
        even = type(dims) is int and 2 <= dims <= self.head_dim and dims % 2 == 0
        require(self, "rotary_dim", even, "even and from 2 to head_dim")
        known = self.chain_context in CHAIN_CONTEXTS
        require(self, "chain_context", known, f"one of {CHAIN_CONTEXTS}")
        chunks = type(self.chunk_size) is int and self.chunk_size >= 0
        require(self, "chunk_size", chunks, "an integer, not negative")
        weights = self.step_weights
        if weights is not None:
            finite = all(0 <= weight < math.inf for weight in weights) and any(weights)
            fits = finite and len(weights) == self.num_steps
            require(self, "step_weights", fits, "num_steps numbers, finite and not negative")

    @property
    def turned_dims(self) -> int:
        """The dims of each head that RoPE turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each step's mean by the name of its term; they add up to 1 by default.

        Examples:
            >>> config = Config(vocab_size=9, hidden_size=8, intermediate_size=12, num_heads=2,
            ...                 num_kv_heads=1, head_dim=4, num_steps=3)
            >>> {name: round(weight, 4) for name, weight in config.weights.items()}
            {'step_0': 0.5102, 'step_1': 0.3061, 'step_2': 0.1837}
        """
        weights = self.step_weights
        if weights is None:
            powers = [self.step_decay**step for step in range(self.num_steps)]
            weights = tuple(power / sum(powers) for power in powers)
        return {f"step_{step}": weight for step, weight in enumerate(weights)}


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_steps",
)
