"""More problems to try a step on, each with the fields that one kind of bug needs.

As in ``numden.property_tests.worlds.problems``, params are 1 and a token states its own loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from numden.property_tests.strategies import dyadic
from numden.property_tests.worlds.problems import Problem, tokens, tokens_and_balance
from numden.pure import LossTerms

__all__ = [
    "ROUTED",
    "actor_and_critic",
    "balance_by_tokens",
    "filtered",
    "layers",
    "long_rows",
    "routed",
    "router_mean",
    "rows",
    "sequences",
    "weighted",
]

Batch = dict[str, Tensor]
HORIZON = 4
ROUTED = ("a", "b")


def rows() -> Problem:
    """The mean of samples: ``Σ w · losses / rows``, ``losses`` ``[B]``; pairs of preferences."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        return LossTerms(params["w"] * batch["losses"].sum(), batch["losses"].numel())

    return Problem(loss_fn, _params("w"), _samples())


def sequences() -> Problem:
    """The mean over sequences of token sums over a fixed horizon."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        return LossTerms(_token_sum(params["w"], batch) / HORIZON, len(batch["mask"]))

    return Problem(loss_fn, _params("w"), tokens().batches)


def layers(*names: str) -> Problem:
    """Tokens whose loss is ``losses`` times the product of several params.

    At 1 each param has the gradient that ``tokens`` has.
    """

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        product = torch.stack([params[name] for name in names]).prod()
        return LossTerms(_token_sum(product, batch), batch["mask"].sum())

    return Problem(loss_fn, _params(*names), tokens().batches)


def routed() -> Problem:
    """Tokens of two experts: rows with ``expert`` ``[B]`` 0 have loss ``losses · a``, others b."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        chosen = torch.stack([params[name] for name in ROUTED])[batch["expert"]]
        return LossTerms(_token_sum(chosen.unsqueeze(1), batch), batch["mask"].sum())

    return Problem(loss_fn, _params(*ROUTED), _with(expert=_experts))


def weighted(*, over_weights: bool) -> Problem:
    """Tokens with ``weights`` ``[B, T]``: ``Σ w · weights · losses`` over tokens or weights."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        weights = batch["weights"] * batch["mask"]
        num = params["w"] * (weights * batch["losses"]).sum()
        return LossTerms(num, weights.sum() if over_weights else batch["mask"].sum())

    return Problem(loss_fn, _params("w"), _with(weights=_like("mask", 0, 2)))


def filtered() -> Problem:
    """Tokens that count if they are in ``mask`` and their ``finite`` ``[B, T]`` is true."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        kept = batch["mask"] & batch["finite"]
        return LossTerms(params["w"] * (batch["losses"] * kept).sum(), kept.sum())

    return Problem(loss_fn, _params("w"), _with(finite=_flags))


def long_rows() -> Problem:
    """``tokens`` with some hundred tokens in a batch, more than bf16 can count."""
    return tokens()._replace(batches=_long_rows())


def router_mean() -> Problem:
    """``tokens`` and the mean of ``router`` ``[B, T]`` over positions that are no padding."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        real = batch["attention_mask"]
        router = params["w"] * (batch["router"] * real).sum()
        ce = _token_sum(params["w"], batch)
        return LossTerms(
            {"ce": ce, "router": router}, {"ce": batch["mask"].sum(), "router": real.sum()}
        )

    return Problem(loss_fn, _params("w"), _with(router=_like("mask", 0.125, 2)))


def balance_by_tokens() -> Problem:
    """``tokens_and_balance``, but a micro-batch's mean weighs as much as it has tokens."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        count = batch["mask"].sum()
        balance = params["w"] * batch["balance"].mean() * count
        ce = _token_sum(params["w"], batch)
        return LossTerms({"ce": ce, "balance": balance}, {"ce": count, "balance": count})

    return tokens_and_balance()._replace(loss_fn=loss_fn)


def actor_and_critic() -> Problem:
    """Two params with a loss each, ``losses`` and ``value_losses`` ``[B, T]``, on one mask."""

    def loss_fn(params: Any, batch: Batch) -> LossTerms:
        mask = batch["mask"]
        policy = params["actor"] * (batch["losses"] * mask).sum()
        value = params["critic"] * (batch["value_losses"] * mask).sum()
        return LossTerms({"policy": policy, "value": value}, mask.sum())

    values = _like("mask", 0.125, 8)
    return Problem(loss_fn, _params("actor", "critic"), _with(value_losses=values))


def _params(*names: str) -> dict[str, Tensor]:
    return {name: torch.tensor(1.0, dtype=torch.float64) for name in names}


def _token_sum(factor: Tensor, batch: Batch) -> Tensor:
    return (factor * batch["losses"] * batch["mask"]).sum()


def _with(**fields: Callable[[DrawFn, Batch], Tensor]) -> SearchStrategy[Batch]:
    """Batches of ``tokens`` with more fields."""

    @st.composite
    def batches(draw: DrawFn) -> Batch:
        batch = draw(tokens().batches)
        return batch | {name: field(draw, batch) for name, field in fields.items()}

    return batches()


def _like(field: str, smallest: float, largest: float) -> Callable[[DrawFn, Batch], Tensor]:
    """Values in the shape of a field. Few are drawn, and they are dealt in turn: that is fast."""

    def drawn(draw: DrawFn, batch: Batch) -> Tensor:
        few = draw(st.lists(dyadic(min_value=smallest, max_value=largest), min_size=1, max_size=7))
        return _dealt(torch.tensor(few, dtype=torch.float64), batch[field])

    return drawn


def _dealt(few: Tensor, like: Tensor) -> Tensor:
    return few[torch.arange(like.numel()) % len(few)].reshape(like.shape)


def _flags(draw: DrawFn, batch: Batch) -> Tensor:
    few = draw(st.lists(st.booleans(), min_size=1, max_size=7))
    return _dealt(torch.tensor(few), batch["mask"])


def _experts(draw: DrawFn, batch: Batch) -> Tensor:
    number = len(batch["mask"])
    return torch.tensor(draw(st.lists(st.integers(0, 1), min_size=number, max_size=number)))


@st.composite
def _samples(draw: DrawFn) -> Batch:
    losses = draw(st.lists(dyadic(min_value=0.125, max_value=8), min_size=1, max_size=8))
    return {"losses": torch.tensor(losses, dtype=torch.float64)}


@st.composite
def _long_rows(draw: DrawFn) -> Batch:
    lengths = torch.tensor(draw(st.lists(st.integers(0, 127), min_size=1, max_size=4)))
    few = draw(st.lists(dyadic(min_value=0.125, max_value=8), min_size=4, max_size=4))
    place = torch.arange(128)
    present = place <= lengths.unsqueeze(1)
    return {
        "losses": torch.tensor(few, dtype=torch.float64).repeat(len(lengths), 32),
        "mask": present & (place > 0),
        "labels": torch.where(present, place.expand_as(present), -100),
        "attention_mask": present.long(),
    }
