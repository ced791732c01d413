"""All sums of a window in one float64 buffer of one size, whatever each rank has to say.

Its size must not depend on the sums, or ranks that disagree would hang. So there is a header, in
which each rank that had a micro-step adds 1, how many numbers it has and a hash of their structure,
and each rank that failed adds 1: their totals show agreement without a second collective.
"""

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor

from ..pure import tree

__all__ = ["Header", "Packed", "pack", "skeleton", "unpack"]

_CAPACITY = 1024
# Four pieces of 13 bits: sums of squares over 4096 ranks stay exact in float64.
_HASH_PIECES, _HASH_BITS = 4, 13
_HEADER = 3 + 2 * _HASH_PIECES


class Header(NamedTuple):
    """What the ranks agree on, device scalars.

    Attributes:
        num_with: the number of ranks that had a micro-step.
        num_failed: the number of ranks whose loss function raised.
        size: the sum over ranks of how many numbers each had.
        apart: positive when the ranks that had a micro-step have sums of different structure.
    """

    num_with: Tensor
    num_failed: Tensor
    size: Tensor
    apart: Tensor


class Packed(NamedTuple):
    """A buffer to be reduced, and the rest of the sums where they did not fit."""

    buffer: Tensor
    rest: Tensor


def pack(sums: Any, failed: bool, device: torch.device) -> Packed:
    """Put a tree of float64 sums, or None for a rank without a micro-step, into a buffer."""
    buffer = torch.zeros(_HEADER + _CAPACITY, dtype=torch.float64, device=device)
    if failed:
        buffer[1] = 1
    if sums is None or failed:
        return Packed(buffer, buffer[:0])
    body = torch.cat([buffer[:0], *(leaf.reshape(-1).to(buffer) for leaf in tree.leaves(sums))])
    head = [1.0, 0.0, float(len(body))]
    head += [power for piece in _pieces(sums) for power in (piece, piece * piece)]
    buffer[:_HEADER] = torch.tensor(head, dtype=torch.float64).to(device, non_blocking=True)
    first = body[:_CAPACITY]
    buffer[_HEADER : _HEADER + len(first)] = first
    return Packed(buffer, body[_CAPACITY:])


def _pieces(sums: Any) -> list[int]:
    """A hash of the names and shapes of the sums, in small integers."""
    shapes = [tuple(leaf.shape) for leaf in tree.leaves(sums)]
    digest = hashlib.sha256(repr((tree.names(sums), shapes)).encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    return [(number >> (_HASH_BITS * i)) % (1 << _HASH_BITS) for i in range(_HASH_PIECES)]


def header(buffer: Tensor) -> Header:
    """The header of a reduced buffer."""
    num_with = buffer[0]
    first, second = buffer[3:_HEADER:2], buffer[4:_HEADER:2]
    # n Σh² ≥ (Σh)², with equality only when all h are the same.
    return Header(num_with, buffer[1], buffer[2], (num_with * second - first * first).sum())


def reduce_rest(packed: Packed, group: c10d.ProcessGroup) -> Tensor:
    """Sum what did not fit, once the reduced header says that all ranks have as much of it."""
    num_with, num_failed, size, apart = torch.stack(list(header(packed.buffer))).tolist()
    if num_failed or apart or not num_with or size / num_with <= _CAPACITY:
        return packed.rest
    rest = packed.rest
    if not len(rest):  # this rank had no micro-step
        rest = packed.buffer.new_zeros(int(size / num_with) - _CAPACITY)
    c10d.all_reduce(rest, group=group)
    return rest


def unpack(packed: Packed, like: Any) -> Any:
    """The sums in a reduced buffer, as a tree like ``like``."""
    leaves, structure = tree.flatten(like)
    body = torch.cat([packed.buffer[_HEADER:], packed.rest])
    parts = body[: sum(leaf.numel() for leaf in leaves)].split([leaf.numel() for leaf in leaves])
    shaped = [
        part.reshape(leaf.shape).to(leaf.device) for part, leaf in zip(parts, leaves, strict=True)
    ]
    return tree.unflatten(structure, shaped)


def fits(sums: Any) -> bool:
    """Whether all of the sums fit into the buffer, so that nothing is left to reduce."""
    return sum(leaf.numel() for leaf in tree.leaves(sums)) <= _CAPACITY


def skeleton(sums: Any) -> Any:
    """Zeros on the CPU with the structure of the sums, small enough to send as an object."""
    return tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=torch.float64), sums)
