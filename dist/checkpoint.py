"""Checkpoints that are whole or not there, written and resharded by torch.distributed.checkpoint.

    save("runs/a", state, extra={"position": position._asdict(), "key": key}, keep=2)
    state, extra = load("runs/a", init_state(params, optimizer), extra={...})

**Whole or not there.** All ranks write into a folder with a name of its own; when all have
finished, rank 0 adds a marker and renames it. What a killed process leaves is never loaded. The
ranks must see one file system.

**Resharding.** Replicated tensors are written once, DTensors (those of ``shard``, FSDP2 and tensor
parallelism) by who holds them, so a checkpoint can be loaded on any number of ranks. Each leaf has
a name, its place in the state, and nothing is pickled but what torch.distributed.checkpoint says of
its own files.

**In the middle of a window** the carry of ``accumulator`` is saved for each rank: its share of the
gradients and sums. As many ranks get their own shares back, bit for bit; on another number rank 0
gets the sum of all shares and the others shares of nothing, and the micro-steps that are left may
be dealt out as one likes, since totals do not depend on who adds what.

**An FSDP2 module** has no carry. What it has accumulated in an unfinished window are unsharded
gradients, private to FSDP2 and as large as the whole model on each rank. So one saves the state
between windows and repeats the micro-steps of the window that was cut off: they give the same bits
again, because draws are keyed, on any number of ranks. It costs the time of at most one window at a
restart, and no memory; accumulators of our own would need a reduce-scatter in each micro-step
(that is ``plan="columns"``), at all times and for the sake of rare restarts.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..pure import tree
from . import _checkpoint_folder as folders
from ._carries import describe, empty_share, from_description, whole_share
from ._checkpoint_folder import latest as latest
from ._together import by_each, by_first, num_ranks, rank
from .fsdp import reshard

if TYPE_CHECKING:
    from .train import TrainState

__all__ = ["latest", "load", "save"]


def save(
    folder: str | os.PathLike[str],
    state: "TrainState",
    *,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint; all ranks call it, and it is whole when it returns.

    Args:
        folder: of the run's checkpoints; it is made if it is not there. One run writes at a time.
        state: between windows, or with the ``carry`` of this rank's unfinished window.
        extra: what else a run needs to go on, the same on all ranks: a pytree of tensors and
            numbers, like the data position and RNG keys.
        keep: remove all but the last so many, when this one is whole.

    Returns:
        The checkpoint's own folder, ``step-00000012`` after 12 windows.

    Raises:
        TypeError: a leaf is neither a tensor nor a number.
        ValueError: ``keep`` is not positive, or some ranks have a carry and others none.
        FileNotFoundError: a rank does not see the folder that rank 0 has made.

    Examples:
        >>> import tempfile
        >>> from numden.dist import TrainState
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(folder, TrainState({"w": torch.ones(2)}, {"count": 3}, step=3))
        ...     like = TrainState({"w": torch.zeros(2)}, {"count": 0})
        ...     path.name, load(folder, like)[0].params
        ('step-00000003', {'w': tensor([1., 1.])})
    """
    leaves: dict[str, Tensor] = {}

    def check() -> tuple[Any, int]:
        if keep is not None and keep < 1:
            raise ValueError(f"save: keep must be at least 1, got keep={keep}.")
        leaves.update(_tensors(_named(state, extra), "save"))
        leaves.update(_named_carry(rank(), state.carry))
        return describe(state.carry), 0 if state.carry is None else int(state.carry.step)

    carries, num_micro_steps = zip(*by_each(check), strict=True)
    _require_all_or_none(carries)
    done = None if carries[0] is None else sum(num_micro_steps)
    unfinished, path = by_first(lambda: folders.begin(Path(folder), state.step, done))
    by_each(lambda: _require_shared(unfinished))
    with _alone():
        state_dict_saver.save(
            leaves, storage_writer=FileSystemWriter(unfinished), no_dist=not c10d.is_initialized()
        )
    by_first(lambda: folders.finish(unfinished, path, {"carries": carries}, keep))
    return path


