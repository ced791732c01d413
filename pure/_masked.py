"""Sums over places that count: masks, weights and the dtype that sums are taken in."""

import torch
from torch import Tensor

from .terms import LossTerms

__all__ = [
    "count",
    "keep",
    "keep_rows",
    "require_mask",
    "require_shape",
    "require_weights",
    "sum_terms",
    "wide_dtype",
    "widen",
]

_HALF = (torch.float16, torch.bfloat16)


def keep(values: Tensor, mask: Tensor | None) -> Tensor:
    """``values`` with zeros where ``mask`` is False, whatever stood there.

    Put before a loss, it keeps infinities and NaN of places that do not count out of the value
    and, which multiplying by 0 would not, out of the gradient.
    """
    return values if mask is None else values.masked_fill(~mask, 0)


def require_mask(function: str, where: Tensor | None, shape: torch.Size) -> Tensor | None:
    """``where`` in the given shape, None if there is none.

    Raises:
        TypeError: it is not bool.
        ValueError: it does not broadcast.
    """
    if where is None:
        return None
    if where.dtype != torch.bool:
        raise TypeError(
            f"{function}: where must be bool, got where.dtype={where.dtype}. Compare the mask "
            "first, as in mask > 0; for weights of tokens give weights."
        )
    return _broadcast(function, "where", where, shape)


def require_weights(function: str, weights: Tensor, shape: torch.Size) -> Tensor:
    """``weights`` in the given shape.

    Raises:
        ValueError: they do not broadcast, or require grad.
    """
    if weights.requires_grad:
        raise ValueError(
            f"{function}: weights are constants, got weights with requires_grad=True, whose "
            "gradient through den would be dropped. Detach them."
        )
    return _broadcast(function, "weights", weights, shape)


def _broadcast(function: str, name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    if tensor.dim() > len(shape) or any(got not in (1, size) for got, size in sizes):
        raise ValueError(
            f"{function}: {name} must broadcast to {list(shape)}, got {name} of shape "
            f"{list(tensor.shape)}. Give one value for each element of the loss."
        )
    return tensor.expand(shape)


def require_shape(function: str, name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless ``tensor`` has the given shape."""
    if tensor.shape != shape:
        raise ValueError(
            f"{function}: {name} must have shape {list(shape)}, got {name} of shape "
            f"{list(tensor.shape)}. Sums do not broadcast: reshape it first."
        )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of ``dtype`` are taken: float32 for half precision, else itself."""
    return torch.float32 if dtype in _HALF else dtype


def widen(values: Tensor) -> Tensor:
    """``values`` in float32 if they are in half precision, else as they are."""
    return values.to(wide_dtype(values.dtype))


def keep_rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """``values [..., V]`` in float32 or wider, with zeros in the rows that do not count."""
    return widen(values if mask is None else keep(values, mask.unsqueeze(-1)))


def count(mask: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """The int64 number of places of ``shape`` that count."""
    if mask is not None:
        return mask.sum()
    return torch.full((), shape.numel(), dtype=torch.int64, device=device)


def sum_terms(
    function: str, loss: Tensor, mask: Tensor | None, weights: Tensor | None
) -> LossTerms:
    """The loss terms of ``loss [...]``, each element of which is one thing to count."""
    loss = keep(loss, mask)
    if weights is None:
        return LossTerms(loss.sum(), count(mask, loss.shape, loss.device))
    weights = keep(require_weights(function, weights, loss.shape), mask).to(loss.dtype)
    return LossTerms((loss * weights).sum(), weights.sum())
