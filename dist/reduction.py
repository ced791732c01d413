"""The collectives of one window on one rank: in a fixed order, each once, also after an error.

    one all-reduce of all sums, packed, started before the last backward pass
    one coalesced SUM of the gradients that nobody has reduced yet
    one gathering of reports, only in a window in which something is wrong

(Plan ``before`` has one all-reduce more: its dens are needed before the window. So has
``on_empty="skip"``: no rank may apply what another skips.) A rank whose loss function raises still
takes part, with zeros and a flag, so that no rank waits for it in vain; then all ranks raise the
same error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from ..pure import Reduction, TermStructureError, tree
from ..pure._status import OnEmpty
from ._packed import Packed, fits, header, pack, reduce_rest, skeleton, unpack
from ._ranks import (
    Report,
    gather_reports,
    group_device,
    is_of_connection,
    raise_reports,
    report_of,
)

__all__ = ["ReduceGrads", "WindowCollectives"]

ReduceGrads = Callable[[Any, Tensor], Any]
"""``(grads, flag) -> grads``: both summed over ranks, the flag in place."""


class WindowCollectives:
    """What this rank still owes the others in one window.

    Attributes:
        reduction: what ``numden.pure`` calls; each call is one of the collectives.
        over: whether no reduction is left, after which all ranks know the same.
    """

    def __init__(
        self,
        group: c10d.ProcessGroup,
        reduce_grads: ReduceGrads | None,
        *,
        num_totals: int = 1,
        on_empty: OnEmpty = "raise",
    ) -> None:
        self.group = group
        self.reduction = Reduction(self.totals, self.grads, self.reports, self.agree)
        self.device = group_device(group)
        self._reduce_grads = reduce_grads
        self._totals_left = num_totals
        self._on_empty = on_empty
        self.over = False
        self._unwaited: Callable[[], Any] | None = None
        self._like: Any = None
        self._broken = torch.zeros(1, dtype=torch.float64, device=self.device)
        self._trouble = torch.zeros_like(self._broken)

    def totals(self, sums: Any) -> Callable[[], Any]:
        """Start the packed all-reduce of a tree of sums; the result waits for it and unpacks it."""
        self._like = sums
        wait = self.start(pack(sums, failed=False, device=self.device))
        self._unwaited = lambda: self._unpack(wait(), sums)
        return self._unwaited

    def start(self, packed: Packed) -> Callable[[], Packed]:
        """Start the all-reduce of a buffer; the result waits for it."""
        self._totals_left -= 1
        work = c10d.all_reduce(packed.buffer, group=self.group, async_op=True)

        def wait() -> Packed:
            assert work is not None
            work.wait()
            self._unwaited = None
            self.over = self._reduce_grads is None and not self._totals_left
            return self._notice(packed)

        return wait

    def _notice(self, packed: Packed) -> Packed:
        """Reduce what did not fit, and note what the header tells of other ranks."""
        if not len(packed.rest) and self._like is not None and fits(self._like):
            rest = packed.rest
        else:
            rest = reduce_rest(packed, self.group)
        head = header(packed.buffer)
        self._broken = self._broken + head.num_failed + head.apart
        self._trouble = self._trouble + head.num_failed + head.apart
        self._trouble += torch.where(head.num_with > 0, self.group.size() - head.num_with, 0)
        return Packed(packed.buffer, rest)

    def _unpack(self, packed: Packed, sums: Any) -> Any:
        if sums is None:
            return None
        totals = unpack(packed, sums)
        if self._totals_left:  # the dens of plan `before`; the sums are still to come
            return totals
        # Faults end in one number for the trouble of ranks, which `grads` may still add to.
        found, faults = totals
        # Where nobody reads the faults, sums that lack a rank's share must not pass for good ones.
        lost = torch.where(self._broken > 0, float("nan"), 0.0).squeeze()
        found = tree.map(lambda leaf: leaf + lost.to(leaf.device), found)
        faults = torch.cat([faults, self._trouble.to(faults.device)])
        self._trouble = faults[-1:]
        return found, faults

    def grads(self, grads: Any, *, failed: bool = False) -> Any:
        """Sum what is not reduced yet; a rank that failed gives zeros."""
        self.over = True
        if self._reduce_grads is None:
            return grads
        flag = torch.full((1,), float(failed), device=self.device)
        reduced = self._reduce_grads(grads, flag)
        self._trouble.add_(flag.to(self._trouble))
        return reduced

    def agree(self, good: Tensor) -> Tensor:
        """Whether the window is good on all ranks, those that failed included; a device scalar."""
        if self._reduce_grads is None:
            return good  # a loss alone is found from totals, which all ranks share
        bad = (~good).reshape(1).to(self.device, torch.float64)
        c10d.all_reduce(bad, group=self.group)
        return (bad == 0).squeeze().to(good.device)

    def reports(self, fault: str | None) -> Sequence[tuple[int | None, str | None]]:
        """What each rank says of itself; called by all ranks once each knows of trouble.

        Raises:
            RankError: some rank's loss function raised.
            TermStructureError: the ranks' sums have different structures.
        """
        gathered = self.gather((None, fault, self._structure()))
        return [(rank, text) for rank, (_, text, _) in gathered.items()]

    def gather(self, own: Report, cause: Exception | None = None) -> dict[int, Report]:
        """All ranks' reports, by rank, if none is of an error and their sums are alike."""
        by_rank = gather_reports(own, self.group, cause)
        _require_one_structure({rank: like for rank, (_, _, like) in by_rank.items()})
        return by_rank

    def settle(self) -> None:
        """Exchange reports after a window whose faults nobody read, where a host read is free."""
        if self._on_empty == "skip" and not self.unheard() and self.in_trouble():
            self.reports(None)

    def unheard(self) -> bool:
        """Whether no rank reads that another is in trouble, so that none takes part in reports."""
        return self._on_empty == "skip" and self.device.type != "cpu"

    def in_trouble(self) -> bool:
        """Whether some rank failed, differs, or has no micro-step: a host read."""
        return bool(self._trouble)

    def known_to_all(self, error: Exception) -> bool:
        """Whether an error was found at the end, from what all ranks know."""
        return self.over and not is_of_connection(error)

    def abandon(self, error: Exception, zero_grads: Callable[[], Any]) -> None:
        """Take part in what is left of the window after ``error``, and raise it on all ranks."""
        if self.known_to_all(error):
            raise error
        try:
            if is_of_connection(error):
                raise error
            self._take_part(zero_grads)
        except Exception as lost:
            if not is_of_connection(lost):
                raise
            # With a rank gone there is nothing left to take part in.
            raise_reports({c10d.get_rank(): report_of(lost)}, lost)
        if self.unheard():
            raise error
        self.gather(report_of(error), cause=error)

    def _take_part(self, zero_grads: Callable[[], Any]) -> None:
        if self._unwaited is not None:
            self._unwaited()
        while self._totals_left:
            self.start(pack(None, failed=True, device=self.device))()
        self.grads(zero_grads(), failed=True)
        if self._on_empty == "skip":
            self.agree(torch.zeros((), dtype=torch.bool))

    def _structure(self) -> Any:
        return None if self._like is None else skeleton(self._like)


def _require_one_structure(skeletons: Mapping[int, Any]) -> None:
    said = [
        (rank, list(zip(tree.names(like), map(_shape, tree.leaves(like)), strict=True)))
        for rank, like in skeletons.items()
        if like is not None
    ]
    if said and any(sums != said[0][1] for _, sums in said):
        texts = "; ".join(f"rank {rank} has {_text(sums)}" for rank, sums in said)
        raise TermStructureError(
            f"window: all ranks must return the same sums, but {texts}. Return a pair of "
            "zeros for a term that a batch lacks."
        )


def _shape(leaf: Tensor) -> list[int]:
    return list(leaf.shape)


def _text(sums: list[tuple[str, list[int]]]) -> str:
    # Of (Sums(terms, metrics), faults), the names of the terms say enough.
    own = [(name, shape) for name, shape in sums if name.startswith("[0]")]
    return ", ".join(
        f"{name.removeprefix('[0].').removeprefix('terms.')}{shape or ''}" for name, shape in own
    )
