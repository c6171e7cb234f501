"""Mixture of experts: a router and the experts it chooses from."""

import torch
from torch import Tensor

from detour.layers.experts import Experts
from detour.layers.linear import Linear, Part
from detour.layers.weight import Site
from detour.ops.routing import RoutingRule, routing


class MixtureOfExperts:
    """Each token through `rule.top_k` of `experts` SwiGLU blocks; ranks share their widths."""

    def __init__(
        self, site: Site, name: str, hidden: int, width: int, experts: int, rule: RoutingRule
    ) -> None:
        self.group = site.group
        self.rule = rule
        self.router = Linear(site, (Part(f"{name}.gate", experts, experts),), hidden)
        self.no_bias = torch.empty(0, device=site.device.torch_device)
        self.experts = Experts(site, f"{name}.experts", hidden, width, experts)
        self.choose = site.routes.route(
            routing, {"dtype": torch.float32, "experts": experts, "rule": rule}
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        weights, experts = self.choose(self.router(x).float(), self.no_bias, self.rule)
        return self.group.all_reduce(self.experts(x, weights, experts))
