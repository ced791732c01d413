"""A mixture-of-experts decoder of the Qwen3-MoE kind.

Params are those of ``decoder``; blocks have ``router`` [E, H] and ``experts`` in place of ``mlp``:
``gate`` and ``up`` [E, M, H], ``down`` [E, H, M]. Letters for shapes are those of ``layers`` and
``experts``.

Each loss is a sum over its own tokens. Cross-entropy counts the supervised ones, the router's
losses all tokens but padding, prompts too; so their dens differ.

Expert parallelism: a rank holds its part of the experts, cut along dim 0, has its own rows, and
passes tokens on by ``exchange``, ``functools.partial(dist.all_to_all, axis=mesh["ep"])``. The other
params are the same on all ranks, and so are shapes of batches. Each rank differentiates its own
sums; gradients of the experts are then whole, those of all else partial over ``ep``.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..pure.losses import (
    Weighting,
    balance_loss,
    balance_per_micro_step,
    balance_stats,
    linear_cross_entropy,
    z_loss,
)
from ..pure.objective import Objective, term_mean
from ..pure.terms import LossTerms, Metrics
from . import decoder
from .decoder import next_tokens
from .experts import Exchange
from .layers import init_like
from .moe_block import Config
from .moe_network import States, shapes, states, step
from .routers import Routing

__all__ = [
    "Config",
    "States",
    "apply",
    "hidden_states",
    "init",
    "loss_terms",
    "metrics",
    "objective",
    "router_stats",
    "shapes",
    "states",
    "step",
]

Params = Any
Batch = Mapping[str, Tensor]


def init(
    config: Config, key: Tensor, *, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Params:
    """Params with normal weights of deviation ``std`` and norms of 1, on the device of ``key``.

    An expert's draw depends on its layer and index, and not on how many there are.

    Args:
        config: the shape.
        key: int64 [2], from ``random.key``.
        std: the standard deviation.
        dtype: of all params.

    Examples:
        >>> from numden.pure import random
        >>> config = Config(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=1,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_experts=6,
        ...                 num_selected=2, expert_size=4)
        >>> init(config, random.key(0))["layers"][0]["experts"]["gate"].shape
        torch.Size([6, 4, 8])
    """
    return init_like(key, shapes(config), std=std, dtype=dtype)


def hidden_states(
    params: Params, tokens: Tensor, config: Config, *, layers: Sequence[int] = (), **options: Any
) -> tuple[Tensor, Tensor]:
    """``captured`` and ``final`` of ``states``, for what trains on a frozen model's states."""
    captured, final, _ = states(params, tokens, config, layers=layers, **options)
    return captured, final


def apply(params: Params, tokens: Tensor, config: Config, **options: Any) -> Tensor:
    """Logits of the next token at each position, [B, S, V].

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        tokens: int64 [B, S].
        config: the shape of ``params``.
        **options: ``positions``, ``exchange``, ``router_bias`` and ``selected`` of ``states``.
    """
    return decoder.logits(params, states(params, tokens, config, **options).final, config)


def loss_terms(
    params: Params,
    batch: Batch,
    config: Config,
    *,
    exchange: Exchange | None = None,
    router_bias: Tensor | None = None,
    weighting: Weighting = "token",
    chunk_size: int = 1024,
) -> LossTerms:
    """Cross-entropy of the next token, and what the losses of the routers are functions of.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        batch: fields of ``decoder.loss_terms``: ``tokens`` and ``loss_mask``, optionally
            ``supervised``; and, optional too,

            - ``token_mask``: bool [B, S], False at padding, which then counts nowhere;
            - ``selected``: int64 [B, S, L, k], the experts chosen when the text was sampled.
        config: the shape of ``params``.
        exchange: see ``states``.
        router_bias: see ``states``.
        weighting: "token", "sample" or "square", as in ``cross_entropy``.
        chunk_size: positions that have logits at one time.

    Returns:
        Terms for ``objective(config)``, by name:

        - ``ce``: a sum of nats, and the weight of supervised tokens;
        - ``balance``: ``router_stats``; of the scope "micro-step", ``balance_per_micro_step``;
        - ``z``: squared nats, summed over layers, and the number of tokens.
    """
    batch = _masked(batch)
    result = states(
        params,
        batch["tokens"],
        config,
        exchange=exchange,
        router_bias=router_bias,
        selected=batch.get("selected"),
    )
    labels, where = next_tokens(batch)
    ce = linear_cross_entropy(
        result.final,
        params["embed"] if config.tie_embeddings else params["head"],
        labels,
        where=where,
        positions=batch.get("supervised"),
        weighting=weighting,
        chunk_size=chunk_size,
    )
    return _merge_terms(ce, result.routings, batch.get("token_mask"), config)


