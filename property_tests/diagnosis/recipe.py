"""How a trainer arrives at its numbers, as data: the right recipe, and any wrong one.

A recipe says for each term what is summed, what it is divided by, and which factors are left over.
``evaluator`` works out what it gives on the facts of a world.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .facts import DEN, Facts

__all__ = ["Finish", "Recipe", "TermRecipe", "evaluator", "finished"]


@dataclass(frozen=True)
class TermRecipe:
    """How one term is normalised. The defaults are right.

    Attributes:
        nums: how the batch is read, a key of ``Facts.nums``.
        count: what is counted, a key of ``Facts.counts``.
        term: the term whose count it is; its own if None.
        over: what the count is summed over: ``"window"``, ``"micro-step"``, ``"last micro-step"``,
            ``"generation"``, ``"nothing"`` (no division).
        ranks: whose counts: ``"all"`` or ``"own"``.
        weigh: the count by which the quotients are averaged; not at all if empty.
        adds: which micro-steps arrive: ``"all"``, ``"last"``, ``"but last"``, ``"but first n"``,
            ``"but first half"``, ``"whole windows"``, ``"unreduced last"`` (that of the first rank
            alone), ``"unreduced last, not averaged"`` (while the others were, over ranks).
        heard: which ranks are: ``"all"``, ``"first"`` or ``"none"``.
        nan: where a count of zero gives NaN: in a ``"micro-step"``, on a ``"rank"``, or nowhere.
        rounding: the dtype that holds the count.
        guarded: whether a count that is not positive is taken for 1, as trainers often do.
        decay: a size by which all that is accumulated is divided at each further micro-step.
        factor: sizes and their powers; sizes are ``"micro-steps"`` of the rank, ``"accumulation"``,
            ``"ranks"``, a mesh axis, ``"processes"``, ``"rows"`` and ``"columns"`` of the
            micro-batch, ``"total of <term>"``, ``"weight of <term>"``, ``"two"``.
    """

    nums: str = ""
    count: str = DEN
    term: int | None = None
    over: str = "window"
    ranks: str = "all"
    weigh: str = ""
    adds: str = "all"
    heard: str = "all"
    nan: str = ""
    rounding: str = ""
    guarded: bool = True
    decay: str = ""
    factor: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How the gradient and the loss of a window are made. The defaults are right.

    Attributes:
        terms: one recipe for each term.
        clip: when the gradient is clipped: at the end (empty), ``"never"``, ``"each micro-step"``,
            ``"accumulated"`` (all that is there, after each micro-step), ``"each rank"``,
            ``"early"`` (before a division by ``clip_size``), ``"replicas"`` (the norm counts them).
        clip_size: the size that belongs to it, or a number.
        accumulate: the dtype of the sum over micro-steps; that of the gradient if empty.
        update: ``"once"``, ``"each micro-step"``, or ``"where there is a gradient"``.
    """

    terms: tuple[TermRecipe, ...]
    clip: str = ""
    clip_size: str | float = ""
    accumulate: str = ""
    update: str = "once"


class Finish(NamedTuple):
    """What happens to a right gradient before it is seen.

    Attributes:
        max_norm: its global norm is clipped to that.
        update: ``(gradient, change) -> change``: the change of the params after an optimizer's
            update from where an earlier change has led, each as one vector of all leaves.
    """

    max_norm: float | None = None
    update: Callable[[Tensor, Tensor], Tensor] | None = None


