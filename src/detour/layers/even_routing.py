"""A stand-in for what trained routers choose, where weights are random: experts drawn evenly.

Random routers send all tokens to the same few experts, so that a step reads far less than it would.
For measuring alone: answers change.
"""

import torch
from torch import Tensor

TOKENS = 16_384  # that are drawn for; later ones of a step repeat them


class EvenRouting:
    """`top_k` distinct experts of `count` for each token of a step by its place, always the same."""

    def __init__(self, count: int, top_k: int, seed: int, device: torch.device) -> None:
        source = torch.Generator(device).manual_seed(seed)
        worth = torch.rand(TOKENS, count, generator=source, device=device)
        self.experts = worth.topk(top_k).indices

    def __call__(self, tokens: int) -> Tensor:
        """[tokens, top_k] int64. Up to TOKENS of them it is a view: it costs no kernel."""
        if tokens <= TOKENS:
            return self.experts[:tokens]
        return self.experts.repeat(-(-tokens // TOKENS), 1)[:tokens]

    def covered(self, tokens: int) -> int:
        """How many experts so many tokens are sent to."""
        return len(self(tokens).unique())
