"""Results out of the latent space on a CPU in C++: a token's are the same bits in any batch."""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.latent_value import latent_value
from detour.ops.op import Need


def _reasons(device: Device, need: Need) -> list[str]:
    if need["rank"] % 8 or need["width"] % 4:
        return ["it takes latents of a multiple of 8 numbers, heads of a multiple of 4"]
    return native.dtype_reasons(device, need["dtype"])


@latent_value.backend("native", reasons=_reasons, rank=2)
def latent_value_native(latents: Tensor, values: Tensor) -> Tensor:
    tokens, heads, rank = latents.shape
    width = values.shape[1]
    out = torch.empty(tokens, heads * width, dtype=latents.dtype)
    native.function("detour_latent_value", "pnpnnnnpii")(
        latents.data_ptr(),
        tokens,
        values.data_ptr(),
        values.stride(0),
        heads,
        width,
        rank,
        out.data_ptr(),
        native.DTYPES[latents.dtype],
        native.threads(),
    )
    return out
