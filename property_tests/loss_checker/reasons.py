"""Which laws say nothing after what was found, and what is said of a scalar's den."""

from ..reports.code import Verbatim, as_call
from ..reports.report import Verdict
from ..violation import Difference, LawViolation
from .means import Mean
from .trial import Subject, as_code_file

__all__ = ["about_den", "why_not"]

_COMPARING = ("additivity", "permutation", "padding", "mask_agreement")

# What a scalar cannot be tried for, by what it is.
_DEN_ITSELF = ("den_independence", "mask_agreement")
_SUMS = (*_DEN_ITSELF, "additivity", "keyed_randomness")
_NEED_A_DEN = {
    "mean": ("den_independence",),
    "sum": _DEN_ITSELF,
    "weighted": _SUMS,
    "none": _SUMS,
    "unknown": _SUMS,
}


def why_not(law: str, verdicts: dict[str, Verdict], mean: Mean | None) -> str:
    """Why ``law`` says nothing after what was found."""
    broken = {name for name, verdict in verdicts.items() if verdict.status == "broken"}
    if law in _COMPARING and "repeatability" in broken:
        return "two calls on one batch differ, so no sums can be compared; see repeatability"
    if law in _COMPARING and _draws(verdicts["purity"]):
        return "it draws from a global generator, so no sums can be compared; see purity"
    if mean is not None and law in _NEED_A_DEN[mean.kind]:
        return "the loss function returns no den; see denominator"
    shown = not broken & {"repeatability", "permutation"}
    if law == "keyed_randomness" and "additivity" in broken and shown:
        return "the rows do not add up whatever is drawn; see additivity"
    return ""


def _draws(purity: Verdict) -> bool:
    differences = purity.violation.differences if purity.violation else ()
    return any(each.term.endswith(")") for each in differences)  # The state of a generator.


def about_den(mean: Mean, subject: Subject) -> Verdict:
    """The verdict about a scalar: whether there is a den that makes it a pair of sums."""
    words = f"the loss function returns a scalar: {mean.words}"
    if mean.kind in ("mean", "sum"):
        return Verdict("denominator", "holds", words)
    if mean.pair is None or mean.values is None:
        return Verdict("denominator", "skipped", words)
    start = [Verbatim(subject.loss_code), Verbatim("params")]
    code = as_code_file(as_call("find_den", *start, [subject.join(mean.pair)]))
    a, b, joined = mean.values
    violation = LawViolation(
        "denominator",
        "a count of the batch must make a scalar loss a pair of sums.",
        [
            Difference(
                "joined", f"a mean of {a:.6g} and {b:.6g} weighted by a count", f"{joined:.6g}"
            )
        ],
        "several terms with dens of their own, weights that are not returned, or statistics of "
        "the batch. Return LossTerms(num, den): sums and what they are divided by, by term.",
        code=code,
    )
    example = f"values {a:.6g} and {b:.6g}, joined {joined:.6g}"
    return Verdict("denominator", "broken", words, violation, example, code)
