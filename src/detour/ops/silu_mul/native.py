"""The gate on a CPU in C++, float32."""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.silu_mul import silu_mul


def _reasons(device: Device, need: Need) -> list[str]:
    if need["dtype"] is not torch.float32:
        return ["it computes in float32 alone"]
    return native.reasons(device)


@silu_mul.backend("native", reasons=_reasons, rank=2)
def silu_mul_native(x: Tensor) -> Tensor:
    width = x.shape[1] // 2
    out = x.new_empty(x.shape[0], width)
    native.function("detour_silu_mul", "pnnpi")(
        x.data_ptr(), x.shape[0], width, out.data_ptr(), torch.get_num_threads()
    )
    return out
