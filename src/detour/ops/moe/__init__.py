"""moe: SwiGLU experts, each token through its chosen few."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from detour.ops.op import Need, op


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(19)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, experts, top_k, hidden, width in ((1, 8, 2, 64, 32), (40, 16, 4, 32, 64)):
            x = torch.randn(tokens, hidden, generator=source)
            gate_up = torch.randn(experts, 2 * width, hidden, generator=source) * hidden**-0.5
            down = torch.randn(experts, hidden, width, generator=source) * width**-0.5
            scores, chosen = torch.rand(tokens, experts, generator=source).topk(top_k)
            need = {"dtype": dtype, "experts": experts, "hidden": hidden, "width": width}
            tensors = (x.to(dtype), gate_up.to(dtype), down.to(dtype), scores, chosen)
            yield need, tuple(tensor.to(device) for tensor in tensors)


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3},
)
def moe(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """sum over a token's experts of weight * down @ (silu(gate @ x) * (up @ x)) -> [T, H].

    x        [T, H] floating
    gate_up  [E, 2 * I, H] of x's dtype: gate rows, then up rows
    down     [E, H, I] of x's dtype
    weights  [T, k] float32; experts [T, k] int64, distinct within a token

    The sum is taken in float32, in the order of expert numbers, and cast to x's dtype at the end,
    so that a token's result does not depend on the others.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, token, result.float() * weights[token, place, None])
    return out.to(x.dtype)
