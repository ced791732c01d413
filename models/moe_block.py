"""One block of a mixture-of-experts decoder: its shape, its weights, its forward pass."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from . import decoder_block
from .decoder_block import Tables, attend, cached_attend, check_field
from .experts import Exchange, mix
from .layers import linear, rms_norm, swiglu
from .routers import GroupRule, RouterKind, Routing, route

__all__ = ["BalanceScope", "Config", "block", "block_shapes", "cached_block"]

Params = Any

BalanceScope = Literal["window", "micro-step"]
"""What the tokens are spread over evenly: see ``moe.objective``."""


@dataclass(frozen=True, kw_only=True)
class Config(decoder_block.Config):
    """The shape of a mixture-of-experts decoder, and what its losses are.

    Attributes:
        num_experts: E.
        num_selected: k, the experts of one token.
        expert_size: M, the width of an expert; ``intermediate_size`` is that of dense MLPs.
        dense_layers: indices of the blocks with a dense MLP in place of experts.
        norm_topk_prob: divide the weights of a token by their sum.
        weight_scale: factor of the weights.
        router: "softmax", "sigmoid" or "biased", see ``routers.route``.
        num_groups: equal groups of experts, 1 for none.
        num_best_groups: how many the group rule "best" keeps.
        group_rule: "best" or "each", see ``routers.route``.
        balance_scope: "window" or "micro-step", see ``moe.objective``.
        alpha_balance: weight of the balancing loss, for each block.
        alpha_z: weight of the router's z-loss, for each block.
    """

    num_experts: int
    num_selected: int
    expert_size: int
    dense_layers: tuple[int, ...] = ()
    norm_topk_prob: bool = True
    weight_scale: float = 1.0
    router: RouterKind = "softmax"
    num_groups: int = 1
    num_best_groups: int = 1
    group_rule: GroupRule = "best"
    balance_scope: BalanceScope = "window"
    alpha_balance: float = 1e-3
    alpha_z: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_experts", "num_selected", "expert_size", "num_groups", "num_best_groups"):
            check_field(name, getattr(self, name), (int,))
        check_field("norm_topk_prob", self.norm_topk_prob, (bool,))
        check_field("weight_scale", self.weight_scale, (int, float))
        self._check_choices()
        self._check_experts()
        for name in ("alpha_balance", "alpha_z"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"Config: {name} must not be negative, got {name}={getattr(self, name)}."
                )

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Indices of the blocks that have experts."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    def _check_choices(self) -> None:
        choices = {"router": RouterKind, "group_rule": GroupRule, "balance_scope": BalanceScope}
        for name, choice in choices.items():
            if getattr(self, name) not in get_args(choice):
                raise ValueError(
                    f"Config: {name} must be one of {get_args(choice)}, got "
                    f"{name}={getattr(self, name)!r}."
                )
        if not self.routed_layers or not set(self.dense_layers) <= set(range(self.num_layers)):
            raise ValueError(
                f"Config: dense_layers must be some of the {self.num_layers} layers and leave one "
                f"with experts, got dense_layers={self.dense_layers}."
            )

    def _check_experts(self) -> None:
        rules = {
            "num_experts must be a multiple of num_groups": self.num_experts % self.num_groups == 0,
            "num_best_groups must be at most num_groups": self.num_best_groups <= self.num_groups,
            "num_selected must be at most the experts to choose from": (
                self.num_selected <= self._num_candidates()
            ),
            'num_groups must divide num_selected by the rule "each"': (
                self.group_rule == "best" or self.num_selected % self.num_groups == 0
            ),
            'groups of the rule "best" need router="biased"': (
                self.group_rule == "each" or self.num_groups == 1 or self.router == "biased"
            ),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            names = ("num_experts", "num_selected", "num_groups", "num_best_groups", "group_rule")
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            raise ValueError(f"Config: {broken[0]}, got {got}.")

    def _num_candidates(self) -> int:
        if self.group_rule == "each":
            return self.num_experts
        return self.num_experts // self.num_groups * self.num_best_groups


def block_shapes(config: Config, index: int) -> Params:
    """The params of block ``index`` as tensors on the meta device.

    Examples:
        >>> config = Config(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=1,
        ...                 num_heads=2, num_kv_heads=1, head_dim=4, num_experts=6,
        ...                 num_selected=2, expert_size=4)
        >>> shapes = block_shapes(config, 0)
        >>> shapes["router"].shape, shapes["experts"]["down"].shape
        (torch.Size([6, 8]), torch.Size([6, 8, 4]))
    """
    shapes = decoder_block.block_shapes(config)
    if index in config.dense_layers:
        return shapes
    del shapes["mlp"]
    router = torch.empty(config.num_experts, config.hidden_size, device="meta")
    inner = router.new_empty(config.num_experts, config.expert_size, config.hidden_size)
    experts = {"gate": inner, "up": inner, "down": inner.transpose(1, 2)}
    return shapes | {"router": router, "experts": experts}


def block(
    layer: Params,
    x: Tensor,
    angles: Tables,
    config: Config,
    *,
    exchange: Exchange | None = None,
    bias: Tensor | None = None,
    selected: Tensor | None = None,
) -> tuple[Tensor, Routing | None]:
    """A block on whole rows: causal attention, then experts or a dense MLP.

    Args:
        layer: params of one block.
        x: [B, S, H].
        angles: from ``decoder_block.tables``.
        config: the shape.
        exchange: how ranks that share the experts pass tokens on, see ``experts.mix``.
        bias: [E], of the router.
        selected: int64 [B, S, k], a choice made before, in place of the router's.

    Returns:
        [B, S, H], and the routing of [B, S] tokens, None of a dense block.
    """
    x = attend(layer, x, angles, config)
    return _add_experts(layer, x, config, exchange, bias, selected)


def cached_block(
    layer: Params,
    x: Tensor,
    angles: Tables,
    config: Config,
    past: list[Tensor],
    positions: Tensor,
    *,
    exchange: Exchange | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """``block`` on some more positions of rows whose earlier keys and values are given.

    Args:
        layer: params of one block.
        x: [B, L, H].
        angles: from ``decoder_block.tables``.
        config: the shape.
        past: keys and values, each [B, Nkv, T, D]; read up to the position of each query.
        positions: int64 [B, L], where the new keys and values belong.
        exchange: see ``block``.
        bias: see ``block``.

    Returns:
        [B, L, H], and keys and values that hold the new ones.
    """
    x, past = cached_attend(layer, x, angles, config, past, positions)
    return _add_experts(layer, x, config, exchange, bias, None)[0], past


def _add_experts(
    layer: Params,
    x: Tensor,
    config: Config,
    exchange: Exchange | None,
    bias: Tensor | None,
    selected: Tensor | None,
) -> tuple[Tensor, Routing | None]:
    normed = rms_norm(x, layer["mlp_norm"], config.norm_eps)
    if "mlp" in layer:
        mlp = layer["mlp"]
        return x + swiglu(normed, mlp["gate"], mlp["up"], mlp["down"]), None
    routing = route(
        linear(normed, layer["router"]),
        num_selected=config.num_selected,
        kind=config.router,
        bias=bias,
        num_groups=config.num_groups,
        num_best_groups=config.num_best_groups,
        group_rule=config.group_rule,
        normalize=config.norm_topk_prob,
        scale=config.weight_scale,
        selected=selected,
    )
    flat = [each.flatten(0, 1) for each in (normed, routing.selected, routing.weights)]
    mixed = mix(layer["experts"], *flat, num_experts=config.num_experts, exchange=exchange)
    return x + mixed.view_as(x), routing
