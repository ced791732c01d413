"""The laws of losses that are ratios of sums, for your own test suite.

``laws`` are assertions on a loss function or on the gradient of a window; ``strategies`` are
Hypothesis strategies for what to try them on (the one part that needs hypothesis);
``count_collectives`` and ``count_host_syncs`` count what a micro-step must not do.

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
    from . import laws as laws
    from . import strategies as strategies
    from .counters import count_collectives as count_collectives
    from .counters import count_host_syncs as count_host_syncs
    from .ranks import over_ranks as over_ranks
    from .violation import LawViolation as LawViolation

# Loaded when first named: strategies need hypothesis, and pytest imports this file, as the folder
# above the suite, before it knows a package numden.
_HOMES = {
    "LawViolation": "violation",
    "count_collectives": "counters",
    "count_host_syncs": "counters",
    "over_ranks": "ranks",
}

__all__ = ["laws", "strategies", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")


def __dir__() -> list[str]:
    return __all__
