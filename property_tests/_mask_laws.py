"""The law of masks: numerator and denominator leave out the same."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..pure import tree
from ..pure.terms import LossFn, den_per_num
from .evaluation import Forward, evaluate, forward
from .mask_fields import MaskField, mask_fields, mask_out
from .violation import Difference, LawViolation

__all__ = ["den_of_nums", "mask_agreement", "other_params"]


def mask_agreement(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    *,
    fields: Sequence[MaskField] | None = None,
    places: Sequence[tuple[int, ...]] | None = None,
) -> None:
    """Numerator and denominator come from one mask. For each field that is recognised as a mask:

    - a place that the den counts matters to the num: if masking it changes the den, it changes
      the num or its gradient, at ``params`` or at some of five other points;
    - where masking all of it makes the num vanish, it changes the den. A den of at most 1 is left
      to ``emptiness``, which tells a clamped count.

    Whatever weights places have, this holds: that a num changes where the den does not is allowed,
    since a mean over samples counts a sample as long as one of its tokens is left. A num that is 0
    with all its gradients says nothing.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors with rows on the leading axis.
        fields: the masks; those of ``mask_fields(batch)`` where not given.
        places: indices ``(row,)`` or ``(row, column)`` to mask, one at a time; all where not given.

    Raises:
        LawViolation: a place is counted and not summed, or what is masked is counted.

    Examples:
        >>> from numden.pure import LossTerms
        >>> def unshifted_count(w, batch):
        ...     scored = batch["mask"].clone()
        ...     scored[:, 0] = False
        ...     return LossTerms((w * batch["x"] * scored).sum(), batch["mask"].sum())
        >>> batch = {"x": torch.ones(1, 2), "mask": torch.ones(1, 2, dtype=torch.bool)}
        >>> mask_agreement(unshifted_count, torch.tensor(1.0), batch)
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: mask_agreement: num and den must come ...
          num without batch['mask'][0, 0]: expected a change, as den goes from 2 to 1, got none
        Usual cause: ...
    """
    fields = mask_fields(batch) if fields is None else fields
    wrong = [
        difference
        for field in fields
        for difference in (
            *_still_counted(loss_fn, params, batch, field),
            *_counted_in_vain(loss_fn, params, batch, field, places),
        )
    ]
    if wrong:
        raise LawViolation(
            "mask_agreement",
            "num and den must come from one mask.",
            wrong,
            "a count of padding or prompt, a count before the labels are shifted, or a mask that "
            "one of the two lacks. Make one mask, sum the losses under it and sum it.",
        )


def den_of_nums(passed: Forward) -> dict[str, list[str]]:
    """The names of the numerators over each denominator, by its name."""
    terms = passed.terms
    den_per_num(terms)  # Refuses a den that does not fit.
    dens = tree.unflatten(tree.structure(terms.den), list(tree.names(terms.den, "den")))
    groups: dict[str, list[str]] = {}
    per_num = tree.broadcast_prefix(dens, terms.num)
    for den, num in zip(per_num, tree.names(terms.num, "num"), strict=True):
        groups.setdefault(den, []).append(num)
    return groups


def other_params(params: Any, scale: float, noise: float, seed: int = 0) -> Any:
    """A copy of ``params``, a tree or a module, times ``scale`` plus normal ``noise``."""
    generator = torch.Generator().manual_seed(seed)

    def moved(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        draw = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        return leaf.detach() * scale + noise * draw.to(leaf)

    if not isinstance(params, nn.Module):
        return tree.map(moved, params)
    module = copy.deepcopy(params)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(moved(parameter))
    return module


def _still_counted(
    loss_fn: LossFn, params: Any, batch: Any, field: MaskField
) -> Iterator[Difference]:
    before = evaluate(loss_fn, params, batch)
    after = _values_if_any(loss_fn, params, mask_out(batch, [field]))
    if after is None:
        return
    for den, nums in _groups(loss_fn, params, batch).items():
        vanished = _parts(after, nums) and not any(map(_any, _parts(after, nums)))
        unmoved = torch.equal(before[den], after[den]) and bool((after[den].abs() > 1).any())
        if vanished and unmoved and any(map(_any, _parts(before, nums))):
            yield Difference(f"{den} with all of {field.name} masked", "0", after[den])


def _counted_in_vain(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    field: MaskField,
    places: Sequence[tuple[int, ...]] | None,
) -> Iterator[Difference]:
    leaf = tree.leaves(batch)[field.leaf]
    before = evaluate(loss_fn, params, batch)
    groups = _groups(loss_fn, params, batch)
    every = [tuple(map(int, place)) for place in (leaf != field.neutral).nonzero()]
    for place in every if places is None else places:
        place = place[: leaf.ndim]
        if any(i >= size for i, size in zip(place, leaf.shape, strict=True)):
            continue  # Fields may differ in width.
        after = _values_if_any(loss_fn, params, mask_out(batch, [field], place))
        if after is None:
            continue
        for den, nums in groups.items():
            if torch.equal(before[den], after[den]) or _moved(before, after, nums):
                continue
            if any(map(_any, _parts(before, nums))) and not _moves_elsewhere(
                loss_fn, params, batch, field, place, nums
            ):
                change = f"{den} goes from {before[den].item()} to {after[den].item()}"
                name = f"{' and '.join(nums)} without {field.name}[{', '.join(map(str, place))}]"
                yield Difference(name, f"a change, as {change}", "none")


def _moves_elsewhere(
    loss_fn: LossFn, params: Any, batch: Any, field: MaskField, place: Any, nums: list[str]
) -> bool:
    """Whether the place matters at other params and inputs.

    At a point a loss can be flat and 0, as a hinge is where the margin is kept; so small params,
    negative ones and large ones are tried.
    """
    masks = {each.leaf for each in mask_fields(batch)} | {field.leaf}
    for seed, (scale, noise) in enumerate([(0.01, 0), (-1, 0.1), (1, 1), (-1, 1), (0, 3)]):
        there = other_params(params, scale, noise, seed)
        leaves, structure = tree.flatten(batch)
        inputs = tree.leaves(other_params(leaves, 1, 0.25, seed))
        leaves = [leaf if i in masks else inputs[i] for i, leaf in enumerate(leaves)]
        moved = tree.unflatten(structure, leaves)
        before = _values_if_any(loss_fn, there, moved)
        after = _values_if_any(loss_fn, there, mask_out(moved, [field], place))
        if before is None or after is None or _moved(before, after, nums):
            return True
    return False


def _values_if_any(loss_fn: LossFn, params: Any, batch: Any) -> dict[str, Tensor] | None:
    """The values; None where the function refuses a batch that is masked or moved."""
    try:
        return evaluate(loss_fn, params, batch)
    except Exception:
        return None


def _groups(loss_fn: LossFn, params: Any, batch: Any) -> dict[str, list[str]]:
    return den_of_nums(forward(loss_fn, params, batch))


def _parts(values: dict[str, Tensor], nums: list[str]) -> list[Tensor]:
    """The numerators and their gradients."""
    starts = tuple(f"gradient of {num} by " for num in nums)
    return [value for name, value in values.items() if name in nums or name.startswith(starts)]


def _moved(before: dict[str, Tensor], after: dict[str, Tensor], nums: list[str]) -> bool:
    pairs = zip(_parts(before, nums), _parts(after, nums), strict=True)
    return any(_differ(a.double(), b.double(), a) for a, b in pairs)


def _differ(a: Tensor, b: Tensor, kind: Tensor) -> bool:
    if not a.numel() or torch.equal(a, b):
        return False
    # Sums that are made by multiplying a mean with its count are off by a rounding or two.
    eps = torch.finfo(kind.dtype).eps if kind.is_floating_point() else 0.0
    size = torch.maximum(a.abs().max(), b.abs().max())
    return not bool(((a - b).abs() <= 16 * eps * size).all())


def _any(value: Tensor) -> bool:
    return bool((value != 0).any())