def load(
    path: str | os.PathLike[str], like: "TrainState", *, extra: Any = None
) -> tuple["TrainState", Any]:
    """Read a checkpoint; all ranks call it, as many as there may be now.

    Args:
        path: a checkpoint, or a folder of which the last whole one is taken.
        like: a state with the structure, shapes, dtypes and placements that are wanted, such as
            ``init_state`` makes. A module in it is loaded in place; of other tensors nothing is
            changed. Its carry plays no part.
        extra: a pytree like the one that was saved; None if it is not wanted.

    Returns:
        The state and what was saved beside it. ``state.carry`` is this rank's share of the
        unfinished window, see the module's docstring; None between windows.

    Raises:
        FileNotFoundError: there is no whole checkpoint.
        ValueError: a leaf is missing, unknown, or of another shape or dtype; or an unfinished
            window that cannot go on on this number of ranks.
    """
    found = by_first(lambda: folders.require_whole(Path(path)))
    like = like._replace(carry=None)
    wanted = _named(like, extra)
    in_place = _module_tensors(like.params)
    fresh = {name: _target(leaf) for name, leaf in wanted.items() if name not in in_place}
    targets = in_place | fresh
    reader = FileSystemReader(found)
    by_each(lambda: _require_fitting(_tensors(targets, "load"), _saved(reader), extra is not None))
    tensors = _tensors(targets, "load")
    with _alone():
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=not c10d.is_initialized())
    carry: list[Any] = []
    by_each(lambda: carry.append(_carry(found, reader, like.params)))
    state, extra = _rebuilt(like, extra, wanted, tensors)
    return state._replace(carry=carry[0]), extra


def _named(state: "TrainState", extra: Any) -> dict[str, Any]:
    """Each leaf by its place, without the carry."""
    params = state.params
    if isinstance(params, nn.Module):
        params = _state_dict(params)
    whole = state._replace(params=params, carry=None)
    return tree.named(whole, "state") | tree.named(extra, "extra")


def _state_dict(module: nn.Module) -> dict[str, Any]:
    reshard(module)  # FSDP2's root stays gathered after a pass without gradients
    return dict(module.state_dict())


def _module_tensors(params: Any) -> dict[str, Tensor]:
    """A module's own tensors by their names in a checkpoint, to be loaded in place."""
    if not isinstance(params, nn.Module):
        return {}
    return tree.named(_state_dict(params), "state.params")


def _tensors(leaves: dict[str, Any], function: str) -> dict[str, Tensor]:
    """Tensors as they are, numbers as tensors of 64 bits."""
    return {name: _tensor(name, leaf, function) for name, leaf in leaves.items()}


def _tensor(name: str, leaf: Any, function: str) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
    if type(leaf) not in dtypes:
        raise TypeError(
            f"{function}: leaves must be tensors or numbers, got {name} of type "
            f"{type(leaf).__name__}. Leave it out, or write it as numbers."
        )
    return torch.tensor(leaf, dtype=dtypes[type(leaf)])


def _target(leaf: Any) -> Any:
    return torch.empty_like(leaf.detach()) if isinstance(leaf, Tensor) else leaf


