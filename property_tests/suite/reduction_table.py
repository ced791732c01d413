"""Who sums which gradient, as a table in the docs.

``python property_tests/suite/reduction_table.py`` writes it. Each line is one of what
``explain_reduction`` prints in the tests of layouts, which compare both the text and the gradients.
"""

import re
from typing import NamedTuple

import test_layout_experts as experts
import test_layout_frozen as frozen
import test_layout_fsdp as fsdp
import test_layout_replicated as replicated
import test_layout_sequence as sequence
import test_layout_shards as shards
import test_layout_tensor as tensor
from fault_table import PAGE, _lines

BETWEEN = re.compile(
    r"(?<=<!-- reduction table, from reduction_table.py -->\n).*?"
    r"(?=<!-- end of reduction table -->)",
    re.DOTALL,
)


class Layout(NamedTuple):
    """A layout, what ``explain_reduction`` prints of it, and the test that compares it."""

    name: str
    table: str
    test: object


LAYOUTS = [
    Layout("replicated: pytree, module, DDP", replicated.TABLE, replicated.test_replicated),
    Layout("FSDP2", fsdp.ONE_DIMENSION, fsdp.test_fsdp_one_dimension),
    Layout(
        "FSDP2, some ignored or kept in float32", fsdp.IGNORED, fsdp.test_fsdp_ignored_parameters
    ),
    Layout("hybrid shards (HSDP)", fsdp.HYBRID, fsdp.test_hybrid_shards),
    Layout(
        "FSDP2 over one of two dimensions",
        fsdp.TWO_REDUCERS,
        fsdp.test_shards_over_one_of_two_dimensions,
    ),
    Layout("functional shards", shards.TABLE, shards.test_shards),
    Layout(
        "functional shards over one of two",
        shards.HYBRID,
        shards.test_shards_over_one_of_two_dimensions,
    ),
    Layout("experts over `ep`", experts.OVER_EP, experts.test_experts),
    Layout(
        "experts over `ep`, copies over `dp`",
        experts.OVER_DP_AND_EP,
        experts.test_experts_replicated_over_data,
    ),
    Layout(
        "experts over `ep`, shards over `fsdp`",
        experts.SHARDED_EXPERTS,
        experts.test_experts_owned_and_sharded,
    ),
    Layout(
        "the same in an FSDP2 module",
        experts.FSDP_EXPERTS,
        experts.test_experts_of_an_fsdp_module,
    ),
    Layout("sequence split over `cp`", sequence.TABLE, sequence.test_sequence_split),
    Layout("tensor parallel over `tp`", tensor.TABLE, tensor.test_tensor_parallel),
    Layout("the same in an FSDP2 module", tensor.WITH_FSDP, tensor.test_tensor_parallel_and_fsdp),
    Layout("a frozen parameter", frozen.TABLES["module"], frozen.test_frozen_parameter),
    Layout("the same in an FSDP2 module", frozen.TABLES["fsdp"], frozen.test_frozen_parameter),
]


def table():
    """The table, as it stands on the page."""
    rows = [row for layout in LAYOUTS for row in _rows(layout)]
    return "\n".join(
        ["", *_lines(("layout", "parameters", "summed over … by", "test"), rows), "", ""]
    )


def _rows(layout):
    """One row for each set of parameters that are summed alike."""
    head, *lines = (re.split(r" {2,}", line) for line in layout.table.splitlines())
    dims = [cell.removeprefix("summed over ").removesuffix(" by") for cell in head[2:]]
    names = {}
    for name, _, *cells in lines:
        names.setdefault(tuple(cells), []).append(name.strip("[]'"))
    test = f"`{layout.test.__module__}::{layout.test.__name__}`"
    for number, (cells, alike) in enumerate(names.items()):
        summed = "; ".join(f"`{dim}`: {by}" for dim, by in zip(dims, cells, strict=True))
        first = number == 0
        parameters = ", ".join(f"`{name}`" for name in alike)
        yield layout.name if first else "", parameters, summed, test if first else ""


if __name__ == "__main__":
    PAGE.write_text(BETWEEN.sub(lambda _: table(), PAGE.read_text()))
