"""moe_fp8: the routed experts of a layer with FP8 weights and wide activations (W8A16).

Knows how the weights and their scales lie; knows nothing of routing, of shared experts or of ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from detour.ops.op import Need, op
from detour.ops.scaled import FP8_BLOCK, random_fp8, unpack_fp8


def random_experts(
    shape: tuple[int, int, int], sharing: int, wide: int, source: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Random values, scales and row numbers of [experts, rows, columns]; sums of order one."""
    experts, rows, columns = shape
    where = {"generator": source, "device": source.device}
    of_row = (torch.arange(rows, device=source.device) // sharing).to(torch.int32)
    scales = (torch.rand(experts, int(of_row[-1]) + 1, wide, **where) + 0.5) * 1.5
    return random_fp8(shape, source), scales * columns**-0.5, of_row


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator(device).manual_seed(23)
    for number, (tokens, experts, top_k, hidden, width, block) in enumerate(
        ((1, 8, 2, 256, 128, True), (40, 16, 4, 160, 136, True), (9, 8, 3, 64, 32, False))
    ):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        x = torch.randn(tokens, hidden, generator=source, device=device).to(dtype)
        wide = [-(-size // FP8_BLOCK) if block else 1 for size in (hidden, width)]
        shared = FP8_BLOCK if block else 1
        up = random_experts((experts, 2 * width, hidden), shared, wide[0], source)
        down = random_experts((experts, hidden, width), shared, wide[1], source)
        draws = torch.rand(tokens, experts, generator=source, device=device)
        weights, chosen = draws.topk(top_k)
        need = {"dtype": dtype, "experts": experts, "hidden": hidden, "width": width}
        yield need, (x, *up, *down, weights, chosen)


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3},
)
def moe_fp8(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_row: Tensor,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    """sum over a token's experts of weight * down @ (silu(gate @ x) * (up @ x)) -> [T, H].

    x [T, H] floating; weights [T, k] float32; experts [T, k] int64, distinct within a token;
    gate_up [E, 2I, H] e4m3 (gate rows, then up rows), gate_up_scale [E, s, 1 or H / 128 (rounded
    up)] float32, gate_up_row [2I] int32: which of the s is a row's, the same for all experts;
    down [E, H, I], down_scale, down_row [H] likewise. Weights are expanded (ops/scaled.py) for the
    experts that are hit alone; they may be rounded to x's dtype, as here. The sum is taken in
    float32, in the order of expert numbers, and cast to x's dtype at the end.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        both = unpack_fp8(gate_up[expert], gate_up_scale[expert], gate_up_row).to(x.dtype)
        gate, up = functional.linear(x[token], both).chunk(2, dim=-1)
        last = unpack_fp8(down[expert], down_scale[expert], down_row).to(x.dtype)
        result = functional.linear(functional.silu(gate) * up, last)
        out.index_add_(0, token, result.float() * weights[token, place, None])
    return out.to(x.dtype)
