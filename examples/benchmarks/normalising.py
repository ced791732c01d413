"""Two ways to divide a window's sums over ranks: once, or in each micro-step as trainers do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from numden import dist
from numden.property_tests.counters import count_collectives, count_host_syncs
from numden.pure import LossFn, LossTerms, term_mean, tree
from numden.pure.terms import split_metrics

Weights = Mapping[str, float]
Step = Callable[[], Any]
"""One window: its gradient."""


def per_window(
    loss_fn: LossFn, weights: Weights, params: Any, window: Sequence[Any], **options: Any
) -> Step:
    """numden: sums; one packed all-reduce of them."""
    grad = dist.window_grad(loss_fn, term_mean(weights), plan="after", **options)
    return lambda: grad(params, window).grads


def per_micro_step(
    loss_fn: LossFn,
    weights: Weights,
    params: Any,
    window: Sequence[Any],
    *,
    importance: Callable[[float], float] = lambda den: 1.0,
) -> Step:
    """As trainers do it: each forward pass sums its denominator over ranks, and reads it.

    They read it to divide by at least one. The gradient is the mean of the means of micro-steps.
    With the denominator itself as a micro-step's ``importance`` in this mean, which costs nothing,
    it is the gradient of the window's mean.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``, with a dict of nums
            and one den.
        weights: of the nums.
        params: a replicated tree, or an FSDP2 module.
        window: of this rank, as long on all ranks.
        importance: of a micro-step, by its denominator.
    """

    def loss(params: Any, batch: Any) -> tuple[Tensor, float]:
        terms: LossTerms = split_metrics(loss_fn(params, batch))[0]
        total = torch.as_tensor(terms.den, dtype=torch.float64).clone()
        c10d.all_reduce(total)
        den = float(total)
        num = torch.stack([weight * terms.num[name] for name, weight in weights.items()]).sum()
        return importance(den) * num / max(den, 1.0), importance(den)

    run = _on_module if isinstance(params, nn.Module) else _on_tree
    return lambda: run(loss, params, window)


def _on_tree(loss: Callable[..., Any], params: Any, window: Sequence[Any]) -> Any:
    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), params)
    divisor = 0.0
    for batch in window:
        share, importance = loss(leaves, batch)
        share.backward()
        divisor += importance
    grads = tree.map(lambda leaf: leaf.grad, leaves)
    assert c10d.group.WORLD is not None
    together = c10d.AllreduceCoalescedOptions()
    c10d.group.WORLD.allreduce_coalesced(tree.leaves(grads), together).wait()
    return tree.map(lambda grad: grad.div_(divisor), grads)


def _on_module(loss: Callable[..., Any], module: Any, window: Sequence[Any]) -> Any:
    dist.sum_gradients(module)
    divisor = 0.0
    for i, batch in enumerate(window):
        module.set_requires_gradient_sync(i == len(window) - 1)
        share, importance = loss(module, batch)
        share.backward()
        divisor += importance
    grads = {name: param.grad.div_(divisor) for name, param in module.named_parameters()}
    module.zero_grad()
    return grads


def calls(step: Step) -> dict[str, int]:
    """Collectives of a window, and reads in which its host would wait for a device."""
    with count_collectives() as collectives:
        step()
    with count_host_syncs() as reads:
        step()
    waits = [place for place in reads.places if not any(name in place for name in _ON_HOST)]
    return {"collectives": collectives.total(), "host reads": len(waits)}


_ON_HOST = ("objective.py", "_data_axes.py")
"""Made-up totals and the ranks of a mesh are on the host, whatever the device."""


def apart(grads: Any, expected: Any) -> float:
    """The largest distance of a parameter's gradient, as a share of its length."""
    pairs = zip(tree.leaves(grads), tree.leaves(expected), strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
