"""The laws of a loss function, tried on drawn batches, with a verdict for each."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from hypothesis.strategies import SearchStrategy
from torch import nn

from ...pure.terms import LossTerms
from .._threads import one_thread
from ..evaluation import evaluate
from ..reports.report import Progress, Report, Verdict
from ..rows import has_rows, join_rows, num_rows
from .batches import as_strategy, copied, fewest_rows, is_hollow, pool_of, reached
from .means import Mean, find_den
from .module_remarks import kept_state
from .outputs import as_loss_fn, call, read_output
from .reasons import about_den, why_not
from .search import Found, search
from .trial import Subject, guarded
from .trials import LAWS
from .verdicts import failed, verdict_of

__all__ = ["check_loss", "report_loss"]

# What is found about each of these decides how the others are tried.
_FIRST = ("emptiness", "purity", "repeatability", "additivity", "permutation")


def check_loss(loss_fn: Any, params: Any, batches: Any, **options: Any) -> Report:
    """Prove the laws of a loss function on drawn examples, or raise with the smallest that fails.

    The arguments are those of ``report_loss``.

    Returns:
        The report, in which no law is broken.

    Raises:
        CheckFailed: a law is broken, or the loss function cannot be run; the message is the
            report, and ``report`` of the exception is it as data.

    Examples:
        >>> from numden.pure import LossTerms
        >>> def loss_fn(w, batch):
        ...     kept = torch.where(batch["mask"], (w - batch["x"]) ** 2, 0)
        ...     return LossTerms(kept.sum(), batch["mask"].sum())
        >>> batch = {"x": torch.randn(4, 3), "mask": torch.rand(4, 3) < 0.7}
        >>> report = check_loss(loss_fn, torch.tensor(0.5), batch)
        >>> {verdict.status for verdict in report.verdicts}
        {'holds'}
    """
    return report_loss(loss_fn, params, batches, **options).require()


def report_loss(
    loss_fn: Any,
    params: Any,
    batches: Any,
    *,
    laws: Iterable[str] | None = None,
    pad_row: Callable[[Any, int], Any] | None = None,
    pad_columns: Callable[[Any, int], Any] | None = None,
    empty: Any = None,
    join: Callable[[Sequence[Any]], Any] = join_rows,
    max_examples: int = 30,
    seed: int = 0,
    exact: bool = False,
    rtol: float | None = None,
    budget_s: float = 25.0,
    progress: Progress | None = None,
) -> Report:
    """Try the laws of ``numden.property_tests.laws`` on a loss function; see there what they say.

    Rows, cuts, orders, masks and padding are drawn; the first example that fails is shrunk.

    Args:
        loss_fn: ``(params, batch)`` -> what ``as_loss_fn`` knows: loss terms, ``(num, den)``, or a
            scalar, of which it is then said what it is the mean over. Or an ``nn.Module`` that
            returns a loss, with ``params=None``.
        params: a pytree of tensors or an ``nn.Module``.
        batches: one batch, a sequence of batches, or a Hypothesis strategy for batches: pytrees of
            tensors with rows on the leading axis. Float64 tells rounding from faults best.
        laws: names of the laws to try; all where not given.
        pad_row: ``(batch, n) -> batch`` with n rows more that nothing should be learned from.
            Where not given, fields that are recognised as labels or masks are padded as such.
        pad_columns: the same for columns at the end of each row.
        empty: a batch with nothing to learn from, beside those that are derived.
        join: makes one batch of several.
        max_examples: how many examples to draw for a law; some take fewer.
        seed: of all draws.
        exact: sums must agree in every bit; for values whose sums are exact in binary.
        rtol: allowed difference relative to the largest element of a value; without it the
            square root of the machine epsilon.
        budget_s: seconds after which no further example is tried.
        progress: is called with the law that is tried.

    Returns:
        A verdict for each law; no broken law raises.

    Raises:
        ValueError: a law has another name, or there is no batch.

    Examples:
        >>> from numden.pure import LossTerms
        >>> mean = lambda w, batch: LossTerms((w * batch["x"]).mean(), 1)
        >>> batch = {"x": torch.tensor([8.0, 2.0, 2.0])}
        >>> report = report_loss(mean, torch.tensor(1.0), batch, laws=["additivity"])
        >>> print(report.verdicts[0].code)
        import torch
        from numden.property_tests import laws
        <BLANKLINE>
        laws.additivity(...)
    """
    started = time.monotonic()
    wanted = _laws_named(laws)
    if isinstance(loss_fn, nn.Module) and params is None:
        params = loss_fn
    pool = None if isinstance(batches, SearchStrategy) else pool_of(batches, join)
    draws = batches if pool is None else as_strategy(pool)
    plain = as_loss_fn(loss_fn)
    subject = Subject(
        guarded(plain),
        plain,
        plain,
        params,
        draws,
        join=join,
        pad_row=pad_row,
        pad_columns=pad_columns,
        empty=empty,
        exact=exact,
        rtol=rtol,
    )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    kept = kept_state(params) if isinstance(params, nn.Module) else nullcontext()
    with torch.random.fork_rng(devices=devices), kept, one_thread():
        say = progress or (lambda _: None)
        check = _Check(loss_fn, subject, pool, max_examples, seed, started + budget_s, say)
        verdicts, examples = check.report(wanted)
    return Report(
        getattr(loss_fn, "__name__", type(loss_fn).__name__),
        tuple(verdicts),
        examples,
        time.monotonic() - started,
        seed,
    )


def _laws_named(names: Iterable[str] | None) -> tuple[str, ...]:
    names = LAWS if names is None else tuple(names)
    unknown = [name for name in names if name not in LAWS]
    if unknown:
        raise ValueError(
            f"check_loss: laws must be among {list(LAWS)}, got {unknown}. Leave laws out for all."
        )
    return names


class _Check(NamedTuple):
    """A loss function with what to try on it, and for how long."""

    fn: Any
    subject: Subject
    pool: list[Any] | None
    max_examples: int
    seed: int
    end: float
    progress: Progress

    def report(self, wanted: Sequence[str]) -> tuple[list[Verdict], int]:
        """The verdicts about the wanted laws, and the number of examples."""
        first, samples = self._samples(self.subject.batches)
        if first.error is not None and _is_one_row(first.example):
            several = self.subject.batches.filter(lambda b: has_rows(b) and num_rows(b) > 1)
            again, more = self._samples(several)
            if again.error is None and more:
                subject = self.subject._replace(batches=several, least_rows=2, hollow=False)
                return self._replace(subject=subject).report(wanted)
        if first.error is not None or not samples:
            return _none_tried(wanted, self.subject, first), first.examples
        subject, mean = self._understood(samples)
        verdicts: dict[str, Verdict] = {}
        total = first.examples
        order = [*_FIRST, *(law for law in wanted if law not in _FIRST)]
        for place, law in enumerate(order):
            self.progress(f"trying {law}")
            reason = why_not(law, verdicts, mean)
            verdicts[law], count = self._verdict(law, subject, samples, reason, len(order) - place)
            subject, total = _adapted(subject, law, verdicts[law]), total + count
        den = [about_den(mean, subject)] if mean else []
        return [*den, *(verdicts[law] for law in wanted)], total

    def _verdict(
        self, law: str, subject: Subject, samples: list[Any], reason: str, laws_left: int
    ) -> tuple[Verdict, int]:
        now = time.monotonic()
        if not reason and now > self.end:
            reason = "no time was left"
        if reason:
            return Verdict(law, "skipped", reason), 0
        return verdict_of(
            law,
            subject,
            samples,
            max_examples=self.max_examples,
            seed=self.seed,
            end=now + (self.end - now) / laws_left,
        )

    def _samples(self, draws: SearchStrategy[Any]) -> tuple[Found, list[Any]]:
        """Some batches with rows that count, on which the loss function was run."""
        samples: list[Any] = []

        def run(batch: Any) -> None:
            evaluate(self.subject.loss_fn, self.subject.params, batch)
            samples.append(batch)

        some = draws.filter(lambda batch: not is_hollow(batch))
        end = time.monotonic() + (self.end - time.monotonic()) / 5
        found = search(some, run, max_examples=10, random_seed=self.seed, end=end)
        if found.error is not None:
            found = found._replace(example=fewest_rows(found.example, self._raises))
        return found, samples

    def _raises(self, batch: Any) -> bool:
        try:
            evaluate(self.subject.loss_fn, self.subject.params, batch)
        except Exception:
            return True
        return False

    def _understood(self, samples: list[Any]) -> tuple[Subject, Mean | None]:
        """The subject with what its masks and outputs tell, and what a scalar is."""
        subject = self.subject
        subject = subject._replace(reached=_reached(subject, samples))
        if self.pool is not None and subject.reached:
            draws = as_strategy(self.pool, ragged=True)
            found, more = self._samples(draws)
            if found.error is None:
                subject, samples = subject._replace(batches=draws), [*samples, *more]
        subject = subject._replace(rtol=_tolerance(subject, samples[0]))
        result = call(self.fn, subject.params, copied(samples[0]))
        if not _is_terms(result) or isinstance(self.fn, nn.Module):
            code = "as_loss_fn(loss_fn)"
            subject = subject._replace(loss_code=code, raw_code=code)
        if read_output(result).kind == "terms":
            return subject, None
        several = [batch for batch in samples if has_rows(batch) and num_rows(batch) > 1]
        several.sort(key=num_rows, reverse=True)
        mean = find_den(subject.loss_fn, subject.params, several[:6], join=subject.join)
        if mean.kind != "mean":
            return subject, mean
        loss_fn = as_loss_fn(self.fn, mean.den_fn)
        code = f"as_loss_fn(loss_fn, lambda batch: {mean.codes[0]})".replace("len(", "num_rows(")
        return subject._replace(loss_fn=guarded(loss_fn), direct=loss_fn, loss_code=code), mean


def _is_one_row(batch: Any) -> bool:
    return has_rows(batch) and num_rows(batch) == 1


def _tolerance(subject: Subject, batch: Any) -> float | None:
    """The one given; else, where sums are taken in less precision than the params have, theirs.

    A loss in float32 of float64 params has gradients that are float64 by dtype alone.
    """
    values = evaluate(subject.loss_fn, subject.params, batch)
    epsilons = {
        name: torch.finfo(value.dtype).eps
        for name, value in values.items()
        if value.is_floating_point() and not value.is_complex()
    }
    of_nums = [eps for name, eps in epsilons.items() if name.startswith("num")]
    if subject.rtol is not None or subject.exact or not of_nums:
        return subject.rtol
    return math.sqrt(max(of_nums)) if max(of_nums) > min(epsilons.values()) else None


def _is_terms(result: Any) -> bool:
    return isinstance(result[0] if type(result) is tuple and result else result, LossTerms)


def _reached(subject: Subject, samples: list[Any]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for batch in samples[:4]:
        try:
            found |= reached(subject.loss_fn, subject.params, batch)
        except Exception:
            return frozenset()  # It refuses what would be neutral, so that is no mask of it.
    return found


def _adapted(subject: Subject, law: str, verdict: Verdict) -> Subject:
    """The subject for the laws to come, after the verdict about ``law``."""
    if law == "purity" and verdict.status != "broken":
        return subject._replace(loss_fn=subject.direct)
    if law == "emptiness" and verdict.status == "broken":
        return subject._replace(hollow=False)
    return subject


def _none_tried(wanted: Sequence[str], subject: Subject, first: Found) -> list[Verdict]:
    if first.error is None:
        reason = "each drawn batch has no rows, or none that count"
        return [Verdict(law, "skipped", reason) for law in wanted]
    reason = "the loss function raised on the batch above"
    skipped = [Verdict(law, "skipped", reason) for law in wanted[1:]]
    return [*(failed(law, subject, first) for law in wanted[:1]), *skipped]
