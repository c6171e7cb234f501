"""moe_fp8 on a CPU: an expert that is hit is expanded to float32 and multiplied in C++."""

import torch
from torch import Tensor

from detour.ops.device import Device
from detour.ops.expanded_experts import add_experts
from detour.ops.moe import moe
from detour.ops.moe_fp8 import moe_fp8
from detour.ops.op import Need
from detour.ops.scaled import unpack_fp8


def _reasons(device: Device, need: Need) -> list[str]:
    return moe.discover()["native"].reasons(device, {**need, "dtype": torch.float32})


@moe_fp8.backend("native", reasons=_reasons, rank=2)
def run(
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
    def expand(expert: int) -> tuple[Tensor, Tensor]:
        both = unpack_fp8(gate_up[expert], gate_up_scale[expert], gate_up_row)
        return both, unpack_fp8(down[expert], down_scale[expert], down_row)

    return add_experts(x, weights, experts, expand)
