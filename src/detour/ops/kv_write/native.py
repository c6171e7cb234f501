"""The write to a cache of the numbers' own dtype on a CPU in C++, float32 or bfloat16."""

from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.kv_write import kv_write
from detour.ops.op import Need


def _reasons(device: Device, need: Need) -> list[str]:
    if need["layout"].dtype is not need["dtype"]:
        return [f"it converts nothing: {need['dtype']} to {need['layout'].dtype}"]
    return native.dtype_reasons(device, need["dtype"])


@kv_write.backend("native", reasons=_reasons, rank=2)
def kv_write_native(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, write_slots: Tensor
) -> None:
    native.function("detour_kv_write", "pnpnpnnppii")(
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        write_slots.data_ptr(),
        keys.shape[0],
        keys.shape[1] * keys.shape[2],
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        native.DTYPES[keys.dtype],
        native.threads(),
    )
