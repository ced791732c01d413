"""What the trials of a law come to: a verdict, with the smallest example that breaks it."""

import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation import forward, sums
from ..reports.report import Verdict
from ..rows import has_rows, num_elements, num_rows
from ..violation import Difference, LawViolation
from .module_remarks import drawing_parts, mixing_parts, tracking_parts
from .search import Found, search
from .trial import Skip, Subject, Trial
from .trials import trials

__all__ = ["error_in_words", "failed", "verdict_of"]

MAX_ELEMENTS = 4000  # More than this is no example to read.


def verdict_of(
    law: str, subject: Subject, samples: list[Any], *, max_examples: int, seed: int, end: float
) -> tuple[Verdict, int]:
    """The verdict about ``law``, and how many examples were tried until the time ``end``."""
    skips: list[Skip] = []
    tried: list[str] = []
    count, ran_out = 0, False
    ways = trials(law, subject, samples)
    for index, trial in enumerate(ways):
        if isinstance(trial, Skip):
            skips.append(trial)
            continue
        now = time.monotonic()
        result = search(
            trial.examples,
            lambda example, trial=trial: trial.run(subject, example),
            max_examples=max(min(max_examples, 10), round(max_examples * trial.share)),
            random_seed=seed,
            end=now + (end - now) / (len(ways) - index),
        )
        count, ran_out = count + result.examples, ran_out or result.ran_out
        outcome = _outcome(trial, subject, result)
        if isinstance(outcome, Verdict):
            return outcome, count
        if outcome is None:
            tried.append(trial.what)
        else:
            skips.append(outcome)
    return _unbroken(law, tried, skips, count, ran_out), count


def failed(law: str, subject: Subject, result: Found) -> Verdict:
    """The verdict for a loss function that raised on a batch of rows that count."""
    trial = Trial("repeatability", subject.batches)
    return _failed(law, trial, subject, result._replace(example=(result.example,)))


def _outcome(trial: Trial, subject: Subject, result: Found) -> Verdict | Skip | None:
    """A verdict if the law is broken, why it was not tried, or None: it holds."""
    error = result.error
    if error is None:
        return None if result.examples else Skip("no batch that fits was drawn", trial.what)
    if isinstance(error, LawViolation):
        excuse = trial.excuse(error)
        return Skip(excuse, trial.what) if excuse else _broken(trial, subject, result, error)
    if trial.raises == "failed":
        return _failed(trial.law, trial, subject, result)
    if trial.raises == "skipped":
        reason = f"the loss function raised {error_in_words(error)} on the padding made for it"
        return Skip(reason, trial.what)
    violation = LawViolation(
        trial.law,
        f"a batch with {'all places masked' if trial.what == 'all masked' else trial.what} must "
        "give exact zeros.",
        [Difference("loss_fn", "zeros", error_in_words(error))],
        "a shape or an index that needs a row, or a check that refuses an empty batch. Sums over "
        "nothing are 0: return them.",
    )
    return _broken(trial, subject, result, violation)


def _broken(trial: Trial, subject: Subject, result: Found, violation: LawViolation) -> Verdict:
    code = _code(trial, subject, result.example)
    violation = LawViolation(
        violation.law, violation.rule, violation.differences, violation.cause, code=code
    )
    remarks = _remarks(trial, subject, result.example, violation)
    words = " ".join(f"{remark}." for remark in remarks)
    example = _shown(subject, result.example)
    return Verdict(trial.law, "broken", words, violation, example, code)


def _failed(law: str, trial: Trial, subject: Subject, result: Found) -> Verdict:
    assert result.error is not None
    words = f"the loss function raised {error_in_words(result.error)}"
    return Verdict(
        law,
        "failed",
        words,
        example=_shown(subject, result.example),
        code=_code(trial, subject, result.example),
    )


def _unbroken(law: str, tried: list[str], skips: list[Skip], count: int, out: bool) -> Verdict:
    reasons = "; ".join(f"{s.what}: {s.reason}" if s.what else s.reason for s in skips)
    if not tried:
        return Verdict(law, "skipped", reasons)
    words = f"{count} example{'' if count == 1 else 's'}"
    words += ", until the time was over" if out else ""
    words += f" of {' and '.join(tried)}" if skips and any(tried) else ""
    return Verdict(law, "holds", words + (f"; not tried: {reasons}" if reasons else ""))


