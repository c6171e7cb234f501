"""Rotation in place on a CPU in C++, float32 or bfloat16."""

from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.rope import rope


def _reasons(device: Device, need: Need) -> list[str]:
    return native.dtype_reasons(device, need["dtype"])


@rope.backend("native", reasons=_reasons, rank=2)
def rope_native(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    native.function("detour_rope", "pnnnnppnii")(
        x.data_ptr(),
        x.shape[0],
        x.shape[1],
        x.shape[2],
        x.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        native.DTYPES[x.dtype],
        native.threads(),
    )
    return x
