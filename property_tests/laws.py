"""The laws, each an assertion for your own tests.

``loss_fn`` is ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``; a batch is a pytree of
tensors with rows on the leading axis. A law that does not hold raises ``LawViolation``.

| law | says |
|---|---|
| ``additivity`` | the sums of joined batches are the sums over the batches |
| ``permutation`` | the order of rows does not matter |
| ``padding`` | neutral rows and columns change nothing |
| ``emptiness`` | nothing to learn from: exact zeros, also in gradients |
| ``den_independence`` | no denominator depends on the params |
| ``mask_agreement`` | num and den come from one mask |
| ``keyed_randomness`` | what a row adds does not depend on its companions |
| ``purity`` | params, batch, ``.grad``, buffers and global generators are unchanged |
| ``repeatability`` | the same input gives the same bits |
| ``no_collective`` | no collective, forward or backward |
| ``no_host_sync`` | no value is read on the host, forward or backward |
| ``homogeneity`` | dens times c divide the loss and the gradient by c; all sums times c: nothing |
| ``split_invariance`` | the same result for each cut into micro-steps and ranks |

Examples:
    >>> import torch
    >>> from numden.pure import LossTerms
    >>> def loss_fn(w, batch):
    ...     return LossTerms(((w - batch["x"]) ** 2).sum(), batch["x"].numel())
    >>> parts = [{"x": torch.tensor([1.0, 3.0])}, {"x": torch.tensor([0.5])}]
    >>> additivity(loss_fn, torch.tensor(2.0), parts, exact=True)
"""

from ._effect_laws import no_collective, no_host_sync, purity, repeatability
from ._mask_laws import mask_agreement
from ._sum_laws import (
    additivity,
    den_independence,
    emptiness,
    keyed_randomness,
    padding,
    permutation,
)
from ._window_laws import homogeneity, split_invariance

__all__ = [
    "additivity",
    "den_independence",
    "emptiness",
    "homogeneity",
    "keyed_randomness",
    "mask_agreement",
    "no_collective",
    "no_host_sync",
    "padding",
    "permutation",
    "purity",
    "repeatability",
    "split_invariance",
]