def finished(grads: Tensor, finish: Finish) -> Tensor:
    """What is seen of a right gradient: clipped, and as the update that is made of it."""
    if finish.max_norm is not None:
        grads = _clipped(grads, finish.max_norm)
    return _updated(grads, finish)


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluator(facts: Facts, finish: Finish = Finish()) -> Callable[[Recipe], Tensor]:  # noqa: B008
    """What recipes give on ``facts``: the loss, then the gradient (or update), as one vector.

    Examples:
        >>> from numden.property_tests.diagnosis.facts import facts_of
        >>> from numden.property_tests.worlds.problems import token_batch, tokens
        >>> from numden.property_tests.worlds.world import World
        >>> world = World([[token_batch([[8.0]]), token_batch([[2.0, 2.0, 2.0]])]])
        >>> value = evaluator(facts_of(tokens(), world))
        >>> value(Recipe((TermRecipe(),))).tolist()
        [3.5, 3.5]
        >>> mean_of_means = TermRecipe(over="micro-step", factor=(("micro-steps", -1),))
        >>> value(Recipe((mean_of_means,))).tolist()
        [5.0, 5.0]
    """
    addends: dict[tuple[int, TermRecipe], Tensor] = {}
    totals: dict[tuple[int, TermRecipe], Tensor] = {}

    def addends_of(index: int, term: TermRecipe) -> Tensor:
        if (index, term) not in addends:
            scale = (_coefficients(term, index, facts) * facts.weights[index]).unsqueeze(-1)
            nums = facts.nums[term.nums][index]
            addends[index, term] = torch.where(scale == 0, 0.0, scale * nums)
        return addends[index, term]

    def total_of(index: int, term: TermRecipe) -> Tensor:
        if (index, term) not in totals:
            totals[index, term] = addends_of(index, term).sum((0, 1))
        return totals[index, term]

    def value(recipe: Recipe) -> Tensor:
        plain = not (
            recipe.accumulate or recipe.clip in _PIECEWISE or recipe.update == "each micro-step"
        )
        if plain:
            total = torch.stack([total_of(i, term) for i, term in enumerate(recipe.terms)]).sum(0)
            return _finished(total, recipe, facts, finish)
        parts = torch.stack([addends_of(i, term) for i, term in enumerate(recipe.terms)]).sum(0)
        return _piecewise(parts, recipe, facts, finish)

    return value


_PIECEWISE = ("each micro-step", "accumulated", "each rank")


def _finished(total: Tensor, recipe: Recipe, facts: Facts, finish: Finish) -> Tensor:
    """The last steps on a whole gradient: clipping, and the optimizer's update."""
    loss, grads = total[:1], total[1:]
    if finish.max_norm is not None and recipe.clip not in ("never", *_PIECEWISE):
        size = _clip_size(recipe, facts)
        if recipe.clip == "replicas":
            grads = _clipped(grads, finish.max_norm, norm_factor=size**0.5)
        else:
            grads = _clipped(grads * size, finish.max_norm) / size
    change = _updated(grads, finish)
    if recipe.update == "where there is a gradient":
        change = torch.where(grads == 0, 0.0, change)
    return torch.cat([loss, change])


def _piecewise(parts: Tensor, recipe: Recipe, facts: Facts, finish: Finish) -> Tensor:
    """Recipes that do something to each micro-step, or on each rank, ``parts`` ``[R, M, D]``."""
    loss, grads = parts[..., 0].sum().reshape(1), parts[..., 1:]
    norm = finish.max_norm
    if recipe.update == "each micro-step" and finish.update is not None:
        change = torch.zeros_like(grads[0, 0])
        for step in grads.sum(0):
            step = step if norm is None else _clipped(step, norm)
            change = finish.update(step, change)
        return torch.cat([loss, change])
    if recipe.accumulate:
        dtype = _DTYPES[recipe.accumulate]
        total = torch.zeros_like(grads[:, 0], dtype=dtype)
        for step in grads.unbind(1):
            total = total + step.to(dtype)
        return _finished(torch.cat([loss, total.double().sum(0)]), recipe, facts, finish)
    if norm is not None and recipe.clip == "each rank":
        grads = torch.stack([_clipped(rank.sum(0), norm) for rank in grads]).sum(0)
    elif norm is not None and recipe.clip == "each micro-step":
        grads = torch.stack([_clipped(step, norm) for step in grads.sum(0)]).sum(0)
    elif norm is not None:
        total = torch.zeros_like(grads[0, 0])
        for step in grads.sum(0):
            total = _clipped(total + step, norm)
        grads = total
    else:
        grads = grads.sum((0, 1))
    return torch.cat([loss, _updated(grads, finish)])


def _updated(grads: Tensor, finish: Finish) -> Tensor:
    return grads if finish.update is None else finish.update(grads, torch.zeros_like(grads))


def _clipped(grads: Tensor, max_norm: float, *, norm_factor: float = 1.0) -> Tensor:
    norm = torch.linalg.vector_norm(grads) * norm_factor
    return grads * (max_norm / norm).clamp(max=1.0) if bool(norm > 0) else grads


