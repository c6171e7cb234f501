"""Latent rows on a CPU in C++, in every layout."""

from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.kv_layout import LATENT_BLOCK
from detour.ops.latent_write import latent_write
from detour.ops.mla import LatentShape
from detour.ops.op import Need

PACKED = 2  # as cached_rows.cpp numbers kinds of rows, after native.DTYPES


def _reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"]
    if layout.name == "latent" and layout.dtype not in native.DTYPES:
        return [f"it writes float32 and bfloat16 rows, not {layout.dtype}"]
    if need["rank"] % 8 or need["rope"] % 8:
        return ["it takes ranks and rope parts of a multiple of 8 numbers"]
    return native.dtype_reasons(device, need["dtype"])


@latent_write.backend("native", reasons=_reasons, rank=2)
def latent_write_native(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    write_slots: Tensor,
    shape: LatentShape,
) -> None:
    native.function("detour_latent_write", "pnnpfppinnpnnipii")(
        kv.data_ptr(),
        len(kv),
        kv.stride(0),
        weight.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        int(interleaved),
        shape.rank,
        shape.rope,
        cache.data_ptr(),
        cache.shape[-1] * cache.itemsize,
        min(shape.rank, LATENT_BLOCK),
        native.DTYPES.get(shape.layout.dtype, PACKED),
        write_slots.data_ptr(),
        native.DTYPES[kv.dtype],
        native.threads(),
    )
