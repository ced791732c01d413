"""A known bug as data: the step that has it, the step that does not, and the numbers."""

from typing import Any, Literal, NamedTuple

from numden.property_tests.worlds.problems import Problem
from numden.property_tests.worlds.world import Step, World

__all__ = ["Case"]


class Case(NamedTuple):
    """A public bug, made small.

    Attributes:
        id: its number in the corpus; ``b`` if a bug had a second wrong value.
        title: what goes wrong, in a few words.
        source: where it was found: project#number.
        problem: what the steps are tried on.
        wrong: the step with the bug.
        right: the same step without it.
        world: the windows of the reproducer.
        quantity: what is wrong.
        expected: its right value on ``world``, at w = 1.
        got: its wrong value there.
        fault: what a diagnosis should call it; several names if it takes several; empty if no
            formula over the sums of micro-steps gives its numbers.
        leaf: which of the params ``expected`` and ``got`` are about.
        before: windows before ``world``, whose values add up with its own.
        options: keyword arguments for ``check_step``.
    """

    id: str
    title: str
    source: str
    problem: Problem
    wrong: Step
    right: Step
    world: World
    quantity: Literal["grads", "loss", "eval_loss", "params"]
    expected: float
    got: float
    fault: str | tuple[str, ...]
    leaf: str = "w"
    before: tuple[World, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def faults(self) -> tuple[str, ...]:
        """The names that a diagnosis should give."""
        return (self.fault,) if isinstance(self.fault, str) else self.fault
