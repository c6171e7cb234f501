"""Queries into the latent space on a CPU in C++: a token's are the same bits in any batch."""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.latent_query import latent_query
from detour.ops.op import Need


def _reasons(device: Device, need: Need) -> list[str]:
    if need["rank"] % 8:
        return [f"it takes latents of a multiple of 8 numbers, not {need['rank']}"]
    return native.dtype_reasons(device, need["dtype"])


@latent_query.backend("native", reasons=_reasons, rank=2)
def latent_query_native(
    q: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    tokens, heads, width = q.shape
    plain, rank = keys.shape[1:]
    out = torch.empty(tokens, heads, rank + width - plain, dtype=q.dtype)
    native.function("detour_latent_query", "pnpnnnnnppipii")(
        q.data_ptr(),
        tokens,
        keys.data_ptr(),
        keys.stride(0),
        heads,
        plain,
        rank,
        width - plain,
        cos.data_ptr(),
        sin.data_ptr(),
        int(interleaved),
        out.data_ptr(),
        native.DTYPES[q.dtype],
        native.threads(),
    )
    return out
