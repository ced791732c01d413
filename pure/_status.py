"""What is wrong with a window, decided from one host read at its end."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import tree
from .plans import PlanError
from .terms import LossTerms, TermStructureError

__all__ = [
    "EmptyWindowError",
    "NonFiniteLossError",
    "OnEmpty",
    "Status",
    "check",
    "require_on_empty",
]

OnEmpty = Literal["raise", "zero", "skip"]

# A cotangent that fits leaves float64 rounding (1e-15); float32 objectives leave 1e-7.
_FITS = 1e-5
# Dens that are float32 weights, summed twice in float64, agree to the rounding of one float32.
_DENS_AGREE = 1e-6
# A loss function that repeats itself repeats its sums up to the order of a kernel's additions.
_REPEATS = 1e-4


class EmptyWindowError(ValueError):
    """A total den is zero, negative or not finite: there is nothing to average over."""


class NonFiniteLossError(ValueError):
    """A num is NaN or infinite. Nothing was updated."""


class Status(NamedTuple):
    """Device scalars and vectors that say whether a window is good; read together.

    Attributes:
        dens: the total dens, ``[number of den elements]``.
        faults: how many ranks saw each sum bad in a micro-step, ``[number of leaves]``; a reduction
            may append what else calls for reports.
        local_faults: the first such micro-step on this rank, or -1, ``[number of leaves]``.
        finite: whether the loss and its cotangent are finite at the totals.
        misfit: the relative remainder of the cotangent that the plan's directions cannot express.
        dens_apart: how far the dens are from those of ``den_fn``, relative; 0 without one.
    """

    dens: Tensor
    faults: Tensor
    local_faults: Tensor
    finite: Tensor
    misfit: Tensor
    dens_apart: Tensor


def require_on_empty(on_empty: str) -> None:
    """Raise unless ``on_empty`` is one of the three policies."""
    if on_empty not in ("raise", "zero", "skip"):
        raise ValueError(f"window: on_empty must be 'raise', 'zero' or 'skip', got {on_empty!r}.")


def sound(status: Status, terms: LossTerms, unrepeated: Tensor | None = None) -> Tensor:
    """Whether ``check`` would raise nothing, decided on the device."""
    dens_good = ((status.dens > 0) & torch.isfinite(status.dens)).all()
    # What a reduction appended is about ranks, one of which may just have had no micro-step.
    faults = status.faults[: len(tree.leaves(terms.num)) + 2 * len(tree.leaves(terms.den))]
    good = dens_good & ~(faults > 0).any() & status.finite
    good = good & (status.misfit <= _FITS) & (status.dens_apart <= _DENS_AGREE)
    return good if unrepeated is None else good & (unrepeated <= _REPEATS)


def check(
    status: Status,
    terms: LossTerms,
    plan: str,
    on_empty: OnEmpty,
    reports: Callable[[str | None], Sequence[tuple[int | None, str | None]]],
) -> None:
    """Read ``status`` and raise what it says, the same error on each rank.

    Raises:
        NonFiniteLossError: a num was not finite in some micro-step, or the objective at the totals.
        TermStructureError: a den was negative, or disagrees with ``den_fn``.
        EmptyWindowError: a total den is not positive and ``on_empty`` is "raise".
        PlanError: the plan cannot express the objective at these totals.
    """
    parts = [part.detach().double().reshape(-1) for part in status]
    flat = torch.cat([part.to(parts[0].device) for part in parts]).tolist()
    read = iter(flat)
    dens, faults, local, finite, misfit, apart = (
        [next(read) for _ in range(part.numel())] for part in parts
    )
    unfit = None
    if misfit[0] > _FITS:
        unfit = (
            f"plan {plan!r}: at these totals the cotangent of the objective has a direction that "
            f"made-up totals did not show (relative remainder {misfit[0]:.3g}). Use plan='replay'."
        )
    _check_faults(faults, local, terms, reports, unfit)
    empty = _empty_dens(dens, terms)
    if empty and on_empty == "raise":
        raise EmptyWindowError(
            f"window: a total den must be positive and finite, got {', '.join(empty)}. "
            "Nothing in the window is supervised: build windows with at least one supervised "
            "token, or say on_empty='zero' or on_empty='skip'."
        )
    if not finite[0] and not empty:
        raise NonFiniteLossError(
            "window: the objective and its derivative must be finite at totals that are, and "
            "are not. Nothing was updated. Look for a root, a logarithm or a division in it."
        )
    if apart[0] > _DENS_AGREE:
        raise TermStructureError(
            "window: the dens that loss_fn returned do not sum to those that den_fn counted "
            f"(relative difference {apart[0]:.3g}). Let both use one mask."
        )
    if unfit:
        raise PlanError(unfit)


def require_repeated(apart: Tensor) -> None:
    """Raise when a replay's sums are ``apart`` from those of its first pass, relatively.

    Raises:
        PlanError: they are, so that the cotangent belongs to other sums than the gradient.
    """
    if float(apart) > _REPEATS:
        raise PlanError(
            "plan 'replay': loss_fn gave other sums in the second pass (relative difference "
            f"{float(apart):.3g}). Draw random numbers from keys in the batch, or use 'columns'."
        )


def _check_faults(
    faults: list[float],
    local: list[float],
    terms: LossTerms,
    reports: Callable[[str | None], Sequence[tuple[int | None, str | None]]],
    unfit: str | None,
) -> None:
    if not any(faults):
        return
    nums, dens = tree.names(terms.num, "num"), tree.names(terms.den, "den")
    said = [f"{name} is not finite" for name in nums]
    said += [f"{name} is negative" for name in dens]
    said += [f"{name} depends on params, unlike in the first," for name in dens]
    # A reduction may have appended to the faults, so that there are more of them than sums.
    own = [
        f"{text} in micro-step {int(step)}"
        for text, step in zip(said, local, strict=False)
        if step >= 0
    ]
    found = reports("; ".join(own) or unfit)
    if not any(faults[: len(said)]):  # a rank without micro-steps asked what the others know
        if heard := [text for _, text in found if text]:
            raise PlanError(heard[0])
        return
    text = "; ".join(
        f"{said}{'' if rank is None else f' on rank {rank}'}" for rank, said in found if said
    )
    if any(faults[: len(nums)]):
        raise NonFiniteLossError(
            f"window: {text}. Nothing was updated. Look at this micro-batch, or mask it out."
        )
    if any(faults[len(nums) : len(nums) + len(dens)]):
        raise TermStructureError(f"window: {text}. A den is a count or a sum of weights >= 0.")
    raise PlanError(
        f"plan 'columns': {text}. No buffer holds its gradient: detach it, or use plan='replay'."
    )


def _empty_dens(dens: list[float], terms: LossTerms) -> list[str]:
    names = tree.names(terms.den, "den")
    sizes = [leaf.numel() for leaf in tree.leaves(terms.den)]
    per_element = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    return [
        f"{name} = {den:g}"
        for name, den in zip(per_element, dens, strict=True)
        if not 0 < den < float("inf")
    ]