def error_in_words(error: BaseException) -> str:
    """The kind of an exception, what it says, and the line of the code under test behind it."""
    message = " ".join(str(error).split())
    message = f"{message[:300]}…" if len(message) > 300 else message
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = _place(error)
    return f"{text} (at {place})" if place else text


_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).parent


def _place(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        ours = _OURS in path.resolve().parents and "suite" not in path.parts
        if not ours and _TORCH not in path.parents and "site-packages" not in path.parts:
            return f"{path.name}:{frame.lineno}"
    return ""


def _code(trial: Trial, subject: Subject, example: tuple[Any, ...]) -> str:
    if num_elements(example) > MAX_ELEMENTS:
        return ""
    return trial.as_code(subject, example)


def _shown(subject: Subject, example: tuple[Any, ...]) -> str:
    """The sums of each batch of an example, a line each."""
    first = example[0] if example else None
    if isinstance(first, list) and first and not isinstance(first[0], Tensor):
        lines = [_line(f"micro-batch {i + 1}", subject, batch) for i, batch in enumerate(first)]
        return "\n".join([*lines, _line("joined", subject, subject.join(first))])
    return _line("batch", subject, first)


def _line(title: str, subject: Subject, batch: Any) -> str:
    rows = f" of {_rows(batch)}" if has_rows(batch) else ""
    try:
        values = sums(forward(subject.loss_fn, subject.params, batch))
    except Exception as error:
        return f"{title}{rows}: raises {type(error).__name__}"
    texts = [f"{name} {_number(value)}" for name, value in list(values.items())[:8]]
    return f"{title}{rows}: {', '.join(texts)}"


def _rows(batch: Any) -> str:
    count = num_rows(batch)
    return f"{count} row{'' if count == 1 else 's'}"


def _number(value: Tensor) -> str:
    if value.ndim:
        return f"of shape {list(value.shape)}"
    return f"{value.item():.6g}" if value.is_floating_point() else str(value.item())


def _remarks(
    trial: Trial, subject: Subject, example: tuple[Any, ...], violation: LawViolation
) -> list[str]:
    """What is known beyond the violation."""
    remarks = []
    if isinstance(subject.params, nn.Module):
        remarks += _remarks_on_module(trial, subject, subject.params, example)
    if trial.law == "additivity" and not remarks:
        remarks += _remarks_on_dens(subject, example[0], violation)
    nans = [d for d in violation.differences if isinstance(d.got, Tensor) and d.got.isnan().any()]
    if trial.law == "emptiness" and "as_loss_fn" in subject.loss_code and nans:
        remarks.append("A mean over nothing is nan; return the sum and the count")
    return remarks


def _remarks_on_module(
    trial: Trial, subject: Subject, module: nn.Module, example: tuple[Any, ...]
) -> list[str]:
    first = example[0][0] if isinstance(example[0], list) else example[0]

    def run() -> None:
        forward(subject.raw, module, first)

    if trial.law in ("additivity", "emptiness", "padding"):
        parts, advice = mixing_parts(module), "take a norm of single rows (LayerNorm, GroupNorm)"
    elif trial.law == "purity":
        parts = [*drawing_parts(run, module), *tracking_parts(run, module)]
        advice = "take one that draws by keys and keeps no state"
    elif trial.law in ("repeatability", "keyed_randomness", "permutation"):
        parts, advice = drawing_parts(run, module), "draw by keys of rows with numden.pure.random"
    else:
        return []
    if not parts:
        return []
    return ["; ".join(parts), f"Call .eval() on what is in train mode, or {advice}"]


def _remarks_on_dens(subject: Subject, window: Any, violation: LawViolation) -> list[str]:
    """A den that is the same for each micro-batch: its num is a mean of one."""
    wrong = [each for each in violation.differences if each.term.split(".")[-1].startswith("den")]
    parts = [sums(forward(subject.loss_fn, subject.params, batch)) for batch in window]
    same = [
        each
        for each in wrong
        if isinstance(each.got, Tensor)
        and all(each.term in p and torch.equal(p[each.term], each.got) for p in parts)
    ]
    return [
        f"{each.term} is {_number(each.got)} for each micro-batch, whatever is in it: its num is a "
        "mean, or another statistic, of one micro-batch. Return the sums that it is made of, and "
        "form it in the objective"
        for each in same
    ]
