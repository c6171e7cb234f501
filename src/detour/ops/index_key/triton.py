"""Triton backends of index_key and index_query: a vector a program, from norm to stored byte."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.index_key import index_key, index_query
from detour.ops.kv_layout import KVLayout
from detour.ops.op import Need
from detour.ops.triton_device import FP8, triton_reasons


@triton.jit
def turn(own, other, at, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rope on numbers `at` of a vector whose partners are `other`; `cos`, `sin` are the token's."""
    if INTERLEAVED:
        angle = at // 2
        first = at % 2 == 0
    else:
        angle = at % HALF
        first = at < HALF
    turned = at < 2 * HALF
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    return own * c + tl.where(first, -other, other) * s


@triton.jit
def partner(at, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        there = at ^ 1
    else:
        there = tl.where(at < HALF, at + HALF, at - HALF)
    return tl.where(at < 2 * HALF, there, at)


@triton.jit
def quantise(value):
    """(e4m3, scale): the least power of two >= largest magnitude / 448, as its exponent's bits."""
    largest = tl.maximum(tl.max(tl.abs(value), 0), 1e-4)
    bits = tl.div_rn(largest, 448.0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    # Times the inverse power of two is exact, and as fast as a product.
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (value * inverse).to(tl.float8e4nv), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def write_key(
    k, weight, bias, eps, cos, sin, cache, floats, slots, stride,
    WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr,
    ROW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    there = partner(at, HALF, INTERLEAVED)
    own = tl.load(k + token * stride + at).to(tl.float32)
    other = tl.load(k + token * stride + there).to(tl.float32)
    mean = tl.sum(own, 0) / WIDTH
    spread = tl.sum((own - mean) * (own - mean), 0) / WIDTH
    factor = 1.0 / tl.sqrt(spread + eps)
    own = (own - mean) * factor * tl.load(weight + at).to(tl.float32)
    own += tl.load(bias + at).to(tl.float32)
    other = (other - mean) * factor * tl.load(weight + there).to(tl.float32)
    other += tl.load(bias + there).to(tl.float32)
    value = turn(own, other, at, cos + token * HALF, sin + token * HALF, HALF, INTERLEAVED)
    slot = tl.load(slots + token).to(tl.int64)
    if PACKED:
        page = slot // PAGE
        place = slot % PAGE
        number, scale = quantise(value)
        tl.store(cache + page * (PAGE * ROW) + place * WIDTH + at, number)
        tl.store(floats + page * (PAGE * ROW // 4) + PAGE * WIDTH // 4 + place, scale)
    else:
        tl.store(cache + slot * WIDTH + at, value.to(cache.dtype.element_ty))


@triton.jit
def make_query(
    q, gate, cos, sin, out, weight, factor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    token = pair // HEADS
    at = tl.arange(0, WIDTH)
    own = tl.load(q + pair * WIDTH + at).to(tl.float32)
    other = tl.load(q + pair * WIDTH + partner(at, HALF, INTERLEAVED)).to(tl.float32)
    value = turn(own, other, at, cos + token * HALF, sin + token * HALF, HALF, INTERLEAVED)
    head = tl.load(gate + pair).to(tl.float32) * factor
    if PACKED:
        number, scale = quantise(value)
        tl.store(out + pair * WIDTH + at, number)
        tl.store(weight + pair, head * scale)
    else:
        tl.store(out + pair * WIDTH + at, value.to(out.dtype.element_ty))
        tl.store(weight + pair, head)


def reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"].name
    found = triton_reasons(device, FP8 if layout == "index_keys_fp8" else (8, 0))
    width = need["width"]
    if width & (width - 1):
        found.append(f"index keys of {width} numbers: it takes powers of two")
    if layout not in ("index_keys", "index_keys_fp8"):
        found.append(f"it serves index_keys and index_keys_fp8 rows, not {layout}")
    return found


@index_key.backend("triton", reasons=reasons, rank=10)
def run_key(
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
    packed = layout.name == "index_keys_fp8"
    tokens, width = k.shape
    if tokens:
        write_key[(tokens,)](
            k, weight, bias, eps, cos, sin, cache.view(torch.float8_e4m3fn) if packed else cache,
            cache.view(torch.float32) if packed else cache, write_slots, k.stride(0),
            WIDTH=width, HALF=cos.shape[1], INTERLEAVED=interleaved, PAGE=cache.shape[1],
            ROW=cache.shape[2], PACKED=packed, num_warps=1,
        )  # fmt: skip


@index_query.backend("triton", reasons=reasons, rank=10)
def run_query(
    q: Tensor, gate: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, layout: KVLayout
) -> tuple[Tensor, Tensor]:
    packed = layout.name == "index_keys_fp8"
    tokens, heads, width = q.shape
    kind = torch.float8_e4m3fn if packed else q.dtype
    out = torch.empty(q.shape, dtype=kind, device=q.device)
    weight = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens:
        make_query[(tokens * heads,)](
            q, gate, cos, sin, out, weight, heads**-0.5 * width**-0.5,
            HEADS=heads, WIDTH=width, HALF=cos.shape[1], INTERLEAVED=interleaved, PACKED=packed,
            num_warps=1,
        )  # fmt: skip
    return out, weight