def _clip_size(recipe: Recipe, facts: Facts) -> float:
    if isinstance(recipe.clip_size, str):
        return float(_size(recipe.clip_size, 0, facts).max()) if recipe.clip_size else 1.0
    return recipe.clip_size


def _coefficients(term: TermRecipe, index: int, facts: Facts) -> Tensor:
    """What the nums of each micro-step are multiplied by, ``[R, M]``."""
    count = facts.counts[term.count][index if term.term is None else term.term]
    den = _rounded(_den(term, index, count, facts), term.rounding)
    guarded = torch.where(den > 0, den, 1.0) if term.guarded else den
    scale = (1 / guarded).expand_as(count) * facts.present
    if term.weigh:
        weight = facts.counts[term.weigh][index]
        scale = scale * weight / weight.sum().clamp(min=1e-300)
    for size, power in term.factor:
        scale = scale * _size(size, index, facts) ** power
    if term.decay:
        steps = facts.present.flip(1).cumsum(1).flip(1) - 1  # how many come after
        scale = scale * _size(term.decay, index, facts) ** -steps.clamp(min=0).double()
    scale = scale * _arrives(term.adds, facts)
    if term.heard != "all":
        scale = scale * (_first_rank(facts) & (term.heard == "first"))
    return torch.where(_is_empty(term.nan, index, facts), torch.nan, scale) if term.nan else scale


def _is_empty(part: str, index: int, facts: Facts) -> Tensor:
    own = facts.counts[DEN][index]
    if part == "micro-step":
        return (own == 0) & facts.present
    return (own.sum(1, keepdim=True) == 0) & facts.present.any(1, keepdim=True)


def _den(term: TermRecipe, index: int, count: Tensor, facts: Facts) -> Tensor:
    if term.over == "nothing":
        return torch.ones_like(count)
    if term.over == "micro-step":
        return count if term.ranks == "own" else count.sum(0, keepdim=True)
    if term.over == "last micro-step":
        count = count * _last(facts)
    if term.over == "generation":
        return count.sum() + facts.rest[term.count][index]
    return count.sum(1, keepdim=True) if term.ranks == "own" else count.sum()


def _size(name: str, index: int, facts: Facts) -> Tensor:
    if name == "micro-steps":
        return facts.present.sum(1, keepdim=True).double()
    if name == "rows":
        return facts.counts["len(batch)"][index].clamp(min=1)
    if name.startswith("total of "):
        return facts.counts[DEN][facts.terms.index(name.removeprefix("total of "))].sum()
    if name == "columns":
        return _columns(facts)
    if name.startswith("weight of "):
        return facts.weights[facts.terms.index(name.removeprefix("weight of "))]
    return torch.tensor(2.0 if name == "two" else facts.sizes[name], dtype=torch.float64)


def _columns(facts: Facts) -> Tensor:
    """The padded length of each micro-batch, ``[R, M]``; 1 where a batch has no columns."""
    positions = [code for code, kind in facts.kinds.items() if kind == "positions"]
    rows = facts.counts["len(batch)"][0].clamp(min=1)
    return (facts.counts[positions[0]][0] / rows).clamp(min=1) if positions else rows / rows


def _arrives(adds: str, facts: Facts) -> Tensor:
    place = torch.arange(facts.present.shape[1])
    if adds in ("last", "but last"):
        return _last(facts) == (adds == "last")
    if adds.startswith("unreduced last"):
        own = _first_rank(facts) & _last(facts)
        size = facts.sizes["ranks"] if adds.endswith("not averaged") else 1
        return own * size + ~_last(facts)
    if adds == "whole windows":
        return facts.present.sum(1, keepdim=True) == facts.sizes["accumulation"]
    if adds == "but first half":
        return place >= facts.present.sum(1, keepdim=True) // 2
    if adds.startswith("but first "):
        return place >= int(adds.removeprefix("but first "))
    return torch.ones_like(facts.present)


def _first_rank(facts: Facts) -> Tensor:
    return (torch.arange(facts.present.shape[0]) == 0).unsqueeze(1)


def _last(facts: Facts) -> Tensor:
    place = torch.arange(facts.present.shape[1])
    return facts.present & (place == facts.present.sum(1, keepdim=True) - 1)


def _rounded(den: Tensor, dtype: str) -> Tensor:
    return den.to(_DTYPES[dtype]).double() if dtype else den
