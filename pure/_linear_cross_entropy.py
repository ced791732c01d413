"""Cross-entropy from hidden states: the logits of one chunk of tokens at a time."""

from typing import Any

import torch
from torch import Tensor

from ._masked import keep, require_shape, wide_dtype, widen
from ._supervision import Weighting, supervise
from .terms import LossTerms

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_size: int = 512,
    positions: Tensor | None = None,
    where: Tensor | None = None,
    ignore_index: int = -100,
    weighting: Weighting = "token",
    sample_ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossTerms:
    """``cross_entropy(hidden @ weight.T, labels)``, never holding the logits of all tokens.

    The logits of ``chunk_size`` tokens exist at a time. Where a gradient is wanted it is taken
    together with the value, chunk by chunk, so no logits are kept or computed twice, and memory is
    that of two chunks of logits and the gradients. The chunk size changes values and gradients by
    rounding alone, and not at all where the matrix products are exact.

    It composes with ``torch.func.grad``, ``vmap``, ``jvp`` and with each other, except that
    torch's custom functions have no ``jvp`` of ``jvp``: use ``jvp`` of ``grad``.

    Args:
        hidden: ``[..., H]`` hidden states.
        weight: ``[V, H]`` weight of the head, with the dtype of ``hidden``.
        labels: ``[...]`` int64, as in ``cross_entropy``.
        chunk_size: tokens whose logits exist at once.
        positions: ``[P]`` int64, distinct flat indices of the tokens to run through the head, made
            on the host when the batch is built, so that nothing waits for the device. They must
            list all supervised tokens: one left out counts neither in num nor in den. Listing
            unsupervised ones is harmless. None runs all tokens through the head.
        where: ``[...]`` bool, as in ``cross_entropy``.
        ignore_index: as in ``cross_entropy``.
        weighting: as in ``cross_entropy``.
        sample_ids: ``[...]`` int64, as in ``cross_entropy``.
        weights: ``[...]`` float, as in ``cross_entropy``.

    Returns:
        ``LossTerms`` of scalars, as ``cross_entropy`` returns.

    Raises:
        ValueError: shapes do not fit, ``chunk_size`` is below 1 or ``weighting`` is unknown.
        TypeError: ``where`` is not bool.

    Examples:
        >>> hidden, weight = torch.zeros(3, 2), torch.ones(4, 2)
        >>> labels = torch.tensor([1, -100, 3])
        >>> linear_cross_entropy(hidden, weight, labels, positions=torch.tensor([0, 2]))
        LossTerms(num=tensor(2.7726), den=tensor(2))

    References:
        Wijmans et al., "Cut your losses in large-vocabulary language models", 2024; Hsu et al.,
        "Liger Kernel", 2024: the gradient of a chunk taken in the forward pass.
    """
    name = "linear_cross_entropy"
    require_shape(name, "labels", labels, hidden.shape[:-1])
    require_shape(name, "weight", weight, torch.Size([weight.shape[0], hidden.shape[-1]]))
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be 1 or more, got chunk_size={chunk_size}.")
    hidden, weight = _autocast(hidden), _autocast(weight)
    supervision = supervise(
        labels,
        function=name,
        dtype=wide_dtype(hidden.dtype),
        where=where,
        ignore_index=ignore_index,
        weighting=weighting,
        sample_ids=sample_ids,
        weights=weights,
        positions=positions,
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    labels, mask, token_weights = (
        each.reshape(-1) for each in (labels, supervision.mask, supervision.weights)
    )
    if positions is not None:
        rows, labels, mask, token_weights = (
            each.index_select(0, positions) for each in (rows, labels, mask, token_weights)
        )
    num, *_ = _sum_and_gradient(
        keep(rows, mask.unsqueeze(-1)),
        weight,
        keep(labels, mask),
        token_weights,
        chunk_size,
        _wants_grad(hidden),
        _wants_grad(weight),
    )
    return LossTerms(num, supervision.den)


def _autocast(tensor: Tensor) -> Tensor:
    """The cast that autocast would make at each matrix product, made once and for both passes."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _wants_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _sum_and_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    chunk_size: int,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``F = Σ w · cross-entropy``, and its gradients as far as they are asked for.

    Asking is a guess at what ``backward`` will need (below a ``vmap`` it cannot be known) and
    decides on time alone: ``backward`` computes what is missing.
    """
    # torch.compile does not trace a Function that has a jvp, and has no use for one.
    function: Any = _Sum if torch.compiler.is_compiling() else _SumWithJvp
    return function.apply(hidden, weight, labels, weights, chunk_size, for_hidden, for_weight)


class _Sum(torch.autograd.Function):
    """``_sum_and_gradient`` as one node of the graph.

    The gradient is an output, and what ``backward`` multiplies is that output. Hence it is itself
    differentiable: the derivative of the gradient is a product with the Hessian of F, which is
    symmetric, so one function serves ``backward`` and ``jvp``.
    """

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        chunk_size: int,
        for_hidden: bool,
        for_weight: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not (for_hidden or for_weight):
            chunks = _chunks(chunk_size, hidden, labels)
            losses = [_picked_losses(_log_probs(h, weight), y) for h, y in chunks]
            return (torch.cat(losses) * weights).sum(), None, None
        losses, grads, total = [], [], None
        for h, y, w in _chunks(chunk_size, hidden, labels, weights.unsqueeze(1)):
            log_probs = _log_probs(h, weight)
            losses.append(_picked_losses(log_probs, y))
            residual = _softmax_minus_onehot_(log_probs, y, losses[-1]).to(weight.dtype)
            # The weights multiply the narrow side of a product, [tokens, H] and not [tokens, V].
            if for_hidden:
                grads.append((residual @ weight) * w)
            if for_weight:
                total = _add_product(total, residual.T, (h * w).to(weight.dtype))
            del log_probs, residual  # before the next chunk makes its own
        return (torch.cat(losses) * weights).sum(), torch.cat(grads) if for_hidden else None, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.chunk_size, _, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, weights, grad_hidden, grad_weight = ctx.saved_tensors
        inputs = (hidden, weight, labels, weights, ctx.chunk_size)
        out, *out_grads = cotangents
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        missing = (for_hidden and grad_hidden is None) or (for_weight and grad_weight is None)
        if out is not None and missing:
            _, grad_hidden, grad_weight = _sum_and_gradient(*inputs, for_hidden, for_weight)
        second_hidden = second_weight = None
        if any(each is not None for each in out_grads):
            _, second_hidden, second_weight = _hessian_product(*inputs, *out_grads)
        return (
            _cotangent(hidden, out, grad_hidden, second_hidden) if for_hidden else None,
            _cotangent(weight, out, grad_weight, second_weight) if for_weight else None,
            *(None,) * 5,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        # One after the other: together, a chunk of each would be as large as all the logits.
        results = [
            _sum_and_gradient(
                *(
                    each if dim is None else each.select(dim, i)
                    for each, dim in zip(inputs, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        columns = zip(*results, strict=True)
        stacked = tuple(None if each[0] is None else torch.stack(each) for each in columns)
        return stacked, tuple(None if each is None else 0 for each in stacked)


class _SumWithJvp(_Sum):
    """``_Sum`` with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, weights, *grads = ctx.saved_tensors
        first, *second = _hessian_product(
            hidden, weight, labels, weights, ctx.chunk_size, tangents[0], tangents[1]
        )
        kept = zip(grads, second, strict=True)
        return first, *(None if grad is None else change for grad, change in kept)


def _chunks(chunk_size: int, *tensors: Tensor) -> Any:
    """The tensors in pieces along their first dim; one empty piece of empty tensors."""
    return zip(*(tensor.split(chunk_size) for tensor in tensors), strict=True)


def _log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.T, dim=1, dtype=wide_dtype(hidden.dtype))


def _picked_losses(log_probs: Tensor, labels: Tensor) -> Tensor:
    return -log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)


def _softmax_minus_onehot_(log_probs: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """The gradient of ``losses`` for the logits, in the memory of ``log_probs``."""
    # expm1 is p - 1 without the rounding of p next to 1.
    return log_probs.exp_().scatter_(1, labels.unsqueeze(1), torch.expm1(-losses).unsqueeze(1))


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b`` in float32 or wider, in place on ``total``."""
    if total is None:
        return widen(a @ b)
    if total.dtype == a.dtype:
        return total.addmm_(a, b)
    return total.add_(a @ b)


def _cotangent(
    like: Tensor, out: Tensor | None, grad: Tensor | None, second: Tensor | None
) -> Tensor | None:
    total = second
    if out is not None and grad is not None:
        total = out * grad if second is None else out * grad + second
    return None if total is None else total.to(like.dtype)


def _hessian_product(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    chunk_size: int,
    v_hidden: Tensor | None,
    v_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``∇F · v`` and ``∇²F · v`` for F of ``_Sum``, in plain differentiable operations.

    Logits z change by ``dz``, and the gradient for z, ``w (p - onehot)``, by ``w p (dz - p · dz)``.
    """
    hidden, weight = widen(hidden), widen(weight)
    v_hidden = torch.zeros_like(hidden) if v_hidden is None else widen(v_hidden)
    v_weight = torch.zeros_like(weight) if v_weight is None else widen(v_weight)
    first, for_hidden, for_weight = [], [], torch.zeros_like(weight)
    for h, v, y, w in _chunks(chunk_size, hidden, v_hidden, labels, weights.unsqueeze(1)):
        p = torch.softmax(h @ weight.T, dim=1)
        dz = v @ weight.T + h @ v_weight.T
        residual = w * (p - torch.zeros_like(p).scatter(1, y.unsqueeze(1), 1.0))
        change = w * p * (dz - (p * dz).sum(dim=1, keepdim=True))
        first.append((residual * dz).sum())
        for_hidden.append(change @ weight + residual @ v_weight)
        for_weight = for_weight + change.T @ h + residual.T @ v
    return torch.stack(first).sum(), torch.cat(for_hidden), for_weight
