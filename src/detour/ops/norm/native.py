"""Norms on a CPU in C++, float32 or bfloat16."""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.norm import add_rms_norm, rms_norm
from detour.ops.op import Need


def _reasons(device: Device, need: Need) -> list[str]:
    return native.dtype_reasons(device, need["dtype"])


@rms_norm.backend("native", reasons=_reasons, rank=2)
def rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1]).contiguous()
    outer, inner = (x.shape[0], x.shape[1]) if x.dim() == 3 else (x.numel() // x.shape[-1], 1)
    native.function("detour_rms_norm", "pnnnnnpfpii")(
        x.data_ptr(),
        outer,
        inner,
        x.stride(0) if x.dim() > 1 else 0,
        x.stride(1) if x.dim() == 3 else 0,
        x.shape[-1],
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        native.DTYPES[x.dtype],
        native.threads(),
    )
    return out


@add_rms_norm.backend("native", reasons=_reasons, rank=2)
def add_rms_norm_native(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    native.function("detour_add_rms_norm", "ppnnpfii")(
        x.data_ptr(),
        residual.data_ptr(),
        x.shape[0],
        x.shape[1],
        weight.data_ptr(),
        eps,
        native.DTYPES[x.dtype],
        native.threads(),
    )
    return x, residual
