"""Triton backend of rope: every head of a token in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.rope import rope
from detour.ops.triton_device import triton_reasons


@triton.jit
def rotate(
    x, cos, sin, out, stride,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, REST: tl.constexpr, REST_P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_P)[:, None]
    at = tl.arange(0, HALF_P)
    mask = (head < HEADS) & (at < HALF)[None, :]
    place = head * WIDTH + at[None, :]
    c = tl.load(cos + token * HALF + at, mask=at < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + at, mask=at < HALF, other=0.0)[None, :]
    first = tl.load(x + token * stride + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + token * stride + place + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out + token * (HEADS * WIDTH) + place
    kind = out.dtype.element_ty
    tl.store(target, (first * c - second * s).to(kind), mask=mask)
    tl.store(target + HALF, (second * c + first * s).to(kind), mask=mask)
    if REST > 0:
        rest = tl.arange(0, REST_P)
        mask = (head < HEADS) & (rest < REST)[None, :]
        place = head * WIDTH + 2 * HALF + rest[None, :]
        value = tl.load(x + token * stride + place, mask=mask)
        tl.store(out + token * (HEADS * WIDTH) + place, value, mask=mask)


def reasons(device: Device, need: Need) -> list[str]:
    return triton_reasons(device)


@rope.backend("triton", reasons=reasons, rank=10)
def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, width = x.shape
    half = cos.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    power = triton.next_power_of_2
    if tokens:
        rest = width - 2 * half
        rotate[(tokens,)](
            x, cos, sin, out, x.stride(0),
            HEADS=heads, HEADS_P=power(heads), WIDTH=width, HALF=half, HALF_P=power(half),
            REST=rest, REST_P=power(max(rest, 1)), num_warps=4,
        )  # fmt: skip
    return out