def _masked(batch: Batch) -> Batch:
    if "token_mask" not in batch:
        return batch
    return {**batch, "loss_mask": batch["loss_mask"] & batch["token_mask"]}


def _merge_terms(
    ce: LossTerms, routings: list[Routing], where: Tensor | None, config: Config
) -> LossTerms:
    balance, z = router_stats(routings, where), _z_terms(routings, where)
    if config.balance_scope == "micro-step":
        balance = balance_per_micro_step(balance, num_selected=config.num_selected)
    return LossTerms(
        {"ce": ce.num, "balance": balance.num, "z": z.num},
        {"ce": ce.den, "balance": balance.den, "z": z.den},
    )


def router_stats(routings: Sequence[Routing], where: Tensor | None = None) -> LossTerms:
    """``balance_stats`` of all routers: ``counts`` and ``probs`` [L, E] over one number of tokens.

    Args:
        routings: L of them, from ``states``.
        where: bool [B, S], tokens to count: all but padding.
    """
    each = [balance_stats(r.probs, r.selected, where=where) for r in routings]
    num = {name: torch.stack([s.num[name] for s in each]) for name in ("counts", "probs")}
    return LossTerms(num, each[0].den)


def _z_terms(routings: list[Routing], where: Tensor | None) -> LossTerms:
    each = [z_loss(routing.logits, where=where) for routing in routings]
    return LossTerms(torch.stack([terms.num for terms in each]).sum(), each[0].den)


def objective(config: Config) -> Objective:
    """``CE + alpha_balance · balance + alpha_z · z`` of the totals of ``loss_terms``.

    The balancing loss of the scope "window" is that of all tokens of the window, over micro-steps
    and ranks: it does not depend on how they are cut, and takes the plan "columns" or "replay".
    That of "micro-step" is the mean over micro-steps of theirs, by tokens; each of a rank counts
    alone. Both add the losses of the blocks, and so does z.
    """
    if config.balance_scope == "window":
        return partial(_window_loss, config=config)
    return term_mean({"ce": 1.0, "balance": config.alpha_balance, "z": config.alpha_z})


def _window_loss(totals: LossTerms, *, config: Config) -> Tensor:
    num, den = dict(totals.num), dict(totals.den)
    stats = LossTerms(num.pop("balance"), den.pop("balance"))
    alpha, means = config.alpha_balance, term_mean({"ce": 1.0, "z": config.alpha_z})
    balance = balance_loss(stats, num_selected=config.num_selected, alpha=alpha)
    return means(LossTerms(num, den)) + balance


def metrics(
    params: Params,
    batch: Batch,
    config: Config,
    *,
    exchange: Exchange | None = None,
    router_bias: Tensor | None = None,
    chunk_size: int = 1024,
) -> Metrics:
    """What is reported of held-out text, without gradients.

    Args:
        params: from ``init``, or such a module as ``as_module`` makes.
        batch: as in ``loss_terms``.
        config: the shape of ``params``.
        exchange: see ``states``.
        router_bias: see ``states``.
        chunk_size: positions that have logits at one time.

    Returns:
        ``cross_entropy`` (nats) and ``accuracy`` (hits of the likeliest token) per supervised
        token; ``router_z`` (squared nats per token, summed over blocks); and ``router``, of which
        the ratios are the share of tokens that each expert got and its mean probability, [L, E].
    """
    batch = _masked(batch)
    with torch.no_grad():
        result = states(
            params,
            batch["tokens"],
            config,
            exchange=exchange,
            router_bias=router_bias,
            selected=batch.get("selected"),
        )
        of_tokens = decoder.token_metrics(params, result.final, batch, config, chunk_size)
        where = batch.get("token_mask")
        return of_tokens | {
            "router_z": _z_terms(result.routings, where),
            "router": router_stats(result.routings, where),
        }
