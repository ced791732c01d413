"""Small problems to try a step on, with every field that real steps are seen to miscount.

In each, the params are ``{"w": scalar}`` and a token at w = 1 has the loss and the gradient that
the batch states: numbers that are exact in binary and easy to follow by hand.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from ...pure.objective import Objective, term_mean
from ...pure.terms import LossFn, LossTerms

__all__ = ["Problem", "token_batch", "tokens", "tokens_and_balance", "tokens_packed", "two_heads"]

Batch = dict[str, Tensor]


class Problem(NamedTuple):
    """A loss, and what to try it on.

    Attributes:
        loss_fn: ``(params, batch) -> LossTerms``: the sums that are right.
        params: a pytree of tensors or an ``nn.Module``.
        batches: draws batches with rows on the leading axis.
        objective: from total sums to the loss.
    """

    loss_fn: LossFn
    params: Any
    batches: SearchStrategy[Any]
    objective: Objective = term_mean()


def tokens() -> Problem:
    """The mean loss of tokens: ``Σ w · losses · mask / Σ mask``.

    Fields of a batch, ``B`` rows of ``T`` columns:

    - ``losses`` ``[B, T]``, float64: the loss of each position at w = 1, masked or not.
    - ``mask`` ``[B, T]``, bool: the positions that are scored.
    - ``labels`` ``[B, T]``, int64: -100 where nothing is supervised. Column 0 may have a label, but
      nothing predicts it, so it is not scored.
    - ``attention_mask`` ``[B, T]``, int64: 0 on padding.

    Examples:
        >>> problem = tokens()
        >>> batch = token_batch([[8.0], [2.0, 2.0, 2.0]])
        >>> problem.loss_fn(problem.params, batch)
        LossTerms(num=tensor(14., dtype=torch.float64), den=tensor(4))
    """
    return Problem(_token_sums, _params(), _token_batches())


def tokens_and_balance() -> Problem:
    """The mean loss of tokens, and a term that each micro-step makes as a mean of its own.

    Terms are ``ce``, as in ``tokens``, and ``balance``, the mean over a micro-batch's rows of
    ``batch["balance"]`` ``[B]``, whose den is 1 for each micro-batch.

    Examples:
        >>> problem = tokens_and_balance()
        >>> batch = token_batch([[8.0]]) | {"balance": torch.tensor([0.5]).double()}
        >>> problem.objective(problem.loss_fn(problem.params, batch))
        tensor(8.5000, dtype=torch.float64)
    """

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        ce = _token_sums(params, batch)
        balance = params["w"] * batch["balance"].mean()
        return LossTerms({"ce": ce.num, "balance": balance}, {"ce": ce.den, "balance": 1})

    return Problem(loss_fn, _params(), _token_batches(per_row="balance"))


def tokens_packed() -> Problem:
    """``tokens`` of documents that share rows; the first token of a document is not scored.

    ``sample_ids`` ``[B, T]`` numbers the documents of a row, two in each.

    Examples:
        >>> from hypothesis import find
        >>> batch = find(tokens_packed().batches, lambda batch: bool(batch["mask"].any()))
        >>> batch["sample_ids"].shape == batch["mask"].shape
        True
    """
    return tokens()._replace(batches=_documents())


def two_heads() -> Problem:
    """Two means of tokens with dens of their own, as of multi-token prediction.

    Terms are ``main``, as in ``tokens``, and ``extra``: ``extra_losses`` ``[B, T]`` where
    ``extra_mask`` ``[B, T]`` is true. The extra head scores fewer positions.

    Examples:
        >>> problem = two_heads()
        >>> batch = token_batch([[1.0, 1.0]])
        >>> batch["extra_losses"] = torch.full((1, 3), 2.0).double()
        >>> batch["extra_mask"] = torch.tensor([[False, False, True]])
        >>> problem.objective(problem.loss_fn(problem.params, batch))
        tensor(3., dtype=torch.float64)
    """

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        main, mask = _token_sums(params, batch), batch["extra_mask"]
        extra = params["w"] * (batch["extra_losses"] * mask).sum()
        return LossTerms(
            {"main": main.num, "extra": extra}, {"main": main.den, "extra": mask.sum()}
        )

    return Problem(loss_fn, _params(), _token_batches(extra_head=True))


def token_batch(
    rows: list[list[float]], *, masked: float = 1.0, padded: float = 1.0, columns: int | None = None
) -> Batch:
    """A batch of ``tokens`` by hand: the scored losses of each row.

    Column 0 has a label but is not scored; rows are padded to the longest, or to ``columns``.

    Args:
        rows: the losses of the scored positions.
        masked: the loss at column 0, which nothing scores.
        padded: the loss at padding.
        columns: number of columns.

    Examples:
        >>> batch = token_batch([[8.0], [2.0, 2.0]])
        >>> batch["mask"].int()
        tensor([[0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
        >>> batch["losses"]
        tensor([[1., 8., 1.],
                [1., 2., 2.]], dtype=torch.float64)
    """
    width = columns or 1 + max(map(len, rows), default=0)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64).unsqueeze(1)
    place = torch.arange(width)
    losses = [[masked, *row, *[padded] * (width - 1 - len(row))] for row in rows]
    present = place <= lengths
    return {
        "losses": torch.tensor(losses, dtype=torch.float64).reshape(len(rows), width),
        "mask": present & (place > 0),
        "labels": torch.where(present, place.expand_as(present), -100),
        "attention_mask": present.long(),
    }


def _token_sums(params: Any, batch: Batch) -> LossTerms:
    mask = batch["mask"]
    return LossTerms(params["w"] * (batch["losses"] * mask).sum(), mask.sum())


def _params() -> dict[str, Tensor]:
    return {"w": torch.tensor(1.0, dtype=torch.float64)}


@st.composite
def _token_batches(draw: DrawFn, *, per_row: str = "", extra_head: bool = False) -> Batch:
    """Ragged rows: a prompt that is not supervised, an answer that is, padding.

    Batches are small and drawn by few choices: that makes the search for a smallest one quick.
    """
    num_rows, width = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    losses = _matrix(draw, num_rows, width)
    bounds = torch.tensor(draw(_integers(2 * num_rows, 0, width))).reshape(num_rows, 2)
    starts, ends = bounds.sort(dim=1).values.unsqueeze(-1).unbind(1)
    place = torch.arange(width)
    supervised = (place >= starts) & (place < ends)
    batch = {
        "losses": losses,
        "mask": supervised & (place > 0),
        "labels": torch.where(supervised, place.expand_as(supervised), -100),
        "attention_mask": (place < ends).long(),
    }
    if per_row:
        batch[per_row] = _matrix(draw, num_rows, 1)[:, 0]
    if extra_head:
        batch["extra_losses"] = _matrix(draw, num_rows, width)
        batch["extra_mask"] = batch["mask"] & (place > starts + 1)
    return batch


@st.composite
def _documents(draw: DrawFn) -> Batch:
    batch = draw(_token_batches())
    width = batch["mask"].shape[1]
    starts = torch.tensor(draw(_integers(len(batch["mask"]), 1, width - 1))).unsqueeze(1)
    place = torch.arange(width)
    first = place == starts
    return batch | {
        "labels": batch["labels"].masked_fill(first, -100),
        "mask": batch["mask"] & ~first,
        "sample_ids": (place >= starts).long(),
    }


def _matrix(draw: DrawFn, rows: int, columns: int) -> Tensor:
    """Exact in binary, ``[rows, columns]``: from 1/8 to 8, or up to 1/8 so as not to be clipped."""
    numerators = draw(_integers(rows * columns, 1, 64))
    values = torch.tensor(numerators, dtype=torch.float64).reshape(rows, columns)
    return values / draw(st.sampled_from([8, 512]))


@cache
def _integers(num: int, low: int, high: int) -> SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(low, high)] * num)
