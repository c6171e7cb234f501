"""Index keys and queries on a CPU in C++, in both layouts."""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.index_key import index_key, index_query
from detour.ops.kv_layout import KVLayout
from detour.ops.op import Need

PACKED = 2  # as cached_rows.cpp numbers kinds of keys and queries, after native.DTYPES


def _reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"]
    if layout.name == "index_keys" and layout.dtype not in native.DTYPES:
        return [f"it writes float32, bfloat16 and e4m3 keys, not {layout.dtype}"]
    if need["width"] % 8:
        return [f"it takes keys of a multiple of 8 numbers, not {need['width']}"]
    return native.dtype_reasons(device, need["dtype"])


@index_key.backend("native", reasons=_reasons, rank=2)
def index_key_native(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    write_slots: Tensor,
    layout: KVLayout,
) -> None:
    native.function("detour_index_key", "pnnppfppninpnipii")(
        k.data_ptr(),
        len(k),
        k.stride(0),
        weight.data_ptr(),
        bias.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        int(interleaved),
        k.shape[1],
        cache.data_ptr(),
        cache.shape[1],
        native.DTYPES.get(layout.dtype, PACKED),
        write_slots.data_ptr(),
        native.DTYPES[k.dtype],
        native.threads(),
    )


@index_query.backend("native", reasons=_reasons, rank=2)
def index_query_native(
    q: Tensor, gate: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, layout: KVLayout
) -> tuple[Tensor, Tensor]:
    tokens, heads, width = q.shape
    packed = layout.name == "index_keys_fp8"
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn if packed else q.dtype)
    weights = torch.empty(tokens, heads)
    native.function("detour_index_query", "ppnnnppnifppiii")(
        q.data_ptr(),
        gate.data_ptr(),
        tokens,
        heads,
        width,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        int(interleaved),
        heads**-0.5 * width**-0.5,
        out.data_ptr(),
        weights.data_ptr(),
        PACKED if packed else 0,
        native.DTYPES[q.dtype],
        native.threads(),
    )
    return out, weights
