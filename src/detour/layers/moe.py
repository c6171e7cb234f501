"""Mixture of experts: a router and the experts it chooses from."""

import torch
from torch import Tensor

from detour.layers.linear import Linear, Part
from detour.layers.weight import Piece, Site
from detour.ops.moe import moe
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
        share = site.group.share(width, "expert columns")
        own = width // share.parts
        gate_up, down = [], []
        for expert in range(experts):
            prefix = f"{name}.experts.{expert}"
            for place, part in enumerate(("gate_proj", "up_proj")):
                into = (expert, slice(place * own, (place + 1) * own))
                gate_up.append(
                    Piece(f"{prefix}.{part}.weight", (width, hidden), rows=share, into=into)
                )
            down.append(
                Piece(f"{prefix}.down_proj.weight", (hidden, width), columns=share, into=(expert,))
            )
        self.gate_up = site.tensor((experts, 2 * own, hidden), *gate_up, spread=hidden**-0.5)
        self.down = site.tensor((experts, hidden, own), *down, spread=width**-0.5)
        self.choose = site.routes.route(
            routing, {"dtype": torch.float32, "experts": experts, "rule": rule}
        )
        self.compute = site.routes.route(
            moe, {"dtype": site.dtype, "experts": experts, "hidden": hidden, "width": own}
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        weights, experts = self.choose(self.router(x).float(), self.no_bias, self.rule)
        return self.group.all_reduce(
            self.compute(x, self.gate_up.value, self.down.value, weights, experts)
        )
