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

__all__ = [
    "HALF",
    "Sums",
    "add_sums",
    "detach",
    "evaluate",
    "note_faults",
    "require_same",
    "sum_names",
    "wide",
    "wide_dtype",
]

HALF = (torch.float16, torch.bfloat16)


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


def wide(count: Any) -> Tensor:
    """A count, number or tensor, as a tensor of ``wide_dtype`` without a graph."""
    count = torch.as_tensor(count).detach()
    return count.to(wide_dtype(count.device))


def evaluate(loss_fn: LossFn, params: Any, batch: Any) -> Sums:
    """Call ``loss_fn`` and widen what it returns, still attached to the graph.

    Raises:
        TermStructureError: the result is no loss terms, or a sum has a dtype that cannot hold it.
    """
    terms, metrics = split_metrics(loss_fn(params, batch))
    _require_sums(terms)
    if not tree.leaves(terms.num):
        raise TermStructureError("loss_fn: must return at least one term, got LossTerms without.")
    for name, metric in metrics.items():
        _require_metric(name, metric)
    return tree.map(_widener(terms), Sums(terms, metrics))


def _widener(terms: LossTerms) -> Any:
    tensors = [leaf for leaf in tree.leaves(terms) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")

    def widen(leaf: Any) -> Tensor:
        if isinstance(leaf, Tensor):
            return leaf.to(wide_dtype(leaf.device))
        return torch.full((), leaf, dtype=wide_dtype(device), device=device)

    return widen


def _require_metric(name: str, metric: Any) -> None:
    if not isinstance(metric, LossTerms):
        raise TermStructureError(
            f"loss_fn: metrics are LossTerms by name, got metrics[{name!r}] of type "
            f"{type(metric).__name__}. Return its sum and its count, LossTerms(sum, count)."
        )
    _require_sums(metric, f"metrics[{name!r}].")


def _require_sums(terms: LossTerms, root: str = "") -> None:
    """Raise unless ``terms`` are sums that fit together, in dtypes that can hold them."""
    dens = den_per_num(terms)
    for part, refused in (("num", (torch.float16,)), ("den", HALF)):
        value = getattr(terms, part)
        for name, leaf in tree.named(value, root + part).items():
            _require_dtype(name, leaf, refused)
    names = tree.names(terms.num, f"{root}num")
    for name, num, den in zip(names, tree.leaves(terms.num), dens, strict=True):
        if _shape(den) not in ((), _shape(num)):
            raise TermStructureError(
                f"loss_fn: a den is a scalar or has the shape of its num, got a den of shape "
                f"{list(_shape(den))} for {name} of shape {list(_shape(num))}. Sum over tokens and "
                "rows."
            )


def _require_dtype(name: str, leaf: Any, refused: tuple[torch.dtype, ...]) -> None:
    if not isinstance(leaf, Tensor | int | float):
        raise TermStructureError(
            f"loss_fn: sums are tensors or numbers, got {name} of type {type(leaf).__name__}."
        )
    dtype = leaf.dtype if isinstance(leaf, Tensor) else None
    if dtype in refused or (dtype is not None and dtype.is_complex):
        raise TermStructureError(
            f"loss_fn: {name} must be summed in float32 or wider, got {dtype}, which "
            "overflows or rounds counts. Convert before the sum: x.float().sum()."
        )


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else ()


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


def require_same(first: Sums, other: Sums, where: Callable[[], str]) -> None:
    """Raise unless both have the same structure and shapes; ``where`` says who gave other."""
    if tree.structure(first) != tree.structure(other):
        raise TermStructureError(
            f"loss_fn: each micro-step must return the same terms, got {sum_names(other)} from "
            f"{where()} after {sum_names(first)}. Return a pair of zeros for a term that a batch "
            "lacks."
        )
    for place, (a, b) in enumerate(zip(tree.leaves(first), tree.leaves(other), strict=True)):
        if a.shape != b.shape:
            raise TermStructureError(
                "loss_fn: a sum keeps its shape from micro-step to micro-step, got "
                f"{sum_names(first)[place]} of shape {list(b.shape)} from {where()} after "
                f"{list(a.shape)}. Sum over tokens and rows."
            )


def sum_names(sums: Sums) -> list[str]:
    """The place of each sum, as ``num['ce']``, ``den``, ``metrics['accuracy'].num``."""
    return [name.removeprefix(".terms").removeprefix(".") for name in tree.names(sums)]


def note_faults(
    faults: Tensor | None, terms: LossTerms, step: Tensor | int, unheld: list[Tensor] | None = None
) -> Tensor:
    """The first micro-step at which each sum was bad, or -1: int64 ``[num_nums + 2 · num_dens]``.

    The leaves of num come first (not finite is bad), then those of den (negative is bad), then
    those of den once more (its gradient would be dropped, see ``unheld``).

    Args:
        faults: those of the micro-steps before, None at the first.
        terms: the sums of this micro-step.
        step: its number, from 0.
        unheld: a bool for each leaf of den; none is bad where not given.
    """
    bad = [(~torch.isfinite(num)).any() for num in tree.leaves(detach(terms.num))]
    negative = [(den < 0).any() for den in tree.leaves(detach(terms.den))]
    bad += [*negative, *(unheld or [torch.zeros_like(each) for each in negative])]
    now = torch.where(torch.stack(bad), step, -1)
    return now if faults is None else torch.where(faults >= 0, faults, now)
