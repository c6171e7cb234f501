"""moe_nvfp4 on a CPU: an expert that is hit is expanded to float32 and multiplied in C++."""

import torch
from torch import Tensor

from detour.ops.device import Device
from detour.ops.expanded_experts import add_experts
from detour.ops.moe import moe
from detour.ops.moe_nvfp4 import moe_nvfp4
from detour.ops.op import Need
from detour.ops.scaled import unpack_nvfp4


def _reasons(device: Device, need: Need) -> list[str]:
    return moe.discover()["native"].reasons(device, {**need, "dtype": torch.float32})


@moe_nvfp4.backend("native", reasons=_reasons, rank=2)
def run(
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
    width = gate_up.shape[1] // 2

    def expand(expert: int) -> tuple[Tensor, Tensor]:
        factors = gate_up_global[expert].repeat_interleave(width)[:, None]
        both = unpack_nvfp4(gate_up[expert], gate_up_scale[expert], factors)
        return both, unpack_nvfp4(down[expert], down_scale[expert], down_global[expert])

    return add_experts(x, weights, experts, expand)
