"""Triton backend of latent_write: a token a program, from projection to stored byte."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.index_key.triton import partner, turn
from detour.ops.kv_layout import LATENT_BLOCK
from detour.ops.latent_write import latent_write
from detour.ops.mla import LatentShape
from detour.ops.op import Need
from detour.ops.triton_device import FP8, triton_reasons


@triton.jit
def write_row(
    kv, weight, eps, cos, sin, cache, floats, halves, slots, stride,
    RANK: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, ROW: tl.constexpr,
    INTERLEAVED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    source = kv + token * stride
    part = tl.arange(0, RANK // BLOCK)
    at = part[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(source + at)
    kind = value.dtype
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(tl.sum(wide * wide, 1), 0) / RANK + eps)
    normal = (wide * scale).to(kind).to(tl.float32) * tl.load(weight + at).to(tl.float32)
    normal = normal.to(kind).to(tl.float32)
    r = tl.arange(0, ROPE)
    own = tl.load(source + RANK + r).to(tl.float32)
    other = tl.load(source + RANK + partner(r, ROPE // 2, INTERLEAVED)).to(tl.float32)
    half = token * (ROPE // 2)
    turned = turn(own, other, r, cos + half, sin + half, ROPE // 2, INTERLEAVED).to(kind)
    if PACKED:
        largest = tl.max(tl.abs(normal), 1)
        factor = tl.where(
            largest > 0, tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)), 1.0
        )
        packed = tl.div_rn(normal, tl.broadcast_to(factor[:, None], normal.shape))
        tl.store(cache + slot * ROW + at, packed.to(tl.float8e4nv))
        tl.store(floats + slot * (ROW // 4) + RANK // 4 + part, factor)
        after: tl.constexpr = (RANK + 4 * (RANK // BLOCK)) // 2
        tl.store(halves + slot * (ROW // 2) + after + r, turned.to(tl.bfloat16))
    else:
        tl.store(cache + slot * ROW + at, normal.to(cache.dtype.element_ty))
        tl.store(cache + slot * ROW + RANK + r, turned.to(cache.dtype.element_ty))


def reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"].name
    found = triton_reasons(device, FP8 if layout == "latent_fp8_packed" else (8, 0))
    if layout not in ("latent", "latent_fp8_packed"):
        found.append(f"it writes latent and latent_fp8_packed rows, not {layout}")
    for name in ("rank", "rope"):
        if need[name] & (need[name] - 1):
            found.append(f"{name} {need[name]} is not a power of two")
    return found


@latent_write.backend("triton", reasons=reasons, rank=10)
def run(
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
    packed = shape.layout.name == "latent_fp8_packed"
    if len(kv):
        write_row[(len(kv),)](
            kv, weight, eps, cos, sin, cache.view(torch.float8_e4m3fn) if packed else cache,
            cache.view(torch.float32) if packed else cache,
            cache.view(torch.bfloat16) if packed else cache, write_slots, kv.stride(0),
            RANK=shape.rank, BLOCK=min(shape.rank, LATENT_BLOCK), ROPE=shape.rope,
            ROW=cache.shape[-1], INTERLEAVED=interleaved, PACKED=packed, num_warps=1,
        )  # fmt: skip
