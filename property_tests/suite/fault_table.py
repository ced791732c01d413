"""The fault matrix as tables in the docs: run this file to write them there."""

import re
from pathlib import Path
from typing import NamedTuple

from test_fault_matrix import CORRECT, FAULTS, goes_on, test_fault

PAGE = Path(__file__).parents[2] / "examples/docs/ranks.md"
BETWEEN = re.compile(
    r"(?<=<!-- fault table, from fault_table.py -->\n).*?(?=<!-- end of fault table -->)", re.DOTALL
)


class Resume(NamedTuple):
    """What another number of ranks finds in a checkpoint.

    Attributes:
        name: of the checkpoint.
        ends: what loading it ends in.
        test: file and function.
    """

    name: str
    ends: str
    test: str


RESUMES = [
    Resume(
        "between windows",
        "equal to rounding",
        "test_checkpoint::test_equivalent_resumed_uninterrupted",
    ),
    Resume(
        "of `fit`, which resumes by itself",
        "equal to rounding",
        "test_fit_checkpoints::test_fit_resumes_on_another_number_of_ranks",
    ),
    Resume(
        "of shards, on another mesh",
        "the same bits are loaded",
        "test_checkpoint::test_shards_are_saved_once_and_fit_other_meshes",
    ),
    Resume(
        "within a window",
        "equal to rounding",
        "test_accumulate::test_equivalent_resumed_within_a_window",
    ),
    Resume(
        "within a window of plan `replay`",
        "`ValueError`",
        "test_accumulate::test_a_replay_needs_the_same_ranks",
    ),
    Resume(
        "within a window of float16 params",
        "`ValueError`",
        "test_accumulate::test_shares_of_different_scale_need_the_same_ranks",
    ),
]
"""The line "wrong world size on resume" of the matrix."""


def tables():
    """Both tables, as they stand on the page."""
    return "\n".join(["", *_faults(), "", *_resumes(), "", ""])


def _faults():
    return _lines(
        ("one rank", "the step ends in", "next window", "next window, FSDP2", "test"),
        [
            (
                fault.name,
                _end(fault),
                *(_next(fault, kind) for kind in ("tree", "fsdp")),
                _test(fault),
            )
            for fault in FAULTS
        ],
    )


def _end(fault):
    return fault.ends if fault.ends is CORRECT else f"`{fault.ends.partition(':')[0]}`"


def _next(fault, kind):
    if fault.ends is CORRECT:
        return "-"
    return "correct" if goes_on(fault, kind) else "none: the run ends"


def _test(fault):
    return f"`{test_fault.__name__}[{fault.name}-…]`"


def _resumes():
    return _lines(
        ("a checkpoint, on another number of ranks", "ends in", "test"),
        [(name, ends, f"`{test}`") for name, ends, test in RESUMES],
    )


def _lines(head, rows):
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    PAGE.write_text(BETWEEN.sub(lambda _: tables(), PAGE.read_text()))
