"""Hypothesis strategies for losses and windows.

Arguments describe the domain, and a domain without members is refused at once. ``dyadic`` numbers
are multiples of a power of two: their sums and products are exact in binary, so that a law can be
tested for the equality of every bit.

| strategy | draws |
|---|---|
| ``dyadic``, ``dyadic_tensors`` | exact numbers |
| ``masks`` | bool tensors |
| ``ragged_masks`` | bool tensors of padded rows |
| ``token_batches`` | logits, labels, mask and sample ids of token rows |
| ``ragged_counts`` | token counts of the micro-steps of a window |
| ``partitions`` | cuts of rows into micro-steps |
| ``worlds`` | deals of micro-steps to ranks |
| ``meshes`` | sizes of the axes of a device mesh |
| ``windows`` | the rows of a batch as micro-batches |
"""

from ._value_strategies import dyadic, dyadic_tensors, masks, ragged_masks, token_batches
from ._window_strategies import meshes, partitions, ragged_counts, windows, worlds

__all__ = [
    "dyadic",
    "dyadic_tensors",
    "masks",
    "meshes",
    "partitions",
    "ragged_counts",
    "ragged_masks",
    "token_batches",
    "windows",
    "worlds",
]
