"""What a broken law says: which law, which value, expected, got, and what usually causes it."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Difference", "LawViolation", "check_equal", "worst_element", "worst_place"]


class Difference(NamedTuple):
    """One value that breaks a law.

    Attributes:
        term: its place as code, such as ``num['ce']``.
        expected: what the law says: a tensor, or words.
        got: what there is.
    """

    term: str
    expected: Any
    got: Any


class LawViolation(AssertionError):
    """A law does not hold. The message lists each value that breaks it.

    Attributes:
        law: the name of the law.
        rule: the law in words.
        differences: the values that break it.
        cause: what usually causes it, and what to do.
        code: Python that reproduces it, if known.

    Examples:
        >>> three, five = torch.tensor(3.0), torch.tensor(5.0)
        >>> print(LawViolation("law", "a is b.", [Difference("num", three, five)], "A slip."))
        law: a is b.
          num: expected 3.0, got 5.0
        Usual cause: A slip.
    """

    def __init__(
        self, law: str, rule: str, differences: Sequence[Difference], cause: str, *, code: str = ""
    ):
        super().__init__(law, rule, differences, cause)
        self.law, self.rule, self.differences, self.cause = law, rule, differences, cause
        self.code = code

    def __str__(self) -> str:
        lines = [f"{self.law}: {self.rule}", *map(_line, self.differences)]
        lines.append(f"Usual cause: {self.cause}")
        if self.code:
            lines += ["To reproduce:", textwrap.indent(self.code, "    ")]
        return "\n".join(lines)


def check_equal(
    law: str,
    rule: str,
    cause: str,
    expected: dict[str, Tensor],
    got: dict[str, Tensor],
    *,
    exact: bool = False,
    rtol: float | None = None,
) -> None:
    """Raise ``LawViolation`` unless the named values agree.

    Args:
        law: name of the law.
        rule: the law in words.
        cause: what usually breaks it.
        expected: values by name.
        got: values by the same names.
        exact: every bit must agree (-0 and 0 are equal, NaN is unequal).
        rtol: allowed difference relative to the largest element of a value; without it the
            square root of the machine epsilon, 1.5e-8 in float64. Sums in another order differ
            by a few epsilons; wrong formulas differ by more than the square root of one.

    Raises:
        LawViolation: names or values differ.
    """
    missing = [Difference(name, "a value", "none") for name in expected if name not in got]
    extra = [Difference(name, "no such value", "one") for name in got if name not in expected]
    wrong = [
        Difference(name, value, got[name])
        for name, value in expected.items()
        if name in got and not _agree(value, got[name], exact, rtol)
    ]
    if missing or extra or wrong:
        raise LawViolation(law, rule, [*missing, *extra, *wrong], cause)


def worst_element(difference: Difference) -> tuple[Difference, str]:
    """Of two tensors of one shape the element that is furthest off; how many differ, in words.

    Examples:
        >>> found = Difference("num", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        >>> worst_element(found)
        (Difference(term='num[1]', expected=tensor(2.), got=tensor(4.)), '1 of 2 elements differ')
    """
    term, expected, got = difference
    flat = torch.tensor(worst_place(expected, got))
    worst = tuple(int(i) for i in torch.unravel_index(flat, expected.shape))
    place = f"{term}[{', '.join(map(str, worst))}]"
    count = f"{int((_gaps(expected, got) > 0).sum())} of {expected.numel()} elements differ"
    return Difference(place, expected[worst], got[worst]), count


def worst_place(expected: Tensor, got: Tensor) -> int:
    """The index, into the flat tensors, of the elements that are furthest apart; NaN is."""
    return int(_gaps(expected, got).argmax())


def _gaps(expected: Tensor, got: Tensor) -> Tensor:
    return (expected.double() - got.double()).abs().nan_to_num(nan=math.inf)


def _agree(expected: Tensor, got: Tensor, exact: bool, rtol: float | None) -> bool:
    if expected.shape != got.shape:
        return False
    if exact or torch.equal(expected, got):
        return torch.equal(expected, got)
    eps = max(_epsilon(expected), _epsilon(got))
    expected, got = expected.double(), got.double()
    size = torch.maximum(expected.abs().max(), got.abs().max())
    # The floor is for values that cancel to zero: a thousand roundings of addends around 1.
    tolerance = 1000 * eps + (math.sqrt(eps) if rtol is None else rtol) * size
    return bool(((expected - got).abs() <= tolerance).all())


def _epsilon(value: Tensor) -> float:
    return torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0


def _line(difference: Difference) -> str:
    term, expected, got = difference
    if not (isinstance(expected, Tensor) and isinstance(got, Tensor)):
        return f"  {term}: expected {_show(expected)}, got {_show(got)}"
    if expected.shape != got.shape:
        return f"  {term}: expected shape {list(expected.shape)}, got {list(got.shape)}"
    if expected.ndim == 0:
        return f"  {term}: expected {_show(expected)}, got {_show(got)}"
    (place, expected, got), count = worst_element(difference)
    return f"  {place}: expected {_show(expected)}, got {_show(got)} ({count})"


def _show(value: Any) -> str:
    return str(value.item()) if isinstance(value, Tensor) and value.ndim == 0 else str(value)
