"""The sums of a loss function and their gradients as named values, for laws to compare."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..pure import tree
from ..pure.terms import LossFn, LossTerms, Metrics, split_metrics

__all__ = [
    "Forward",
    "add_values",
    "backward",
    "differentiable",
    "evaluate",
    "forward",
    "leaves_of",
    "run",
    "sums",
]


class Forward(NamedTuple):
    """A forward pass, its graph still alive.

    Attributes:
        terms: what the loss function returned.
        metrics: the same, empty if there were none.
        leaves: the tensors to differentiate by, named by their place as code.
    """

    terms: LossTerms
    metrics: Metrics
    leaves: dict[str, Tensor]


def evaluate(loss_fn: LossFn, params: Any, batch: Any) -> dict[str, Tensor]:
    """All sums of ``loss_fn``, and the gradient of each numerator by each parameter, by name.

    A numerator that is no scalar is multiplied with the weights 1, 2, 3, … before it is
    differentiated: differences in its elements must not cancel.

    Examples:
        >>> fit = lambda w, x: LossTerms((w * x).sum(), x.numel())
        >>> evaluate(fit, torch.tensor(2.0), torch.tensor([1.0, 3.0]))
        {'num': tensor(8.), 'den': tensor(2), 'gradient of num by params': tensor(4.)}
    """
    passed = forward(loss_fn, params, batch)
    return sums(passed) | backward(passed)


def forward(loss_fn: LossFn, params: Any, batch: Any) -> Forward:
    """Run ``loss_fn`` on leaves of its own that share the memory of ``params``."""
    return run(loss_fn, *differentiable(params), batch)


def run(loss_fn: LossFn, params: Any, leaves: dict[str, Tensor], batch: Any) -> Forward:
    """Run ``loss_fn`` on ``params``, whose differentiable ``leaves`` are known."""
    with torch.enable_grad():
        return Forward(*split_metrics(loss_fn(params, batch)), leaves)


def sums(passed: Forward) -> dict[str, Tensor]:
    """The sums of a forward pass by name, detached, numbers as tensors."""
    values = tree.named(passed.terms.num, "num") | tree.named(passed.terms.den, "den")
    for name, terms in passed.metrics.items():
        root = f"metrics[{name!r}]"
        values |= tree.named(terms.num, f"{root}.num") | tree.named(terms.den, f"{root}.den")
    return {name: torch.as_tensor(value).detach() for name, value in values.items()}


def backward(passed: Forward) -> dict[str, Tensor]:
    """The gradient of each numerator by each leaf, zeros where one does not depend on the other."""
    grads = {}
    for name, num in tree.named(passed.terms.num, "num").items():
        for leaf, grad in zip(passed.leaves, _grads(num, passed.leaves), strict=True):
            grads[f"gradient of {name} by {leaf}"] = grad
    return grads


def _grads(num: Any, leaves: dict[str, Tensor]) -> Sequence[Tensor]:
    inputs = list(leaves.values())
    if not (inputs and isinstance(num, Tensor) and num.requires_grad):
        return [torch.zeros_like(leaf) for leaf in inputs]
    weights = torch.arange(1, num.numel() + 1, dtype=num.dtype, device=num.device)
    return torch.autograd.grad(
        num, inputs, weights.view(num.shape), retain_graph=True, materialize_grads=True
    )


def differentiable(params: Any) -> tuple[Any, dict[str, Tensor]]:
    """``params`` as fresh leaves that require grad, and these by name; a module stays itself."""
    if isinstance(params, nn.Module):
        return params, {n: p for n, p in leaves_of(params).items() if p.requires_grad}
    leaves, structure = tree.flatten(params)
    leaves = [leaf.detach().requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
    named = dict(zip(tree.names(params, "params"), leaves, strict=True))
    return tree.unflatten(structure, leaves), {n: x for n, x in named.items() if _is_float(x)}


def leaves_of(params: Any) -> dict[str, Any]:
    """The leaves of a tree, or the parameters of a module, by their place as code."""
    if isinstance(params, nn.Module):
        return {f"params.{name}": leaf for name, leaf in params.named_parameters()}
    return tree.named(params, "params")


def add_values(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of named values over several evaluations, over the names that occur in any."""
    totals: dict[str, Tensor] = {}
    for name, value in (item for part in parts for item in part.items()):
        totals[name] = totals[name] + value if name in totals else value
    return totals


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
