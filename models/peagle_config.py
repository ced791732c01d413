"""The configuration of a P-EAGLE drafter, checked when it is made."""

from dataclasses import dataclass

from . import eagle_layer
from .backbone import require, require_size
from .block_attention import KERNELS, Kernel

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config(eagle_layer.Config):
    """A P-EAGLE drafter and what it is trained on; see ``eagle_layer.Config`` for the rest.

    Attributes:
        mask_token_id: the token that a guess of a depth above 0 reads, below ``vocab_size``.
        num_layers: layers of the network.
        num_depths: D, tokens that are drafted at once.
        down_sample_ratio: see ``cod.draw_depths``.
        down_sample_ratio_min: likewise; above 0 and at most ``down_sample_ratio``, which is at
            most 1.
        norm_before_residual: the first layer adds to the normed hidden state.
        kernel: of attention, "auto", "dense" or "flex"; see ``block_attention.choose_kernel``.
    """

    mask_token_id: int
    num_layers: int = 4
    num_depths: int = 8
    down_sample_ratio: float = 0.8
    down_sample_ratio_min: float = 0.2
    norm_before_residual: bool = False
    kernel: Kernel = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_layers", "num_depths"):
            require_size(self, name)
        inside = 0 <= self.mask_token_id < self.vocab_size
        require(self, "mask_token_id", inside, "a token below vocab_size")
        least, ratio = self.down_sample_ratio_min, self.down_sample_ratio
        require(self, "down_sample_ratio", 0 < ratio <= 1, "above 0 and at most 1")
        ordered = 0 < least <= ratio
        require(self, "down_sample_ratio_min", ordered, "above 0 and at most down_sample_ratio")
        require(self, "kernel", self.kernel in KERNELS, f"one of {KERNELS}")
