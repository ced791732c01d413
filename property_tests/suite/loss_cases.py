"""Rows of tokens, each loss as a function of them, and what is recorded of a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numden.pure import LossTerms
from numden.pure.losses import (
    Weighting,
    binary_cross_entropy,
    cross_entropy,
    kl_divergence,
    linear_cross_entropy,
    squared_error,
    total_variation,
    z_loss,
)

# Values of a few hundred terms of size 1 to 10, summed in two orders: float64 rounding is 1e-13.
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
WEIGHTINGS: tuple[Weighting, ...] = ("token", "sample", "square")


class Rows(NamedTuple):
    """Some rows of tokens: what any of the losses may need, row by row."""

    x: Tensor  # [R, S, V] what is differentiated
    y: Tensor  # [R, S, V] what x is compared with
    labels: Tensor  # [R, S] int64
    where: Tensor  # [R, S] bool
    weights: Tensor  # [R, S]

    def take(self, index: Any) -> "Rows":
        return Rows(*(field[index] for field in self))


def _elementwise(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.unsqueeze(-1)


def labels_of(rows: Rows) -> Tensor:
    return rows.labels.masked_fill(~rows.where, -100)


def linear(rows: Rows, x: Tensor, **options: Any) -> LossTerms:
    head = torch.cos(torch.arange(3.0 * x.shape[-1], dtype=x.dtype)).reshape(3, -1)
    return linear_cross_entropy(x, head, rows.labels % 3, chunk_size=2, **options)


# The first use of forward mode loads torch's scripted decompositions, which warn about themselves.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

# Each takes rows and the x to use in their place, and the options where and weights.
LOSSES: dict[str, Callable[..., LossTerms]] = {
    "cross_entropy": lambda r, x, **o: cross_entropy(x, r.labels, **o),
    "cross_entropy_sample": lambda r, x, **o: cross_entropy(x, r.labels, weighting="sample", **o),
    "cross_entropy_square": lambda r, x, **o: cross_entropy(x, r.labels, weighting="square", **o),
    "linear_cross_entropy": linear,
    "linear_cross_entropy_square": lambda r, x, **o: linear(r, x, weighting="square", **o),
    "kl_divergence": lambda r, x, **o: kl_divergence(x, r.y, **o),
    "total_variation": lambda r, x, **o: total_variation(x, r.y, **o),
    "binary_cross_entropy": lambda r, x, **o: binary_cross_entropy(
        x, r.y.sigmoid(), **{k: _elementwise(v) for k, v in o.items()}
    ),
    "squared_error": lambda r, x, **o: squared_error(
        x, r.y, **{k: _elementwise(v) for k, v in o.items()}
    ),
    "z_loss": lambda r, x, **o: z_loss(x, **o),
}
each_loss = pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))


def make_rows(num_rows: int, num_tokens: int, vocab: int, seed: int) -> Rows:
    g = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_tokens)
    x, y = (torch.randint(-16, 17, (*shape, vocab), generator=g).double() / 8 for _ in range(2))
    return Rows(
        x,
        y,
        torch.randint(vocab, shape, generator=g),
        torch.rand(shape, generator=g) < 0.6,
        torch.randint(1, 9, shape, generator=g).double() / 4,
    )


@st.composite
def rows(draw: st.DrawFn, min_rows: int = 1) -> Rows:
    return make_rows(
        draw(st.integers(min_rows, 4)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2**16)),
    )


def value_and_grad(fun: Callable[[Tensor], LossTerms], x: Tensor) -> tuple[LossTerms, Tensor]:
    x = x.clone().requires_grad_()
    terms = fun(x)
    (grad,) = torch.autograd.grad(terms.num, x)
    return LossTerms(terms.num.detach(), terms.den), grad


def assert_terms(a: LossTerms, b: LossTerms) -> None:
    torch.testing.assert_close(a.num, b.num, **CLOSE)
    torch.testing.assert_close(a.den, b.den, **CLOSE)


class Ops(TorchDispatchMode):
    """Records each operation with the sizes of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, bool, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        by_mask = "index" in str(func) and any(t.dtype == torch.bool for t in tensors[1:])
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.calls.append((str(func.overloadpacket), by_mask, max(sizes, default=0)))
        return out

    @property
    def syncs(self) -> list[str]:
        waits = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "item", "equal"}
        calls = [(name.removeprefix("aten."), by_mask) for name, by_mask, _ in self.calls]
        return [name for name, by_mask in calls if by_mask or name in waits]
