"""The search for the smallest batch, or cut of one, on which a law of a loss function fails."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import given, seed
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from ..rows import num_elements
from ..violation import LawViolation
from ..worlds.draw import OutOfTime, quiet_settings

__all__ = ["Found", "search"]


# Hypothesis derives most examples of a run from earlier ones; new runs are more varied.
ROUND = 10


class Found(NamedTuple):
    """What a search found.

    Attributes:
        examples: how many examples were tried, those of shrinking left out.
        error: what the smallest failing example raised; None if none failed.
        example: that example.
        ran_out: whether the time was over before the search was.
    """

    examples: int
    error: Exception | None = None
    example: Any = None
    ran_out: bool = False


class _Fails(Exception):
    """Stands for each violation, so that shrinking may go from one value to another."""


class _Raises(Exception):
    """Stands for each other exception."""


def search(
    examples: SearchStrategy[Any],
    test: Callable[[Any], None],
    *,
    max_examples: int,
    random_seed: int,
    end: float,
) -> Found:
    """Try ``test`` on drawn examples, and shrink the first that fails.

    Draws, and torch's global generator, depend on ``random_seed`` alone. Nothing is printed or
    kept.

    Args:
        examples: what to draw from.
        test: raises ``LawViolation``, or something else if it cannot be run.
        max_examples: how many examples to draw.
        random_seed: of the draws.
        end: on the clock of ``time.monotonic``; shrinking ends there, too. One example is tried
            in any case.
    """
    record = _Record()

    def body(example: Any) -> None:
        if record.calls and time.monotonic() > end:
            raise OutOfTime
        record.calls += 1
        torch.manual_seed(random_seed)
        try:
            test(example)
        except LawViolation as error:
            record.keep(_Fails, example, error)
            raise _Fails from None
        except Exception as error:
            record.keep(_Raises, example, error)
            raise _Raises from None

    for start in range(0, max_examples, ROUND):
        size = min(ROUND, max_examples - start)
        ran_out = _search_round(body, examples, size, random_seed + start, record)
        if ran_out or record.last:
            return record.found(ran_out)
    return record.found(ran_out=False)


def _search_round(
    body: Callable[[Any], None],
    examples: SearchStrategy[Any],
    max_examples: int,
    random_seed: int,
    record: "_Record",
) -> bool:
    """Run Hypothesis once; whether the time was over before it was done."""
    try:
        seed(random_seed)(quiet_settings(max_examples)(given(examples)(body)))()
    except OutOfTime:
        return True
    except Unsatisfiable:
        return False
    except Exception:
        # What was recorded, in Hypothesis' own words; or that it fails now and then.
        if not record.last:
            raise
    return False


class _Record:
    """The failing examples of a search: the last is the smallest once shrinking is done."""

    def __init__(self) -> None:
        self.calls = self.calls_at_first = 0
        self.last: dict[type, tuple[Any, Exception]] = {}
        self.smallest: dict[type, tuple[int, Any, Exception]] = {}

    def keep(self, kind: type, example: Any, error: Exception) -> None:
        if not self.last:
            self.calls_at_first = self.calls
        self.last[kind] = (example, error)
        size = num_elements(example)
        if kind not in self.smallest or size <= self.smallest[kind][0]:
            self.smallest[kind] = (size, example, error)

    def found(self, ran_out: bool) -> Found:
        if not self.last:
            return Found(self.calls, ran_out=ran_out)
        kind = next(iter(self.last))  # Of the failure that was met first.
        example, error = self.smallest[kind][1:] if ran_out else self.last[kind]
        return Found(self.calls_at_first, error, example, ran_out)
