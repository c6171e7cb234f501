"""Triton backend of silu_mul."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.silu_mul import silu_mul
from detour.ops.triton_device import triton_reasons


@triton.jit
def gate(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    left = tl.load(x + row * (2 * WIDTH) + at, mask=mask, other=0.0)
    right = tl.load(x + row * (2 * WIDTH) + WIDTH + at, mask=mask, other=0.0)
    wide = left.to(tl.float32)
    kind = left.dtype
    value = (wide / (1.0 + tl.exp(-wide))).to(kind).to(tl.float32) * right.to(tl.float32)
    tl.store(out + row * WIDTH + at, value.to(kind), mask=mask)


def reasons(device: Device, need: Need) -> list[str]:
    return triton_reasons(device)


@silu_mul.backend("triton", reasons=reasons, rank=10)
def run(x: Tensor) -> Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        gate[(rows, triton.cdiv(width, block))](x, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out
