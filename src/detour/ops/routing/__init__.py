"""routing: which experts a token goes to, and with what weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detour.ops.op import Need, op


@dataclass(frozen=True)
class RoutingRule:
    """How a router's logits become choices; the words are those of checkpoints' configurations."""

    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    normalise: bool = True  # the chosen weights of a token sum to 1 (before `scale`)
    scale: float = 1.0
    groups: int = 1  # experts lie in so many equal groups
    top_groups: int = 1  # only experts of the best so many groups can be chosen


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(17)
    rules = (
        (1, 16, RoutingRule(4), False),
        (33, 64, RoutingRule(8, normalise=False), False),
        (20, 32, RoutingRule(4, scoring="sigmoid", scale=2.5), True),
        (20, 32, RoutingRule(4, scoring="sigmoid", groups=4, top_groups=2), True),
    )
    for tokens, experts, rule, biased in rules:
        logits = torch.randn(tokens, experts, generator=source) * 3
        bias = torch.randn(experts if biased else 0, generator=source)
        need = {"dtype": torch.float32, "experts": experts, "rule": rule}
        yield need, (logits.to(device), bias.to(device), rule)


@op(__name__, inputs=_inputs, tolerance={torch.float32: 1e-5})
def routing(logits: Tensor, bias: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """(weights [T, top_k] float32, experts [T, top_k] int64), best first, the lower on a tie.

    logits  [T, experts] float32
    bias    [experts] float32 added to the scores for the choice alone, or empty: none

    With groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), a group's worth is the sum of its
    two best biased scores. Weights are the unbiased scores.
    """
    scores = logits.softmax(dim=-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores + bias if len(bias) else scores
    if rule.groups > 1:
        grouped = choice.view(len(logits), rule.groups, -1)
        worth = grouped.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(rule.top_groups, dim=-1).indices
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed[:, :, None], -torch.inf).view_as(scores)
    # A stable sort, since topk leaves the order of equal scores open.
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, experts)
    if rule.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * rule.scale, experts
