"""Triton backends of rms_norm and add_rms_norm: a row a program, in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.norm import add_rms_norm, rms_norm
from detour.ops.op import Need
from detour.ops.triton_device import triton_reasons


@triton.jit
def normalise(
    x, residual, weight, out, total, stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    value = tl.load(x + row * stride + at, mask=mask, other=0.0)
    kind = value.dtype
    if ADD:
        other = tl.load(residual + row * WIDTH + at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(kind)
        tl.store(total + row * WIDTH + at, value, mask=mask)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    normal = (wide * scale).to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + at, (normal * factor).to(kind), mask=mask)


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device)
    if need["width"] > 32768:
        found.append(f"a row of {need['width']} is more than a program holds")
    return found


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@rms_norm.backend("triton", reasons=reasons, rank=10)
def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Rows of one stride are taken as they are (a slice of a projection), others are copied.
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    if len(rows):
        block = triton.next_power_of_2(width)
        normalise[(len(rows),)](
            rows, rows, weight, out, out, rows.stride(0), eps,
            WIDTH=width, BLOCK=block, ADD=False, num_warps=_warps(block),
        )  # fmt: skip
    return out


@add_rms_norm.backend("triton", reasons=reasons, rank=10)
def run_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        normalise[(rows,)](
            x, residual, weight, out, residual, x.stride(0), eps,
            WIDTH=width, BLOCK=block, ADD=True, num_warps=_warps(block),
        )  # fmt: skip
    return out, residual
