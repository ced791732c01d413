"""What people's loss functions return, as loss terms."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...pure import tree
from ...pure.terms import LossFn, LossTerms, Metrics, TermStructureError, den_per_num, split_metrics

__all__ = ["Output", "as_loss_fn", "call", "read_output"]

DenFn = Callable[[Any], Any]


class Output(NamedTuple):
    """What a loss function returned.

    Attributes:
        kind: ``"terms"``, sums and counts; ``"scalar"``, one number, a mean or a sum.
        terms: the loss terms; of a scalar, the number over a den of 0.
        metrics: sums reported beside the loss; none beside a scalar.
    """

    kind: Literal["terms", "scalar"]
    terms: LossTerms
    metrics: Metrics


def as_loss_fn(fn: Any, den_fn: DenFn | None = None) -> LossFn:
    """``fn`` as a function that returns ``LossTerms``, whatever of these it returns:

    - ``LossTerms``, or ``(LossTerms, metrics)``;
    - a plain tuple ``(num, den)``;
    - a scalar tensor, ``(scalar, dict)``, or an output or dict with a ``loss``, as Hugging Face
      models return: a mean over ``den_fn(batch)``, so that num is the scalar times it. Without
      ``den_fn`` the scalar is taken as a sum, and the den, which is not known, is 0.

    Args:
        fn: ``(params, batch) -> output``; or an ``nn.Module`` that is called as ``module(**batch)``
            and stands for its own params.
        den_fn: ``batch -> den``: what a scalar is the mean over.

    Examples:
        >>> mean = as_loss_fn(lambda w, x: (w * x).mean(), den_fn=lambda x: x.numel())
        >>> mean(torch.tensor(2.0), torch.tensor([1.0, 3.0]))
        LossTerms(num=tensor(8.), den=2)
        >>> as_loss_fn(lambda w, x: "low")(None, None)
        Traceback (most recent call last):
            ...
        TypeError: loss_fn: must return LossTerms, (LossTerms, metrics), (num, den), a scalar ...
    """

    def loss_fn(params: Any, batch: Any) -> LossTerms | tuple[LossTerms, Metrics]:
        output = read_output(call(fn, params, batch))
        if output.kind == "scalar" and den_fn is not None:
            den = den_fn(batch)
            mean = output.terms.num
            # In the dtype of the mean, which says how exact the product is.
            return LossTerms(mean * torch.as_tensor(den).to(mean), den)
        return (output.terms, output.metrics) if output.metrics else output.terms

    return loss_fn


def call(fn: Any, params: Any, batch: Any) -> Any:
    """``fn(params, batch)``, or ``module(**batch)`` for a module that is its own params.

    Raises:
        TypeError: ``fn`` is a module, and the batch no mapping.
    """
    if not isinstance(fn, nn.Module):
        return fn(params, batch)
    if isinstance(batch, Mapping):
        return (params if isinstance(params, nn.Module) else fn)(**batch)
    raise TypeError(
        "loss_fn: a module is called as module(**batch) and needs a mapping, got a batch of type "
        f"{type(batch).__name__}. Give a function (module, batch) -> LossTerms, and the module as "
        "params."
    )


def read_output(result: Any) -> Output:
    """What ``result`` is; see ``as_loss_fn``.

    Raises:
        TypeError: it is none of what a loss function may return.

    Examples:
        >>> read_output({"loss": torch.tensor(0.5), "logits": torch.zeros(2, 3)}).kind
        'scalar'
        >>> read_output((torch.tensor(6.0), 3)).terms
        LossTerms(num=tensor(6.), den=3)
    """
    if isinstance(result, LossTerms) or _has_terms_first(result):
        terms, metrics = split_metrics(result)
        return Output("terms", terms, metrics)
    scalar = _scalar_of(result)
    if scalar is not None:
        return Output("scalar", LossTerms(scalar, torch.zeros_like(scalar.detach())), {})
    if isinstance(result, tuple) and len(result) == 2 and _are_terms(*result):
        return Output("terms", LossTerms(*result), {})
    raise TypeError(
        "loss_fn: must return LossTerms, (LossTerms, metrics), (num, den), a scalar tensor, or an "
        f"output with a loss, got {_describe(result)}. {_advice(result)}"
    )


def _scalar_of(result: Any) -> Tensor | None:
    if isinstance(result, Tensor) and result.ndim == 0:
        return result if result.is_floating_point() else None
    if isinstance(result, Mapping):
        return _scalar_of(result.get("loss"))
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return _scalar_of(result[0])
    loss = getattr(result, "loss", None)
    return None if loss is None else _scalar_of(loss)


def _has_terms_first(result: Any) -> bool:
    return isinstance(result, tuple) and bool(result) and isinstance(result[0], LossTerms)


def _are_terms(num: Any, den: Any) -> bool:
    """Whether these are sums and counts; a loss beside logits is not."""
    leaves = tree.leaves((num, den))
    if not leaves or not all(isinstance(leaf, Tensor | int | float) for leaf in leaves):
        return False
    try:
        dens = den_per_num(LossTerms(num, den))
    except TermStructureError:
        return False
    nums = tree.leaves(num)
    return all(_shape(d) in ((), _shape(n)) for n, d in zip(nums, dens, strict=True))


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else ()


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)} and dtype {result.dtype}"
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} with the keys {list(result)}"
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {', '.join(map(_describe, result)) or 'nothing'}"
    return "None" if result is None else f"a {type(result).__name__}"


def _advice(result: Any) -> str:
    if isinstance(result, Tensor) and result.ndim:
        return "Return the sum of these losses and their number: LossTerms(losses.sum(), count)."
    if isinstance(result, Mapping) or hasattr(result, "loss"):
        return "Give the model its labels, so that its output has a scalar loss."
    if isinstance(result, float | int):
        return "Return a tensor, without item(): a number has no gradient."
    return "Return the sum and the count: LossTerms(loss_sum, token_count)."
