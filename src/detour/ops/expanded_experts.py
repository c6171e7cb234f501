"""Routed experts on a CPU that are expanded one at a time, and multiplied in C++.

A token's result is the same bits in any batch: a product's is (ops/moe/native.py), and what a token
gets from its experts is added in the order of their numbers. Knows no packing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from detour.ops.moe.native import moe_native


def add_experts(
    x: Tensor, weights: Tensor, experts: Tensor, expand: Callable[[int], tuple[Tensor, Tensor]]
) -> Tensor:
    """The sum over a token's experts of weight * down @ (silu(gate @ x) * (up @ x)) -> as x.

    x [T, H] floating; weights [T, k] float32; experts [T, k] int64, distinct within a token
    expand  an expert's number -> gate and up [2 * I, H] and down [H, I], float32
    """
    wide = x.float()
    out = torch.zeros_like(wide)
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        both, last = expand(expert)
        alone = torch.zeros(len(token), 1, dtype=torch.int64)
        part = moe_native(wide[token], both[None], last[None], weights[token, place, None], alone)
        out.index_add_(0, token, part)
    return out.to(x.dtype)
