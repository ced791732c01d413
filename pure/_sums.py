"""What a micro-step adds up: its loss terms and metrics, checked, in float64.

Everything here runs in each micro-step, so nothing reads a value on the host: what is wrong with
a *value* is noted on the device (``Faults``) and read once per window.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree
from .terms import LossFn, LossTerms, Metrics, TermStructureError, den_per_num, split_metrics

__all__ = ["Sums", "add_sums", "detach", "evaluate", "note_faults", "wide_dtype"]

_HALF = (torch.float16, torch.bfloat16)


class Sums(NamedTuple):
    """The sums of a micro-step, of a window, or of all ranks.

    Attributes:
        terms: the loss terms.
        metrics: what is reported beside them, by name.
    """

    terms: LossTerms
    metrics: Metrics


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device: counts are exact to 2^53 in float64, which MPS lacks."""
    return torch.float32 if device.type == "mps" else torch.float64


def evaluate(loss_fn: LossFn, params: Any, batch: Any) -> Sums:
    """Call ``loss_fn`` and widen what it returns, still attached to the graph.

    Raises:
        TermStructureError: the result is no loss terms, or a sum has a dtype that cannot hold it.
    """
    terms, metrics = split_metrics(loss_fn(params, batch))
    den_per_num(terms)
    for name, metric in metrics.items():
        _require_terms(name, metric)
    _require_dtypes(terms)
    return tree.map(_widener(terms), Sums(terms, metrics))


def _widener(terms: LossTerms) -> Any:
    tensors = [leaf for leaf in tree.leaves(terms) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")

    def widen(leaf: Any) -> Tensor:
        if isinstance(leaf, Tensor):
            return leaf.to(wide_dtype(leaf.device))
        return torch.full((), leaf, dtype=wide_dtype(device), device=device)

    return widen


def _require_terms(name: str, metric: Any) -> None:
    if not isinstance(metric, LossTerms):
        raise TermStructureError(
            f"loss_fn: metrics are LossTerms by name, got metrics[{name!r}] of type "
            f"{type(metric).__name__}. Return its sum and its count, LossTerms(sum, count)."
        )
    den_per_num(metric)


def _require_dtypes(terms: LossTerms) -> None:
    for part, refused in (("num", (torch.float16,)), ("den", _HALF)):
        value = getattr(terms, part)
        for name, leaf in zip(tree.names(value, part), tree.leaves(value), strict=True):
            if not isinstance(leaf, Tensor | int | float):
                raise TermStructureError(
                    f"loss_fn: sums are tensors or numbers, got {name} of type "
                    f"{type(leaf).__name__}."
                )
            dtype = leaf.dtype if isinstance(leaf, Tensor) else None
            if dtype in refused or (dtype is not None and dtype.is_complex):
                raise TermStructureError(
                    f"loss_fn: {name} must be summed in float32 or wider, got {dtype}, which "
                    "overflows or rounds counts. Convert before the sum: x.float().sum()."
                )


def detach(sums: Any) -> Any:
    """The same values without their graph."""
    return tree.map(Tensor.detach, sums)


def add_sums(total: Sums | None, sums: Sums, step: Tensor | int) -> Sums:
    """Add the detached sums of a micro-step to those before it.

    Raises:
        TermStructureError: the micro-step returned other terms or other shapes.
    """
    sums = detach(sums)
    if total is None:
        return tree.map(Tensor.clone, sums)
    require_same(total, sums, lambda: f"micro-step {int(step)}")
    return tree.map(torch.add, total, sums)


def require_same(first: Any, other: Any, where: Callable[[], str]) -> None:
    """Raise unless both trees have the same structure and shapes; ``where`` says who gave other."""
    names, got = tree.names(first), tree.names(other)
    if tree.structure(first) != tree.structure(other):
        raise TermStructureError(
            f"loss_fn: each micro-step must return the same terms, got {got} from {where()} after "
            f"{names}. Return a pair of zeros for a term that a batch lacks."
        )
    for name, a, b in zip(names, tree.leaves(first), tree.leaves(other), strict=True):
        if a.shape != b.shape:
            raise TermStructureError(
                f"loss_fn: a sum keeps its shape from micro-step to micro-step, got {name} of "
                f"shape {list(b.shape)} from {where()} after {list(a.shape)}. Sum over tokens and rows."
            )


def note_faults(faults: Tensor | None, terms: LossTerms, step: Tensor | int) -> Tensor:
    """The first micro-step at which each sum was bad, or -1: int64 ``[numbers of leaves]``.

    The leaves of num come first (not finite is bad), then those of den (negative is bad).
    """
    bad = [(~torch.isfinite(num)).any() for num in tree.leaves(detach(terms.num))]
    bad += [(den < 0).any() for den in tree.leaves(detach(terms.den))]
    now = torch.where(torch.stack(bad), step, -1)
    return now if faults is None else torch.where(faults >= 0, faults, now)
