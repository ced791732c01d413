"""The mesh dimensions that the tokens of a window are split over, and the ranks along each."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh

from ._axis import process_group_of
from ._ranks import data_group

__all__ = ["DataAxes", "data_axes", "dim_names", "ranks_along"]


class DataAxes(NamedTuple):
    """What sums of a window are reduced over.

    Attributes:
        group: all its ranks.
        mesh: they as a mesh; None where they were given as a group.
        names: of the dimensions of the mesh; "ranks" where they have none.
    """

    group: c10d.ProcessGroup
    mesh: DeviceMesh | None
    names: tuple[str, ...]

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks of the window."""
        return frozenset(c10d.get_process_group_ranks(self.group))

    def names_of(self, ranks: Iterable[int]) -> tuple[str, ...] | None:
        """The dimensions that ``ranks``, this one among them, are all the ranks of; or None.

        Dimensions of size 1 are counted in.
        """
        wanted = frozenset(ranks)
        for size in range(len(self.names), -1, -1):
            for names in combinations(self.names, size):
                if self._ranks_over(names) == wanted:
                    return names
        return None

    def group_over(self, names: tuple[str, ...]) -> c10d.ProcessGroup:
        """The ranks that differ from this one in dimensions ``names`` alone."""
        if names == self.names:
            return self.group
        assert self.mesh is not None
        return process_group_of("window_grad", self.mesh[names])

    def _ranks_over(self, names: tuple[str, ...]) -> frozenset[int]:
        if names == self.names:
            return self.ranks
        if self.mesh is None:
            return frozenset({c10d.get_rank()})
        return ranks_along(self.mesh, *map(self.names.index, names))


def data_axes(
    mesh: DeviceMesh | None = None, group: c10d.ProcessGroup | None = None
) -> DataAxes | None:
    """The dimensions of ``mesh``, or the one of ``group``; of all ranks where neither is given.

    Returns:
        None where there are no other ranks.

    Raises:
        ValueError: both are given, or this rank is not in the one that is.
    """
    ranks = data_group(mesh, group)
    if ranks is None:
        return None
    names = None if mesh is None else mesh.mesh_dim_names
    if names is None or len(names) == 1:
        return DataAxes(ranks, None, names or ("ranks",))
    return DataAxes(ranks, mesh, names)


def dim_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names of mesh dimensions, of which a single one may be given as text."""
    return (names,) if isinstance(names, str) else tuple(names)


def ranks_along(mesh: DeviceMesh, *dims: int) -> frozenset[int]:
    """The ranks of the mesh that differ from this one in ``dims`` alone."""
    here = mesh.get_coordinate()
    assert here is not None
    index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(here))
    return frozenset(mesh.mesh[index].flatten().tolist())
