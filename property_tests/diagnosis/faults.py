"""The catalogue of what goes wrong with the scale of a loss, each as a change of the right recipe.

A wrong formula is the right one with a few faults. So the catalogue holds single faults, and a
diagnosis looks for the smallest set of them that gives the numbers seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .facts import COUNTED_ROWS, DEN, ROOTS, Facts, is_of_den
from .recipe import Recipe, TermRecipe

__all__ = ["Fault", "apply", "catalogue"]


class Fault(NamedTuple):
    """One way to be wrong.

    Attributes:
        name: the name of the fault.
        says: what is computed, in plain words.
        remedy: what to do.
        change: fields of ``TermRecipe`` (of ``Recipe``, if ``whole``) and their wrong values;
            factors are multiplied.
        whole: whether it concerns the gradient as a whole, and no term of its own.
        cost: how far-fetched it is; diagnoses are tried in the order of their total cost.
    """

    name: str
    says: str
    remedy: str
    change: dict[str, Any]
    whole: bool = False
    cost: int = 2


_DIVIDE_ONCE = "Sum nums and dens over all micro-steps and ranks, then divide once."
_SUM_RANKS = (
    "Let ranks add (SUM) addends that are divided by the total count; with an average over ranks, "
    "multiply by its size, which is that of the data axes alone."
)


def apply(recipe: Recipe, fault: Fault, terms: Sequence[int]) -> Recipe | None:
    """``recipe`` with ``fault`` in the given terms; None if another fault set the same field."""
    if fault.whole:
        return _changed(recipe, fault.change)
    changed = list(recipe.terms)
    for index in terms:
        term = _changed(changed[index], fault.change)
        if term is None:
            return None
        changed[index] = term
    if any(term.over == "nothing" and _has_a_count(term) for term in changed):
        return None
    return replace(recipe, terms=tuple(changed))


def _has_a_count(term: TermRecipe) -> bool:
    """Whether something is said of a count; where nothing is divided, it would mean nothing."""
    return replace(TermRecipe(), **{f: getattr(term, f) for f in _OF_COUNT}) != TermRecipe()


_OF_COUNT = ("count", "term", "ranks", "rounding")


def _changed(recipe: Any, change: dict[str, Any]) -> Any:
    """A recipe (of a term) with ``change``; None where a field has been changed already."""
    right = Recipe(()) if isinstance(recipe, Recipe) else TermRecipe()
    fields = dict(change)
    factor = fields.pop("factor", {})
    if isinstance(recipe, TermRecipe) and factor:
        powers = dict(recipe.factor)
        for size, power in factor.items():
            powers[size] = powers.get(size, 0) + power
        fields["factor"] = tuple(sorted((s, p) for s, p in powers.items() if p))
    if any(getattr(recipe, name) != getattr(right, name) for name in fields if name != "factor"):
        return None
    return replace(recipe, **fields)


def catalogue(facts: Facts, *, clips: bool = False, updates: bool = False) -> list[Fault]:
    """All faults that can show in worlds like that of ``facts``, the likeliest first.

    Args:
        facts: of some world; its counts, terms and mesh axes matter, its numbers do not.
        clips: whether the gradient is clipped.
        updates: whether an optimizer's update is compared.
    """
    return [
        *_parts(facts),
        *_counts(facts),
        *_factors(facts),
        *_reductions(facts),
        *_empties(facts),
        *_precision(),
        *(_clipping(facts) if clips else ()),
        *(_updating() if updates else ()),
    ]


def _parts(facts: Facts) -> Iterator[Fault]:
    """Divided by the count of a part, and what is then done with the quotients."""
    yield Fault(
        "mean of micro-step means",
        "each micro-step is divided by its own count and the quotients are averaged, so that a "
        "token in a short micro-step weighs more",
        f"{_DIVIDE_ONCE} The count of the window must be known before the first backward, or the "
        "gradient be divided after the last.",
        {"over": "micro-step", "factor": {"micro-steps": -1}},
        cost=1,
    )
    yield Fault(
        "mean of rank means",
        "each rank is divided by its own count and the quotients are averaged over ranks",
        f"Sum the count over ranks too. {_SUM_RANKS}",
        {"ranks": "own", "factor": {"ranks": -1}},
        cost=1,
    )
    yield Fault(
        "missing division by the number of micro-steps",
        "each micro-step is divided by its own count and the quotients are added, so that the "
        "gradient grows with the number of micro-steps",
        _DIVIDE_ONCE,
        {"over": "micro-step"},
        cost=1,
    )
    yield Fault(
        "missing division by the number of ranks",
        "each rank divides by its own (local) count, and the quotients are added over ranks",
        "Sum the count over ranks before dividing.",
        {"ranks": "own"},
        cost=1,
    )
    yield Fault(
        "divided by the configured number of micro-steps",
        "the quotients of the micro-steps are added and divided by the configured number of "
        "micro-steps, also in a last window that has fewer",
        _DIVIDE_ONCE,
        {"over": "micro-step", "factor": {"accumulation": -1}},
    )
    yield Fault(
        "count of the last micro-step",
        "the sum over the window is divided by the count of the last micro-step alone",
        _DIVIDE_ONCE,
        {"over": "last micro-step"},
    )
    yield Fault(
        "count of the generation batch",
        "the sum over the window is divided by the count of all that was generated, of which the "
        "window is a part",
        "Divide by the count of the micro-batches that this optimizer step uses.",
        {"over": "generation"},
    )
    yield Fault(
        "no division at all",
        "the sum enters undivided, so that it grows with the number of tokens",
        _DIVIDE_ONCE,
        {"over": "nothing"},
    )
    choose = (
        "Choose one weighting of tokens, for the sum and the count, and give that as reference."
    )
    for count in ("len(batch)", COUNTED_ROWS):
        yield Fault(
            "mean of sample means",
            "each sample (row) is divided by its own count and the quotients are averaged",
            choose,
            {"nums": "row means", "count": count},
        )
    yield Fault(
        "samples weighted by roots",
        "each sample (row) is divided by the root of its count, and the sum by that of the roots",
        choose,
        {"nums": "row roots", "count": ROOTS},
    )
    for code in _other_counts(facts):
        yield Fault(
            "micro-step means weighted by another count",
            f"each micro-step is divided by its count, and the quotients are averaged with the "
            f"weights {code}",
            _DIVIDE_ONCE,
            {"over": "micro-step", "ranks": "own", "weigh": code},
            cost=3,
        )


_COUNT_FAULTS = {
    "rows": ("count of rows", "rows (samples) are counted in place of what the loss sums over"),
    "positions": ("padded count", "all positions are counted, padding included"),
    "labels": ("count before the label shift", "labels are counted that no position predicts"),
    "mask": ("unmasked count", "what is counted is not what is summed: another mask"),
    "unmasked": ("unmasked count", "what is masked in the sum is counted all the same"),
    "unweighted": ("weights missing in the count", "the sum is weighted and the count is not"),
    "documents": ("count of documents", "documents are counted in place of tokens"),
    "less boundaries": (
        "documents subtracted from the count",
        "the boundaries of documents are taken off a count that does not hold them",
    ),
    "roots": ("roots of the counts", "roots of the counts of samples are added up"),
    "clamped": (
        "count clamped to at least one per sample",
        "a sample without anything to learn from counts as one",
    ),
}


def _counts(facts: Facts) -> Iterator[Fault]:
    """The right division by a wrong count."""
    one_mask = "Make num and den from one mask: count what is summed, where it is summed."
    for index, term in enumerate(facts.terms if len(facts.terms) > 1 else ()):
        yield Fault(
            "count of another term",
            f"the term is divided by the count of {term}",
            "Give each term the count of what it sums over.",
            {"term": index},
            cost=1,
        )
    for code in _other_counts(facts):
        kind = facts.kinds[code].removesuffix(" shifted")
        if kind == "labels" and facts.kinds[code] != kind:
            kind = "mask"
        if kind == "positions less documents":
            kind = "less boundaries"
        name, says = _COUNT_FAULTS[kind]
        if kind == "less boundaries":  # It may be zero or less, and few guard against that.
            yield Fault(
                name, f"{says}: {code}", one_mask, {"count": code, "guarded": False}, cost=1
            )
        yield Fault(name, f"{says}: {code}", one_mask, {"count": code}, cost=1 + is_of_den(code))
    yield Fault(
        "padding in num and den",
        "positions that are masked elsewhere enter both the sum and the count",
        "Mask the sum too: multiply by the mask before adding.",
        {"nums": "unmasked", "count": f"{DEN}, unmasked"},
    )
    yield Fault(
        "padding in num",
        "positions that are masked enter the sum, and the count leaves them out",
        one_mask,
        {"nums": "unmasked"},
    )
    for count in (DEN, f"{DEN}, unweighted"):
        yield Fault(
            "weights ignored",
            "the weights do not reach the sum",
            "Multiply each token's loss by its weight before adding.",
            {"nums": "unweighted", "count": count},
        )


def _other_counts(facts: Facts) -> list[str]:
    return [code for code in facts.counts if code != DEN]


def _factors(facts: Facts) -> Iterator[Fault]:
    """Factors that the number of something leaves behind."""
    sizes = _sizes(facts)
    for size, words in sizes.items():
        again = " again" if size in ("micro-steps", "ranks") else ""
        cost = 3 if size == "accumulation" or size.startswith("total") else 2
        yield Fault(
            f"times {words}",
            f"the right value is multiplied by {words}",
            _SUM_RANKS if _is_of_ranks(size) else _DIVIDE_ONCE,
            {"factor": {size: 1}},
            cost=cost,
        )
        yield Fault(
            f"divided by {words}{again}",
            f"the right value is divided by {words} once more",
            _SUM_RANKS
            if _is_of_ranks(size)
            else f"Remove one of the two divisions. {_DIVIDE_ONCE}",
            {"factor": {size: -1}},
            cost=cost,
        )
    yield Fault(
        "counted twice",
        "the right value is added twice",
        "Find the two places that add it, and remove one.",
        {"factor": {"two": 1}},
        cost=3,
    )
    yield Fault(
        "divided by the padded length",
        "a mean over the columns of the batch, padding included, is divided by a count once more",
        _DIVIDE_ONCE,
        {"factor": {"columns": -1}},
        cost=3,
    )
    yield Fault(
        "divided by the number of rows",
        "what each micro-step adds is divided by its number of rows",
        _DIVIDE_ONCE,
        {"factor": {"rows": -1}},
        cost=3,
    )
    if len(facts.terms) > 1:
        yield Fault(
            "term left out",
            "it is left out",
            "Add every term that is optimised, each with its weight.",
            {"heard": "none"},
        )
        for index, term in enumerate(facts.terms):
            yield Fault(
                "weight of the term ignored",
                f"the term is added without its weight of {float(facts.weights[index]):g}",
                "Add every term with the weight that it is optimised with.",
                {"factor": {f"weight of {term}": -1}},
            )


def _is_of_ranks(size: str) -> bool:
    return size not in ("micro-steps", "accumulation") and not size.startswith("total")


def _sizes(facts: Facts) -> dict[str, str]:
    """The sizes of a world, and their words; a mesh axis before the ranks, which it is one of."""
    own = ("ranks", "accumulation", "processes", "dp")
    return {
        "micro-steps": "the number of micro-steps",
        **{axis: f"the size of {axis}" for axis in facts.sizes if axis not in own},
        "ranks": "the number of ranks",
        **({"processes": "the number of processes"} if "processes" in facts.sizes else {}),
        "accumulation": "the configured number of micro-steps",
        **{f"total of {term}": f"the number of tokens{_of(term, facts)}" for term in facts.terms},
    }


def _of(term: str, facts: Facts) -> str:
    return "" if len(facts.terms) == 1 else f" of {term}"


def _reductions(facts: Facts) -> Iterator[Fault]:
    """Addends that do not arrive."""
    sum_all = "Reduce once, after the last micro-step was added."
    if facts.sizes["ranks"] > 1:
        for change in ({"ranks": "own"}, {}, {"factor": {"ranks": 1}}):
            yield Fault(
                "rank 0 only",
                "only what rank 0 has arrives; nothing is summed over ranks",
                "Sum over the data ranks before the value is used or shown.",
                {"heard": "first", **change},
            )
        for adds in ("unreduced last", "unreduced last, not averaged"):
            yield Fault(
                "last micro-step not reduced",
                "the last micro-step is added after the ranks have summed, and stays local",
                sum_all,
                {"adds": adds},
            )
    yield Fault(
        "last micro-step only",
        "only the last micro-step arrives, divided by the count of the window",
        "Add the micro-steps up; do not assign.",
        {"adds": "last"},
    )
    yield Fault(
        "last micro-step only",
        "only the mean of the last micro-step arrives",
        "Add the micro-steps up; do not assign.",
        {"adds": "last", "over": "micro-step"},
    )
    yield Fault(
        "last micro-step lost",
        "the last micro-step does not arrive, and is counted all the same",
        sum_all,
        {"adds": "but last"},
    )
    for lost in ("half", "1", "2", "3"):
        yield Fault(
            "first micro-steps lost",
            f"the first {lost} of the micro-steps do not arrive",
            "Keep the accumulated gradient with the micro-step counter, also across a resume.",
            {"adds": f"but first {lost}"},
            cost=3,
        )
    yield Fault(
        "partial window dropped",
        "a window with fewer micro-steps than configured does not arrive at all",
        "Step on what is left at the end of an epoch.",
        {"adds": "whole windows"},
    )
    for size in ("micro-steps", "accumulation", "two", *[a for a in facts.sizes if a in _PIPES]):
        yield Fault(
            "running average of micro-steps",
            "all that is accumulated is divided again at each further micro-step, so that the "
            "first ones fade",
            _DIVIDE_ONCE,
            {"decay": size},
            cost=3,
        )


_PIPES = ("pp",)


def _empties(facts: Facts) -> Iterator[Fault]:
    for part in ("micro-step", "rank") if facts.sizes["ranks"] > 1 else ("micro-step",):
        yield Fault(
            f"0/0 in an empty {part}",
            f"a {part} with nothing to learn from is divided by its count of zero",
            f"Sum, do not average, in the {part}: an empty sum is 0.",
            {"nan": part},
            cost=1,
        )


def _precision() -> Iterator[Fault]:
    for dtype in ("bfloat16", "float16"):
        short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        yield Fault(
            f"{short} count",
            f"the count is held in {dtype}, which rounds it",
            "Count in integers or float64; do not stack counts with losses of a short dtype.",
            {"rounding": dtype},
        )
        yield Fault(
            f"{short} accumulation",
            f"micro-steps are added in {dtype}, where small ones vanish",
            "Accumulate in float32 (accumulate_dtype).",
            {"accumulate": dtype},
            whole=True,
        )


def _clipping(facts: Facts) -> Iterator[Fault]:
    once = "Reduce, normalise, unscale, then clip: once per window, on the whole gradient."
    yield Fault("not clipped", "the gradient is not clipped", once, {"clip": "never"}, whole=True)
    for when, how in (
        ("each micro-step", "the gradient of each micro-step is clipped on its own"),
        ("accumulated", "what is accumulated is clipped after each micro-step"),
    ):
        yield Fault("clipped in each micro-step", how, once, {"clip": when}, whole=True)
    if facts.sizes["ranks"] > 1:
        says = "each rank clips what it has, before the ranks sum"
        yield Fault("clipped on each rank", says, once, {"clip": "each rank"}, whole=True)
    for size, words in _sizes(facts).items():
        says = f"the gradient is clipped before it is divided by {words}"
        yield Fault(
            "clipped before normalisation",
            says,
            once,
            {"clip": "early", "clip_size": size},
            whole=True,
        )
    for exponent in range(1, 25):
        yield Fault(
            "clipped before normalisation",
            f"the gradient is clipped while it is still times a loss scale of {2**exponent}",
            once,
            {"clip": "early", "clip_size": float(2**exponent)},
            whole=True,
            cost=3,
        )
    for size in [name for name in facts.sizes if name != "accumulation"]:
        yield Fault(
            "norm counted over replicas",
            f"the norm counts each element once for each of the {size} that hold a copy",
            "Count each element once: the square sum over shards, not over replicas.",
            {"clip": "replicas", "clip_size": size},
            whole=True,
        )


def _updating() -> Iterator[Fault]:
    yield Fault(
        "optimizer step per micro-step",
        "the optimizer (weight decay, clipping) runs after each micro-step",
        "Step once per window.",
        {"update": "each micro-step"},
        whole=True,
    )
    yield Fault(
        "params without a gradient left out",
        "what has no gradient in a window is not updated: no weight decay, no optimizer state",
        "Give each param a gradient, of zeros where nothing reached it.",
        {"update": "where there is a gradient"},
        whole=True,
    )
