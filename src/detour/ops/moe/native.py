"""Routed experts on a CPU in C++: a token's result is the same bits in any batch."""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.moe import moe
from detour.ops.op import Need


def _reasons(device: Device, need: Need) -> list[str]:
    if need["hidden"] % 8 or need["width"] % 8:
        return ["it takes hidden sizes and widths of a multiple of 8"]
    return native.dtype_reasons(device, need["dtype"])


@moe.backend("native", reasons=_reasons, rank=2)
def moe_native(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor
) -> Tensor:
    count, hidden, width = down.shape
    x, weights, experts = x.contiguous(), weights.contiguous(), experts.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    native.function("detour_experts", "pnnnppppnnpii")(
        x.data_ptr(),
        len(x),
        hidden,
        width,
        gate_up.data_ptr(),
        down.data_ptr(),
        weights.data_ptr(),
        experts.data_ptr(),
        weights.shape[1],
        count,
        out.data_ptr(),
        native.DTYPES[x.dtype],
        native.threads(),
    )
    return out
