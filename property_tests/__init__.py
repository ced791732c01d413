"""The laws of losses that are ratios of sums, for your own test suite.

``check_loss`` tries a loss function, ``check_step`` a whole trainer, and both say what is wrong on
the smallest example; ``diagnose`` names the wrong formula behind numbers from anywhere;
``adapters`` make steps of other people's trainers. ``laws`` are assertions on a loss function or
on the gradient of a window, for your own tests; ``strategies`` are Hypothesis strategies for what
to try them on; ``count_collectives`` and ``count_host_syncs`` count what a micro-step must not do.

Examples:
    >>> import torch
    >>> from hypothesis import given, settings
    >>> from numden.property_tests import laws, strategies
    >>> from numden.pure import LossTerms
    >>> def loss_fn(w, batch):
    ...     return LossTerms((w * batch["x"]).sum(), batch["x"].shape[0])
    >>> batches = strategies.dyadic_tensors((5,)).map(lambda x: {"x": x})
    >>> @settings(deadline=None)
    ... @given(strategies.windows(batches))
    ... def test_additivity(window):
    ...     laws.additivity(loss_fn, torch.tensor(1.0).double(), window, exact=True)
    >>> test_additivity()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import laws as laws
    from . import strategies as strategies
    from . import worlds as worlds
    from .counters import count_collectives as count_collectives
    from .counters import count_host_syncs as count_host_syncs
    from .diagnosis import diagnose as diagnose
    from .loss_checker import check_loss as check_loss
    from .loss_checker import report_loss as report_loss
    from .ranks import over_ranks as over_ranks
    from .reports import CheckFailed as CheckFailed
    from .reports import Diagnosis as Diagnosis
    from .reports import Report as Report
    from .reports import Verdict as Verdict
    from .step_checker import check_step as check_step
    from .step_checker import report_step as report_step
    from .violation import LawViolation as LawViolation
    from .worlds import StepResult as StepResult
    from .worlds import World as World

# Loaded when first named: strategies and the checkers need hypothesis, and pytest imports this
# file, as the folder above the suite, before it knows a package numden.
_HOMES = {
    "CheckFailed": "reports",
    "Diagnosis": "reports",
    "LawViolation": "violation",
    "Report": "reports",
    "StepResult": "worlds",
    "Verdict": "reports",
    "World": "worlds",
    "check_loss": "loss_checker",
    "check_step": "step_checker",
    "count_collectives": "counters",
    "count_host_syncs": "counters",
    "diagnose": "diagnosis",
    "over_ranks": "ranks",
    "report_loss": "loss_checker",
    "report_step": "step_checker",
}

__all__ = ["adapters", "laws", "strategies", "worlds", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")


def __dir__() -> list[str]:
    return __all__
