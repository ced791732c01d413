"""Laws of the sums themselves: what makes them independent of how a batch is cut."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pure import tree
from ..pure.terms import LossFn
from .evaluation import add_values, evaluate, forward, sums
from .rows import join_rows, num_rows, take_rows
from .violation import Difference, LawViolation, check_equal

__all__ = [
    "additivity",
    "den_independence",
    "emptiness",
    "keyed_randomness",
    "padding",
    "permutation",
]


def additivity(
    loss_fn: LossFn,
    params: Any,
    batches: Sequence[Any],
    *,
    join: Callable[[Sequence[Any]], Any] = join_rows,
    exact: bool = False,
    rtol: float | None = None,
) -> None:
    """The sums of joined batches are the sums over the batches: ``s(a ∪ b) = s(a) + s(b)``.

    Numerators, denominators, metrics, and the gradient of each numerator.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batches: pytrees of tensors with rows on the leading axis; at least one.
        join: makes one batch of several.
        exact: the sums must agree in every bit; for values whose sums are exact in binary.
        rtol: see ``check_equal``.

    Raises:
        LawViolation: a sum differs.

    Examples:
        >>> from numden.pure import LossTerms
        >>> batches = [{"x": torch.tensor([8.0])}, {"x": torch.tensor([2.0, 2.0, 2.0])}]
        >>> right = lambda w, batch: LossTerms((w * batch["x"]).sum(), batch["x"].numel())
        >>> additivity(right, torch.tensor(1.0), batches, exact=True)
        >>> mean = lambda w, batch: LossTerms((w * batch["x"]).mean(), 1)
        >>> additivity(mean, torch.tensor(1.0), batches)
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: additivity: the sums of joined batches ...
          num: expected 10.0, got 3.5
          den: expected 2, got 1
          gradient of num by params: expected 10.0, got 3.5
        Usual cause: ...
    """
    check_equal(
        "additivity",
        "the sums of joined batches must be the sums over the batches.",
        "the loss divides by a count of the batch, or uses another statistic of it. Return the "
        "sum and the count; what must be global (a balancing loss) belongs into the objective.",
        add_values([evaluate(loss_fn, params, batch) for batch in batches]),
        evaluate(loss_fn, params, join(batches)),
        exact=exact,
        rtol=rtol,
    )


def permutation(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    order: Sequence[int],
    *,
    exact: bool = False,
    rtol: float | None = None,
) -> None:
    """The order of rows does not matter.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors with rows on the leading axis.
        order: the rows in another order, such as ``[2, 0, 1]``.
        exact: the sums must agree in every bit.
        rtol: see ``check_equal``.

    Raises:
        LawViolation: a sum differs.

    Examples:
        >>> from numden.pure import LossTerms
        >>> total = lambda w, batch: LossTerms((w * batch["x"]).sum(), batch["x"].numel())
        >>> permutation(total, torch.tensor(1.0), {"x": torch.tensor([8.0, 2.0])}, [1, 0])
    """
    check_equal(
        "permutation",
        f"rows in the order {list(order)} must give the same sums.",
        "something depends on the place of a row: a weight by position, a draw by position, "
        "or a neighbour. Give each row what it needs as a field of its own.",
        evaluate(loss_fn, params, batch),
        evaluate(loss_fn, params, take_rows(batch, order)),
        exact=exact,
        rtol=rtol,
    )


def padding(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    *,
    pad_row: Callable[[Any, int], Any] | None = None,
    pad_columns: Callable[[Any, int], Any] | None = None,
    num: int = 2,
    exact: bool = False,
    rtol: float | None = None,
) -> None:
    """Neutral rows, or columns, change nothing.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors.
        pad_row: ``(batch, n) -> batch`` with n more rows that nothing should be learned from.
        pad_columns: the same for columns: tokens behind the end of each row.
        num: how many to append.
        exact: the sums must agree in every bit.
        rtol: see ``check_equal``.

    Raises:
        ValueError: neither ``pad_row`` nor ``pad_columns`` is given.
        LawViolation: a sum differs.

    Examples:
        >>> from numden.pure import LossTerms
        >>> def pad_row(batch, n):
        ...     return {"x": torch.cat([batch["x"], torch.zeros(n)])}
        >>> count_all = lambda w, batch: LossTerms((w * batch["x"]).sum(), batch["x"].numel())
        >>> padding(count_all, torch.tensor(1.0), {"x": torch.ones(2)}, pad_row=pad_row)
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: padding: 2 neutral rows must change nothing.
          den: expected 2, got 4
        Usual cause: ...
    """
    pads = {"rows": pad_row, "columns": pad_columns}
    if not any(pads.values()):
        raise ValueError(
            "padding: needs to know how to pad, got pad_row=None and pad_columns=None. "
            "Give a function (batch, n) -> batch for one of them."
        )
    for kind, pad in pads.items():
        if pad is not None:
            check_equal(
                "padding",
                f"{num} neutral {kind} must change nothing.",
                "padding is counted, or masked in the numerator and counted in the "
                "denominator. Make both from one mask.",
                evaluate(loss_fn, params, batch),
                evaluate(loss_fn, params, pad(batch, num)),
                exact=exact,
                rtol=rtol,
            )


def emptiness(loss_fn: LossFn, params: Any, empty_batch: Any) -> None:
    """A batch with nothing to learn from has sums of exactly 0 and gradients of exactly 0.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        empty_batch: a batch without rows, or whose rows are all masked.

    Raises:
        LawViolation: a sum or a gradient is not 0 (NaN is not).

    Examples:
        >>> from numden.pure import LossTerms
        >>> mean = lambda w, batch: LossTerms((w * batch["x"]).mean(), batch["x"].numel())
        >>> emptiness(mean, torch.tensor(1.0), {"x": torch.zeros(0)})
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: emptiness: an empty batch must ...
          num: expected 0.0, got nan
        Usual cause: ...
    """
    got = evaluate(loss_fn, params, empty_batch)
    check_equal(
        "emptiness",
        "an empty batch must give exact zeros, in sums and in gradients.",
        "a mean over no elements (0/0), a count clamped to at least 1, a constant that is added "
        "per batch, or log(0) behind a mask. Sum what is there, and mask before the log.",
        {name: torch.zeros_like(value) for name, value in got.items()},
        got,
        exact=True,
    )


def den_independence(loss_fn: LossFn, params: Any, batch: Any, *, other_params: Any = None) -> None:
    """No denominator depends on the params: its gradient would be dropped.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors.
        other_params: if given, denominators must also have the same value at these params.

    Raises:
        LawViolation: a denominator requires grad, or has another value at ``other_params``.

    Examples:
        >>> from numden.pure import LossTerms
        >>> dice = lambda w, batch: LossTerms(2 * w * batch["x"].sum(), w + batch["x"].sum())
        >>> den_independence(dice, torch.tensor(1.0), {"x": torch.ones(2)})
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: den_independence: no denominator may ...
          den: expected a tensor without grad, got grad_fn=AddBackward0
        Usual cause: ...
    """
    law, rule = "den_independence", "no denominator may depend on the params."
    cause = (
        "weights or probabilities in the denominator that the params make. Detach them, or "
        "take a plan that differentiates the ratio (columns or replay)."
    )
    passed = forward(loss_fn, params, batch)
    dens = tree.named(passed.terms.den, "den")
    wrong = [
        Difference(name, "a tensor without grad", f"grad_fn={type(den.grad_fn).__name__}")
        for name, den in dens.items()
        if isinstance(den, Tensor) and den.requires_grad
    ]
    if wrong:
        raise LawViolation(law, rule, wrong, cause)
    if other_params is not None:
        others = sums(forward(loss_fn, other_params, batch))
        here = {name: value for name, value in sums(passed).items() if name in dens}
        there = {name: others[name] for name in here}
        check_equal(law, rule, cause, here, there, exact=True)


def keyed_randomness(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    *,
    exact: bool = False,
    rtol: float | None = None,
) -> None:
    """What a row adds does not depend on its companions, nor on its place among them.

    The rows one by one must add up to the batch, in its order and in reverse. A loss that draws
    from a global generator, or by the place in the batch, fails.

    Args:
        loss_fn: ``(params, batch) -> LossTerms`` or ``(LossTerms, metrics)``.
        params: a pytree of tensors or an ``nn.Module``.
        batch: a pytree of tensors with rows on the leading axis, each with its own key or id.
        exact: the sums must agree in every bit.
        rtol: see ``check_equal``.

    Raises:
        LawViolation: a sum differs.

    Examples:
        >>> from numden.pure import LossTerms
        >>> def dropout(w, batch):
        ...     kept = torch.rand(batch["x"].shape) < 0.5
        ...     return LossTerms((w * batch["x"] * kept).sum(), batch["x"].numel())
        >>> _ = torch.manual_seed(0)
        >>> keyed_randomness(dropout, torch.tensor(1.0), {"x": torch.arange(1.0, 9.0)})
        Traceback (most recent call last):
            ...
        numden.property_tests.violation.LawViolation: keyed_randomness: rows one by one must ...
        Usual cause: ...
    """
    rows = range(num_rows(batch))
    alone = add_values([evaluate(loss_fn, params, take_rows(batch, [row])) for row in rows])
    for order in (rows, rows[::-1]) if rows else ():
        check_equal(
            "keyed_randomness",
            f"rows one by one must add up to the batch in the order {list(order)}.",
            "draws from a generator that is shared, or keyed by the place in the batch. Give "
            "each row a key of its own and draw with numden.pure.random.",
            alone,
            evaluate(loss_fn, params, take_rows(batch, order)),
            exact=exact,
            rtol=rtol,
        )
