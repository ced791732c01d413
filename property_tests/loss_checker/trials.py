"""How each law of a loss function is tried: on what, and how that is written as code."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ...pure import tree
from .._mask_laws import other_params
from .._window_strategies import windows
from ..evaluation import forward, sums
from ..mask_fields import mask_fields, mask_out, pad_columns, pad_rows
from ..reports.code import Verbatim
from ..rows import has_rows, join_rows, num_rows, take_rows
from ..violation import LawViolation
from .batches import is_alive, is_hollow
from .trial import EFFECTS, Skip, Subject, Trial

__all__ = ["LAWS", "trials"]


NO_ROWS = Skip("the tensors of a batch have no common leading size, so there are no rows to cut")


def trials(law: str, subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    """The ways to try ``law``."""
    return _TRIALS[law](subject, samples)


def _batches(subject: Subject, min_rows: int = 1) -> SearchStrategy[Any]:
    def wanted(batch: Any) -> bool:
        if not has_rows(batch):
            return min_rows <= 1
        return num_rows(batch) >= min_rows and (subject.hollow or _learns(subject, batch))

    return subject.batches.filter(wanted)


def _learns(subject: Subject, batch: Any) -> bool:
    """Whether there is something to sum, and no NaN: what an empty batch may give is known."""
    if is_hollow(batch) or (has_rows(batch) and num_rows(batch) < subject.least_rows):
        return False
    values = sums(forward(subject.loss_fn, subject.params, batch))
    nums = [value for name, value in values.items() if name.startswith("num")]
    return all(bool(num.isfinite().all()) for num in nums) and any(map(is_alive, nums))


def _single(subject: Subject, min_rows: int = 1) -> SearchStrategy[tuple[Any, ...]]:
    return _batches(subject, min_rows).map(lambda batch: (batch,))


def _additivity(subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    if not has_rows(samples[0]):
        return [NO_ROWS]
    if max(map(num_rows, samples)) < 2:
        return [Skip("no batch has more than one row, so there is nothing to cut")]
    whole = _batches(subject, 2 * subject.least_rows)
    cut = windows(whole, min_size=2, allow_empty=subject.hollow)
    if not subject.hollow:
        cut = cut.filter(lambda window: all(_learns(subject, batch) for batch in window))
    examples = cut.map(lambda window: (window,))
    if subject.join is join_rows:
        return [Trial("additivity", examples, options=subject.agree)]
    options = {"join": subject.join, **subject.agree}
    return [Trial("additivity", examples, options=options, code={"join": Verbatim("join")})]


def _permutation(subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    if not has_rows(samples[0]):
        return [NO_ROWS]

    def with_order(batch: Any) -> SearchStrategy[tuple[Any, ...]]:
        return st.permutations(range(num_rows(batch))).map(lambda order: (batch, order))

    examples = _batches(subject, 2).flatmap(with_order)
    return [Trial("permutation", examples, options=subject.agree)]


def _padding(subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    return [
        _padding_of("rows", "pad_row", subject.pad_row, pad_rows, subject, samples),
        _padding_of("columns", "pad_columns", subject.pad_columns, pad_columns, subject, samples),
    ]


def _padding_of(
    what: str,
    option: str,
    given: Callable[[Any, int], Any] | None,
    derived: Callable[[Any, int], Any],
    subject: Subject,
    samples: list[Any],
) -> Trial | Skip:
    if given is not None:
        options, code = {option: given, **subject.agree}, {option: Verbatim(option)}
        return Trial("padding", _single(subject), options=options, code=code, what=what)
    if not has_rows(samples[0]):
        return NO_ROWS._replace(what=what)
    if not subject.reached:
        return Skip(_no_masks(samples[0], f"give {option}"), what)
    try:
        derived(samples[0], 1)
    except ValueError:
        return Skip(f"no field has columns that are recognised as masked; give {option}", what)
    return Trial(
        "padding",
        _single(subject),
        options={option: derived, **subject.agree},
        code={option: Verbatim(derived.__name__)},
        what=what,
        raises="skipped",
        keeps=subject.reached,
        excuse=_excuse_of_context(samples[0], option) if what == "columns" else lambda _: "",
    )


def _no_masks(batch: Any, advice: str) -> str:
    names = [field.name for field in mask_fields(batch) if field.kind != "attention"]
    if not names:
        return f"no field of the batch is recognised as labels or a mask; {advice}"
    return f"masking all of {' and '.join(names)} changes no sum to 0, so it is no mask; {advice}"


def _excuse_of_context(batch: Any, option: str) -> Callable[[LawViolation], str]:
    """Columns behind the end may be seen by the others where no attention mask hides them."""
    hidden = any(field.kind == "attention" for field in mask_fields(batch))

    def excuse(violation: LawViolation) -> str:
        counted = any("den" in each.term.split(" by ")[0] for each in violation.differences)
        if hidden or counted:
            return ""
        return (
            "masked columns change the num and not the den: a model may look at them, as the "
            f"batch has no attention mask; give {option} to say what is neutral"
        )

    return excuse


def _emptiness(subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    found: list[Trial | Skip] = []
    if subject.empty is not None:
        given = st.just((subject.empty,))
        found.append(Trial("emptiness", given, what="the given batch", raises="broken"))
    if subject.reached:
        masked = subject.batches.filter(lambda b: not is_hollow(b)).map(lambda b: (_all_masked(b),))
        trial = Trial("emptiness", masked, what="all masked", raises="broken")
        found.append(trial._replace(keeps=subject.reached))
    else:
        found.append(Skip(_no_masks(samples[0], "give empty"), "all masked"))
    if not has_rows(samples[0]):
        return [*found, NO_ROWS._replace(what="no rows")]
    rows = subject.batches.filter(has_rows).map(lambda batch: (take_rows(batch, []),))
    return [*found, Trial("emptiness", rows, what="no rows", raises="broken", share=0.2)]


def _all_masked(batch: Any) -> Any:
    return mask_out(batch, [f for f in mask_fields(batch) if f.kind != "attention"])


def _den_independence(subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    other = other_params(subject.params, 1, 0.1)
    code = {"other_params": Verbatim("other_params(params, 1, 0.1)")}
    examples, options = _single(subject), {"other_params": other}
    return [Trial("den_independence", examples, options=options, code=code)]


def _mask_agreement(subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    if not has_rows(samples[0]):
        return [NO_ROWS]
    if not any(map(mask_fields, samples)):
        return [Skip(_no_masks(samples[0], "name a field labels or mask"))]

    def with_places(batch: Any) -> SearchStrategy[tuple[Any, ...]]:
        leaves = tree.leaves(batch)
        shapes = [leaves[field.leaf].shape for field in mask_fields(batch)]
        rows, columns = shapes[0][0], max([s[1] for s in shapes if len(s) > 1], default=1)
        place = st.tuples(st.integers(0, rows - 1), st.integers(0, max(0, columns - 1)))
        return st.lists(place, min_size=1, max_size=2, unique=True).map(lambda p: (batch, p))

    batches = subject.batches.filter(lambda b: not is_hollow(b) and bool(mask_fields(b)))
    return [Trial("mask_agreement", batches.flatmap(with_places), names=("places",))]


def _keyed_randomness(subject: Subject, samples: list[Any]) -> list[Trial | Skip]:
    if not has_rows(samples[0]):
        return [NO_ROWS]
    several = _single(subject, 2)
    if not subject.hollow and subject.least_rows == 1:
        several = several.filter(lambda example: _rows_learn(subject, example[0]))
    return [Trial("keyed_randomness", several, options=subject.agree, share=0.5)]


def _rows_learn(subject: Subject, batch: Any) -> bool:
    return all(_learns(subject, take_rows(batch, [row])) for row in range(num_rows(batch)))


def _effect(law: str) -> Callable[[Subject, list[Any]], list[Trial | Skip]]:
    return lambda subject, samples: [Trial(law, _single(subject), share=0.2)]


_TRIALS: dict[str, Callable[[Subject, list[Any]], list[Trial | Skip]]] = {
    "additivity": _additivity,
    "permutation": _permutation,
    "padding": _padding,
    "emptiness": _emptiness,
    "den_independence": _den_independence,
    "mask_agreement": _mask_agreement,
    "keyed_randomness": _keyed_randomness,
    **{law: _effect(law) for law in EFFECTS},
}

LAWS = tuple(_TRIALS)
