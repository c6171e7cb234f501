"""moe_nvfp4: the routed experts of a layer with NVFP4 weights and full-precision activations (W4A16).

Knows how ModelOpt packs NVFP4; knows nothing of routing, of shared experts or of ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.op import Need, op
from detour.ops.scaled import NVFP4_BLOCK, unpack_nvfp4


def random_nvfp4(
    experts: int, rows: int, columns: int, device: torch.device, source: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random packed weights and block scales whose dequantised values are of order one."""
    shape = (experts, rows, columns // 2)
    packed = torch.randint(0, 256, shape, generator=source, device=source.device, dtype=torch.uint8)
    size = (experts, rows, columns // NVFP4_BLOCK)
    scale = torch.rand(size, generator=source, device=source.device) * 0.8 + 0.1
    return packed.to(device), scale.to(torch.float8_e4m3fn).to(device)


def make_inputs(
    tokens: int,
    hidden: int,
    width: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments of moe_nvfp4 with every token's experts drawn uniformly without repetition."""
    source = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=source, device=device).to(dtype)
    draws = torch.rand(tokens, experts, generator=source, device=device)
    chosen = draws.topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, generator=source, device=device)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    up, up_scale = random_nvfp4(experts, 2 * width, hidden, device, source)
    down, down_scale = random_nvfp4(experts, hidden, width, device, source)
    up_global = (0.5 + torch.rand(experts, 2, generator=source, device=device)) * hidden**-0.5
    down_global = (0.5 + torch.rand(experts, generator=source, device=device)) * width**-0.5
    return x, up, up_scale, up_global, down, down_scale, down_global, weights, chosen


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    on_gpu = device.type == "cuda"
    dtypes = (torch.bfloat16, torch.float16) if on_gpu else (torch.float32, torch.float16)
    shapes = [(1, 256, 128, 8, 2), (7, 128, 64, 8, 4)]
    if on_gpu:
        shapes += [(64, 6144, 256, 64, 8), (700, 1024, 256, 32, 8)]
    for index, (tokens, hidden, width, experts, top_k) in enumerate(shapes):
        dtype = dtypes[index % 2]
        need = {"dtype": dtype, "hidden": hidden, "width": width, "experts": experts}
        yield need, make_inputs(tokens, hidden, width, experts, top_k, dtype, device, index)


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 6e-3},
)
def moe_nvfp4(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    """sum_j weights[t, j] * down_e(silu(gate_e(x[t])) * up_e(x[t])), e = experts[t, j].

    x [T, H]; weights [T, k] float32; experts [T, k] int64, every value in [0, E);
    gate_up [E, 2I, H / 2] uint8 (gate rows, then up rows), gate_up_scale [E, 2I, H / 16] e4m3,
    gate_up_global [E, 2] float32 (of gate, of up); down [E, H, I / 2], down_scale [E, H, I / 16],
    down_global [E]. Returns [T, H] in x's dtype; sums are in float32.
    Packing: NVIDIA ModelOpt's NVFP4 (e2m1 values, e4m3 scale per 16, one float32 scale).
    """
    width = gate_up.shape[1] // 2
    output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    inputs = x.float()
    for expert in experts.unique().tolist():
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        both = gate_up_global[expert].repeat_interleave(width)[:, None]
        hidden = inputs[tokens] @ unpack_nvfp4(gate_up[expert], gate_up_scale[expert], both).T
        hidden = torch.nn.functional.silu(hidden[:, :width]) * hidden[:, width:]
        result = hidden @ unpack_nvfp4(down[expert], down_scale[expert], down_global[expert]).T
        output.index_add_(0, tokens, result * weights[tokens, place][:, None])
    return output.to(x.dtype)
