"""A loss function under test, and one way to try a law on it."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from hypothesis.strategies import SearchStrategy
from torch import nn

from ...pure.terms import LossFn
from .. import laws
from ..reports.code import Verbatim, as_call
from ..violation import LawViolation
from .batches import copied
from .module_remarks import kept_state

__all__ = ["EFFECTS", "Skip", "Subject", "Trial", "as_code_file", "guarded"]

EFFECTS = ("purity", "repeatability", "no_collective", "no_host_sync")


class Subject(NamedTuple):
    """A loss function, and what is known about it.

    Attributes:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        raw: the same without a den that was found for it, as it runs in training.
        direct: ``loss_fn`` without the copies that ``guarded`` makes.
        params: a pytree of tensors or an ``nn.Module``.
        batches: draws batches.
        reached: the sums that the masks of a batch reach, by name.
        hollow: whether batches with nothing to learn from may be drawn.
        least_rows: with how many rows it can be run.
        loss_code: ``loss_fn`` as code.
        raw_code: ``raw`` as code.
    """

    loss_fn: LossFn
    raw: LossFn
    direct: LossFn
    params: Any
    batches: SearchStrategy[Any]
    join: Callable[[Sequence[Any]], Any]
    pad_row: Callable[[Any, int], Any] | None = None
    pad_columns: Callable[[Any, int], Any] | None = None
    empty: Any = None
    exact: bool = False
    rtol: float | None = None
    reached: frozenset[str] = frozenset()
    hollow: bool = True
    least_rows: int = 1
    loss_code: str = "loss_fn"
    raw_code: str = "loss_fn"

    @property
    def agree(self) -> dict[str, Any]:
        """What laws that compare take."""
        return {"exact": self.exact, "rtol": self.rtol}


class Trial(NamedTuple):
    """One way to try a law.

    Attributes:
        law: its name in ``laws``.
        examples: draws the arguments after loss function and params, as a tuple.
        names: the names of the last of these, which are given by keyword.
        options: the law's options.
        code: the options as code, where that is not their value.
        what: what is tried, in a word; empty if it goes without saying.
        raises: what it means if the loss function raises.
        keeps: the names of the sums that count; None for all.
        excuse: says why a violation is no proof; empty if it is one.
        share: how many of the examples to draw.
    """

    law: str
    examples: SearchStrategy[tuple[Any, ...]]
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    code: Mapping[str, Any] = MappingProxyType({})
    what: str = ""
    raises: Literal["failed", "broken", "skipped"] = "failed"
    keeps: frozenset[str] | None = None
    excuse: Callable[[LawViolation], str] = lambda violation: ""
    share: float = 1.0

    def run(self, subject: Subject, example: tuple[Any, ...]) -> None:
        """Raise ``LawViolation`` unless the law holds on ``example``."""
        args, named = self._split(example)
        try:
            if self.law in EFFECTS:
                _try_effect(self.law, subject, *args)
            else:
                law = getattr(laws, self.law)
                law(subject.loss_fn, subject.params, *args, **named, **self.options)
        except LawViolation as violation:
            kept = [each for each in violation.differences if self._keeps(each.term)]
            if kept:
                raise LawViolation(violation.law, violation.rule, kept, violation.cause) from None

    def as_code(self, subject: Subject, example: tuple[Any, ...]) -> str:
        """Python that does the same, with the names ``loss_fn`` and ``params``."""
        args, named = self._split(example)
        loss_code = subject.raw_code if self.law in EFFECTS else subject.loss_code
        options = {name: value for name, value in self.options.items() if value}
        start = [Verbatim(loss_code), Verbatim("params"), *args]
        call = as_call(f"laws.{self.law}", *start, **named, **{**options, **self.code})
        return as_code_file(call)

    def _split(self, example: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count = len(example) - len(self.names)
        return example[:count], dict(zip(self.names, example[count:], strict=True))

    def _keeps(self, term: str) -> bool:
        name = term.removeprefix("gradient of ").split(" by ")[0]
        return self.keeps is None or name in self.keeps


# Where the names come from that code may use.
_HOMES = {
    "laws": "property_tests",
    "as_loss_fn": "property_tests.loss_checker.outputs",
    "find_den": "property_tests.loss_checker.means",
    "num_rows": "property_tests.rows",
    "other_params": "property_tests._mask_laws",
    "pad_columns": "property_tests.mask_fields",
    "pad_rows": "property_tests.mask_fields",
}


def as_code_file(call: str) -> str:
    """``call`` below the imports that it needs."""
    used = [name for name in _HOMES if re.search(rf"\b{name}\b", call)]
    imports = [f"from numden.{_HOMES[name]} import {name}" for name in used]
    return "\n".join(["import torch", *imports, "", call])


class Skip(NamedTuple):
    """Why a law, or one way to try it, is left out."""

    reason: str
    what: str = ""


def guarded(loss_fn: LossFn) -> LossFn:
    """``loss_fn`` on copies, for a function that changes what it is given."""

    def guarded_loss_fn(params: Any, batch: Any) -> Any:
        if isinstance(params, nn.Module):
            with kept_state(params):
                return loss_fn(params, copied(batch))
        return loss_fn(copied(params), copied(batch))

    return guarded_loss_fn


def _try_effect(name: str, subject: Subject, batch: Any) -> None:
    """Try a law of effects on copies, so that the next example is what was drawn."""
    law, params, batch = getattr(laws, name), subject.params, copied(batch)
    if name == "repeatability":  # What the first call changes is not to be seen by the second.
        law(guarded(subject.raw), params, batch)
    elif isinstance(params, nn.Module):
        with kept_state(params):
            law(subject.raw, params, batch)
    else:
        law(subject.raw, copied(params), batch)
