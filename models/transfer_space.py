"""The transfer space of DSpine: codes for tokens that hidden states are compared with.

The rows of the target's output head are directions in which hidden states predict tokens. Their
most variable r dimensions, whitened, are a small space in which both tokens and hidden states have
a place. It is found once, from the frozen head, and saved with the drafter.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

__all__ = ["TransferSpace", "transfer_space"]


class TransferSpace(NamedTuple):
    """Where tokens and hidden states meet.

    Attributes:
        codes: ``[V, r]``, a unit vector for each token.
        basis: ``[r, H]``, orthonormal rows: hidden states enter by ``basis @ h``.
    """

    codes: Tensor
    basis: Tensor


@torch.no_grad()
def transfer_space(head: Tensor, rank: int, *, chunk_size: int = 4096) -> TransferSpace:
    """The space of the ``rank`` most variable directions of a head's rows.

    ::

        n_v = E_v / |E_v|                               rows E_v of the head
        scatter = sum_v (n_v - mean) (n_v - mean)^T     = U diag(lambda) U^T, the r largest
        code_v = normalised lambda^(-1/2) U^T (n_v - mean)

    Eigenvectors have a free sign: compute it once and keep it, also where a run is resumed.

    Args:
        head: ``[V, H]``, the frozen output head.
        rank: r, at most H and V - 1.
        chunk_size: rows at once.

    Returns:
        Codes and basis in float32 or wider, without gradient.

    Raises:
        ValueError: ``rank`` or ``chunk_size`` is out of range, the head is not finite, or its
            rows vary in fewer than ``rank`` directions.

    Examples:
        >>> head = torch.tensor([[2.0, 1.0], [-2.0, 1.0], [4.0, 2.0]])
        >>> space = transfer_space(head, 1)
        >>> space.basis.abs(), (space.codes * space.codes[0]).T
        (tensor([[1., 0.]]), tensor([[ 1., -1.,  1.]]))
    """
    num_rows, width = head.shape
    if not 1 <= rank <= min(width, num_rows - 1) or chunk_size < 1:
        raise ValueError(
            "transfer_space: rank must be from 1 to min(H, V - 1) and chunk_size at least 1, got "
            f"rank={rank} and chunk_size={chunk_size} for a head [V, H] = {[num_rows, width]}."
        )
    dtype = torch.promote_types(head.dtype, torch.float32)
    chunks = [normalize(rows.to(dtype), dim=-1) for rows in head.split(chunk_size)]
    mean = torch.stack([rows.sum(0) for rows in chunks]).sum(0) / num_rows
    scatter = torch.zeros(width, width, dtype=dtype, device=head.device)
    for rows in chunks:
        centred = rows - mean
        scatter.addmm_(centred.T, centred)
    values, basis = _largest(scatter, rank)
    whitening = basis / values.sqrt()[:, None]
    codes = [normalize((rows - mean) @ whitening.T, dim=-1, eps=1e-12) for rows in chunks]
    return TransferSpace(torch.cat(codes), basis)


def _largest(scatter: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, and their eigenvectors as rows."""
    if not bool(scatter.isfinite().all()):
        raise ValueError("transfer_space: head must be finite, got NaN or infinity in it.")
    values, vectors = torch.linalg.eigh(scatter)
    values = values[-rank:]
    # What eigh leaves of a direction without variance is rounding, of either sign.
    noise = torch.finfo(values.dtype).eps * len(scatter) * values[-1].clamp_min(0)
    good = int((values > noise).sum())
    if good < rank:
        raise ValueError(
            f"transfer_space: the rows of the head must vary in {rank=} directions, got {good}. "
            "Take a smaller rank."
        )
    return values, vectors[:, -rank:].T.contiguous()