def _rebuilt(
    like: "TrainState", extra: Any, wanted: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple["TrainState", Any]:
    """The trees of ``like`` and ``extra`` with what was loaded."""
    loaded = iter(
        tensors[name] if isinstance(leaf, Tensor) else type(leaf)(tensors[name].item())
        for name, leaf in wanted.items()
    )
    params = like.params
    if isinstance(params, nn.Module):
        like = like._replace(params=_state_dict(params))
    state = tree.map(lambda _: next(loaded), like)
    if isinstance(params, nn.Module):
        state = state._replace(params=params)  # which was loaded in place
    return state, tree.map(lambda _: next(loaded), extra)


def _saved(reader: FileSystemReader) -> dict[str, TensorStorageMetadata]:
    found = reader.read_metadata().state_dict_metadata
    return {k: meta for k, meta in found.items() if isinstance(meta, TensorStorageMetadata)}


def _require_fitting(
    wanted: dict[str, Tensor], saved: dict[str, TensorStorageMetadata], with_extra: bool
) -> None:
    roots = ("state", "extra") if with_extra else ("state",)
    there = {name: meta for name, meta in saved.items() if name.startswith(roots)}
    missing, unknown = wanted.keys() - there.keys(), there.keys() - wanted.keys()
    if missing or unknown:
        raise ValueError(
            f"load: like and extra must have the leaves that were saved, got {_some(missing)} that "
            f"the checkpoint lacks and {_some(unknown)} that it has. Make them as the run did that "
            "saved it."
        )
    for name, leaf in wanted.items():
        had, has = _kind(there[name].size, there[name].properties.dtype), _kind_of(leaf)
        if had != has:
            raise ValueError(
                f"load: a leaf must be as it was saved, got {name} of {has} for {had}. Make like "
                "with the same configuration."
            )


def _some(names: Any) -> str:
    """The first names of several."""
    few = sorted(names)[:3]
    more = f" and {len(names) - len(few)} more" if len(names) > len(few) else ""
    return ", ".join(few) + more if few else "none"


def _kind(shape: Any, dtype: torch.dtype) -> str:
    return f"{dtype} {list(shape)}"


def _kind_of(leaf: Tensor) -> str:
    return _kind(leaf.shape, leaf.dtype)


def _require_all_or_none(carries: Sequence[Any]) -> None:
    without = [owner for owner, carry in enumerate(carries) if carry is None]
    if without and len(without) < len(carries):
        raise ValueError(
            f"save: in an unfinished window each rank must have a carry, got none on ranks "
            f"{without}. A rank without a micro-step has that of init."
        )


def _require_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"save: all ranks must see the folder that rank 0 has made, got {str(folder)!r} not "
            f"seen by rank {rank()}. Save to a file system that the hosts share."
        )


def _named_carry(owner: int, carry: Any) -> dict[str, Any]:
    return tree.named(carry, f"carry[{owner}]")


def _carry(path: Path, reader: FileSystemReader, params: Any) -> Any:
    """This rank's share of the unfinished window."""
    carries = folders.marker_of(path)["carries"]
    leaves = params.parameters() if isinstance(params, nn.Module) else tree.leaves(params)
    device = next((leaf.device for leaf in leaves), None)
    if carries[0] is None:
        return None
    if len(carries) == num_ranks():
        return _read_carry(reader, rank(), carries[rank()], device)
    if rank() == 0:  # which reads one share at a time
        shares = (_read_carry(reader, owner, each, device) for owner, each in enumerate(carries))
        return whole_share(shares)
    begun = [owner for owner, each in enumerate(carries) if from_description(each).sums is not None]
    owner = begun[0] if begun else 0
    return empty_share(_read_carry(reader, owner, carries[owner], device))


def _read_carry(
    reader: FileSystemReader, owner: int, description: Any, device: torch.device | None
) -> Any:
    places = from_description(description)
    saved = _saved(reader)
    tensors = {
        name: _empty(saved[name], strides, device)
        for name, strides in _named_carry(owner, places).items()
    }
    with _alone():
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    return tree.unflatten(tree.structure(places), list(tensors.values()))


def _empty(saved: TensorStorageMetadata, strides: str, device: torch.device | None) -> Tensor:
    stride = [int(each) for each in strides.split(",") if each]
    dtype = saved.properties.dtype
    return torch.empty_strided(tuple(saved.size), stride, dtype=dtype, device=device)


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that one process saves or loads for itself, which is what we want."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield
