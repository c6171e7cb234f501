"""Mixture of experts: a router, the experts it chooses from, and a block that all tokens take."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detour.layers.even_routing import EvenRouting
from detour.layers.experts import Experts
from detour.layers.linear import Linear, Part
from detour.layers.mlp import GatedMLP
from detour.layers.weight import Piece, Site
from detour.ops.routing import RoutingRule, routing


@dataclass(frozen=True)
class Mixture:
    """A layer's experts: `count` SwiGLU blocks of `width`, of which `rule` chooses for a token.

    corrected     the choice is made by scores plus a learned bias (`e_score_correction_bias`)
    shared_width  of the block that every token takes besides; 0 = there is none
    """

    count: int
    width: int
    rule: RoutingRule
    corrected: bool = False
    shared_width: int = 0


class Router:
    """Which experts a token goes to, and with what weight.

    A corrected router computes in float32 throughout: bfloat16 would make many biases equal.
    """

    def __init__(self, site: Site, name: str, hidden: int, mixture: Mixture) -> None:
        self.rule = mixture.rule
        own = replace(site, dtype=torch.float32) if mixture.corrected else site
        self.dtype = own.dtype
        count = mixture.count
        self.logits = Linear(own, (Part(name, count, count),), hidden)
        bias = Piece(f"{name}.e_score_correction_bias", (count,))
        self.bias = own.tensor((count,), bias, spread=0.02) if mixture.corrected else None
        self.no_bias = torch.empty(0, device=site.device.torch_device)
        need = {"dtype": torch.float32, "experts": count, "rule": mixture.rule}
        self.choose = site.routes.route(routing, need)
        self.even: tuple[EvenRouting, ...] = ()
        if site.even_routing:
            device, seed = site.device.torch_device, len(site.parameters)
            self.even = (EvenRouting(count, mixture.rule.top_k, seed, device),)
            site.routers.extend(self.even)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> weights [T, k] float32, experts [T, k] int64."""
        bias = self.no_bias if self.bias is None else self.bias.value
        logits = self.logits(x.to(self.dtype)).float()
        weights, experts = self.choose(logits, bias, self.rule)
        return weights, self.even[0](len(x)) if self.even else experts


class MixtureOfExperts:
    """A token's chosen experts, weighted, plus the shared block; ranks share the widths."""

    def __init__(self, site: Site, name: str, hidden: int, mixture: Mixture) -> None:
        self.group = site.group
        self.router = Router(site, f"{name}.gate", hidden, mixture)
        self.experts = Experts(site, f"{name}.experts", hidden, mixture.width, mixture.count)
        width = mixture.shared_width
        self.shared = (
            GatedMLP(site, f"{name}.shared_experts", hidden, width, bias=False) if width else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        routed = self.group.all_reduce(self.experts(x, *self.router(x)))
        return routed if self.shared is None else routed + self.shared(x)
