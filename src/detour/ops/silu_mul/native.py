"""The gate on a CPU in C++, float32 or bfloat16."""

from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.silu_mul import silu_mul


def _reasons(device: Device, need: Need) -> list[str]:
    return native.dtype_reasons(device, need["dtype"])


@silu_mul.backend("native", reasons=_reasons, rank=2)
def silu_mul_native(x: Tensor) -> Tensor:
    width = x.shape[1] // 2
    out = x.new_empty(x.shape[0], width)
    native.function("detour_silu_mul", "pnnpii")(
        x.data_ptr(),
        x.shape[0],
        width,
        out.data_ptr(),
        native.DTYPES[x.dtype],
        native.threads(),
    )
    return out
