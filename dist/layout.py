"""Which gradients are partial over which mesh dimensions, and who sums them there.

A gradient is *partial* over a mesh dimension when each rank of it holds an addend. Every gradient
of a window must be summed exactly once over each dimension that the loss is summed over. Who does
it is stated for each parameter from who has done it already (FSDP2, the exchange of expert
parallelism), and not guessed from placements: a parameter of hybrid sharding has a Replicate
placement that FSDP2 has summed over.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..pure import tree
from ._axis import process_group_of
from ._data_axes import DataAxes, data_axes, dim_names, ranks_along

__all__ = ["By", "ReductionTable", "Rule", "explain_reduction", "reduction_rules"]


class By(StrEnum):
    """Who sums a gradient over the ranks of a mesh dimension, and how."""

    WINDOW = "window_grad, all-reduce"
    WINDOW_TO_SHARDS = "window_grad, reduce-scatter"
    FSDP = "FSDP2, reduce-scatter"
    FSDP_REPLICAS = "FSDP2, all-reduce"
    OWNER = "whole at its owner"
    DTENSOR = "DTensor, same data"
    FROZEN = "frozen"


class Rule(NamedTuple):
    """How the gradient of one parameter on a rank becomes that of the window.

    Attributes:
        name: of the parameter.
        summed_by: who sums it, by the name of the mesh dimension: each of the data once, and those
            that only cut tensors.
    """

    name: str
    summed_by: dict[str, By]

    def over(self, by: By) -> tuple[str, ...]:
        """The dimensions over which ``by`` sums."""
        return tuple(name for name, who in self.summed_by.items() if who is by)


class ReductionTable(NamedTuple):
    """The rules of all parameters. As text it has one line for parameters alike."""

    rules: tuple[Rule, ...]

    def __str__(self) -> str:
        dims = list(dict.fromkeys(dim for rule in self.rules for dim in rule.summed_by))
        numbers: dict[tuple[str, ...], int] = {}
        for rule in self.rules:
            alike = re.sub(r"\d+", "*", rule.name), *(rule.summed_by.get(dim, "-") for dim in dims)
            numbers[alike] = numbers.get(alike, 0) + 1
        rows = [("parameter", "number", *(f"summed over {dim} by" for dim in dims))]
        rows += [(name, str(number), *cells) for (name, *cells), number in numbers.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(map(str.ljust, row, widths)).rstrip()  # of a length that is theirs
            for row in rows
        )


def explain_reduction(
    params: Any,
    mesh: DeviceMesh | None = None,
    *,
    group: c10d.ProcessGroup | None = None,
    owned_over: str | Sequence[str] = (),
) -> ReductionTable:
    """Who sums which gradient over which mesh dimension in ``window_grad``: a table to print.

    Args:
        params: a pytree, a tree from ``shard``, or a module: plain, DDP or FSDP2.
        mesh: see ``window_grad``.
        group: see ``window_grad``.
        owned_over: see ``window_grad``.

    Returns:
        The table. Its ``rules`` are the data that ``window_grad`` itself goes by.

    Raises:
        ValueError: there are no ranks, or some gradient would not be summed exactly once over each
            dimension of the data.

    Examples:
        >>> import torch
        >>> from numden.dist import run_local
        >>> params = {"layers": [torch.zeros(2), torch.zeros(2)], "norm": torch.zeros(2)}
        >>> print(run_local(lambda: str(explain_reduction(params)), 2)[0])
        parameter       number  summed over ranks by
        ['layers'][*]   2       window_grad, all-reduce
        ['norm']        1       window_grad, all-reduce
    """
    if mesh is None and group is None:
        group = process_group_of("explain_reduction", None)
    axes = data_axes(mesh, group)
    assert axes is not None
    rules = reduction_rules(params, axes, owned_over)
    if isinstance(params, nn.Module):
        module = params.module if isinstance(params, DistributedDataParallel) else params
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        nobody = dict.fromkeys(axes.names, By.FROZEN)
        rules += [Rule(name, nobody) for name in frozen]
    return ReductionTable(tuple(rules))


def reduction_rules(
    params: Any, axes: DataAxes, owned_over: str | Sequence[str] = ()
) -> list[Rule]:
    """The rules of all parameters with a gradient, in the order of the leaves of gradients."""
    owned = dim_names(owned_over)
    if isinstance(params, DistributedDataParallel):
        params = params.module
    if isinstance(params, nn.Module):
        reduced = _by_fsdp(params)
        leaves = {name: p for name, p in params.named_parameters() if p.requires_grad}
        leaves = {name: leaves[name] for name in sorted(leaves)}  # as trees of dicts have them
        others = _refuse
    else:
        reduced, leaves, others = {}, tree.named(params), _of_window
    rules, known = [], {}  # a model has few layouts, and each window asks for all its parameters
    for name, leaf in leaves.items():
        by_fsdp = reduced.get(id(leaf), {})
        cut = (leaf.device_mesh, leaf.placements) if isinstance(leaf, DTensor) else None
        layout = cut, id(by_fsdp) if by_fsdp else None
        if layout not in known:
            known[layout] = _summed_by(name, leaf, _Who(axes, owned, by_fsdp, others))
        rules.append(Rule(name, known[layout]))
    _require_owned(rules, owned)
    return rules


class _Who(NamedTuple):
    """What it takes to say who sums a gradient."""

    axes: DataAxes
    owned: tuple[str, ...]
    by_fsdp: dict[frozenset[int], By]
    by_others: Callable[[str, DTensor, int], By]


def _summed_by(name: str, leaf: Tensor, who: _Who) -> dict[str, By]:
    of_data: dict[str, By] = {}
    of_cuts: dict[str, By] = {}
    if isinstance(leaf, DTensor):
        dims_by: dict[By, list[int]] = defaultdict(list)
        for dim in range(leaf.device_mesh.ndim):
            dims_by[_who_sums(name, leaf, dim, who)].append(dim)
        cuts = dims_by.pop(By.DTENSOR, [])
        of_cuts = {_dim_name(leaf.device_mesh, dim): By.DTENSOR for dim in cuts}
        for by, dims in _together(leaf.device_mesh, dims_by, who.axes).items():
            for data in _names_of(name, leaf.device_mesh, dims, by, who.axes):
                of_data.setdefault(data, by)
    return {data: of_data.get(data, By.WINDOW) for data in who.axes.names} | of_cuts


def _together(
    mesh: DeviceMesh, dims_by: dict[By, list[int]], axes: DataAxes
) -> dict[By, list[int]]:
    """Both dimensions of hybrid sharding as one, where the window knows them as one."""
    replicas = dims_by.get(By.FSDP_REPLICAS, [])
    if not replicas or axes.names_of(ranks_along(mesh, *replicas)) is not None:
        return dims_by
    both = {By.FSDP: replicas + dims_by.get(By.FSDP, [])}
    return {by: dims for by, dims in dims_by.items() if by is not By.FSDP_REPLICAS} | both


def _who_sums(name: str, leaf: DTensor, dim: int, who: _Who) -> By:
    ranks = ranks_along(leaf.device_mesh, dim)
    if ranks in who.by_fsdp:
        return who.by_fsdp[ranks]
    if _dim_name(leaf.device_mesh, dim) in who.owned and _is_cut(leaf, dim):
        return By.OWNER
    if len(ranks & who.axes.ranks) == 1 < len(ranks):
        return By.DTENSOR
    return who.by_others(name, leaf, dim)


def _of_window(name: str, leaf: DTensor, dim: int) -> By:
    return By.WINDOW_TO_SHARDS if _is_cut(leaf, dim) else By.WINDOW


def _refuse(name: str, leaf: DTensor, dim: int) -> By:
    mesh = leaf.device_mesh
    raise ValueError(
        "window_grad: DTensors of a module must lie across the ranks of the window, got one on "
        f"ranks {sorted(mesh.mesh.flatten().tolist())}, {name}: DTensor sums its gradient itself. "
        "Give window_grad the mesh of the data dimensions alone, and name those along which "
        "experts are cut: owned_over='ep'."
    )


def _names_of(
    name: str, mesh: DeviceMesh, dims: list[int], by: By, axes: DataAxes
) -> tuple[str, ...]:
    ranks = ranks_along(mesh, *dims)
    found = axes.names_of(ranks)
    if found is None:
        what = "an FSDP2 module" if by in (By.FSDP, By.FSDP_REPLICAS) else "params from shard"
        raise ValueError(
            f"window_grad: {what} must be on the ranks of the window, got ranks {sorted(ranks)} "
            f"for a window over {sorted(axes.ranks)}: the gradient of {name} would be the sum over "
            "other ranks than the loss. Give window_grad the mesh that they are on."
        )
    return found


def _require_owned(rules: list[Rule], owned: tuple[str, ...]) -> None:
    if owned and not any(rule.over(By.OWNER) for rule in rules):
        raise ValueError(
            "window_grad: owned_over names mesh dimensions along which parameters are cut, got "
            f"owned_over={owned} and no parameter that is. Cut the experts: "
            f"shard(experts, mesh[{owned[0]!r}])."
        )


def _is_cut(leaf: DTensor, dim: int) -> bool:
    return not leaf.placements[dim].is_replicate()


def _dim_name(mesh: DeviceMesh, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dim {dim}"


def _by_fsdp(module: nn.Module) -> dict[int, dict[frozenset[int], By]]:
    """The sets of ranks that FSDP2 sums over, for each of its parameters by id.

    Only FSDP2's own record tells them from the dimensions of tensor or expert parallelism.
    """
    found: dict[int, dict[frozenset[int], By]] = {}
    of_mesh: dict[Any, dict[frozenset[int], By]] = {}
    for part in module.modules():
        for group in _param_groups(part) if isinstance(part, FSDPModule) else ():
            for each in group.fsdp_params:
                mesh, cut = each.mesh_info.mesh, each.mesh_info.shard_mesh_dim
                if (mesh, cut) not in of_mesh:
                    of_mesh[mesh, cut] = _over_dims(mesh, cut)
                found[id(each.sharded_param)] = of_mesh[mesh, cut]
    return found


def _over_dims(mesh: DeviceMesh, cut: int | None) -> dict[frozenset[int], By]:
    """The ranks along each dimension of FSDP2's mesh, one of which shards are cut over."""
    return {
        ranks_along(mesh, dim): By.FSDP if dim == cut else By.FSDP_REPLICAS
        for dim in range(mesh.ndim)
    }


def _param_groups(part: FSDPModule) -> list[Any]:
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return groups
