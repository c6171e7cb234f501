"""Muon (Jordan 2024): momentum made orthogonal by Newton-Schulz, for the matrices inside a model.

A tenth of the steps that Adam takes to teach a small model to look things up in its context.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

STEPS = 5
POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # Jordan's: singular values to about 1 in STEPS


def orthogonal(x: Tensor) -> Tensor:
    """Singular values of x [..., rows, columns] made about 1."""
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    one, two, three = POLYNOMIAL
    for _ in range(STEPS):
        square = x @ x.mT
        x = one * x + (two * square + three * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum; matrices of one shape are done together."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["momentum"] = torch.zeros_like(one)
                state["momentum"].lerp_(one.grad, 1 - group["momentum"])
                update = one.grad.lerp(state["momentum"], group["momentum"])
                alike.setdefault(one.shape, []).append((one, update))
            for shape, pairs in alike.items():
                done = orthogonal(torch.stack([update for _, update in pairs]))
                rate = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                for (one, _), update in zip(pairs, done, strict=True):
                    one.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-rate)
