"""Public bugs of loss and gradient scale, each as a small step that has it and one that has not.

``CASES`` are the steps, ``OUT_OF_SCOPE`` says why a bug has none, and
``python examples/known_bugs/table.py`` writes what the checker finds.
"""

from . import masks, meshes, metrics, precision, ranks, terms, updates, windows
from .case import Case

__all__ = ["CASES", "OUT_OF_SCOPE", "Case"]

MODULES = (windows, ranks, meshes, terms, masks, metrics, precision, updates)
CASES = tuple(sorted((case for module in MODULES for case in module.CASES), key=lambda c: c.id))

OUT_OF_SCOPE = {
    "B61": "Ranks that run different numbers of collectives hang; no value is wrong.",
    "B69": "The maximum of rank means is no ratio of sums; the loss and the gradient are right.",
    "B73": "A log that shows 0 for an empty window; 0 is also what Σ/Σ is taken to be there.",
}
"""Bugs that no step shows, with the reason."""
