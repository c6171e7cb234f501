"""Triton backend of gemm_scaled: weights are widened in registers, so that a step reads them packed.

For steps of many tokens, where the matrix units are the limit and not memory, the reference expands
the weight once and leaves the product to torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.gemm import PackedWeight, keep
from detour.ops.gemm_scaled import gemm_scaled
from detour.ops.moe_nvfp4.kernels import block_scales, unpack
from detour.ops.op import Need
from detour.ops.scaled import FP8_BLOCK
from detour.ops.triton_device import FP8, triton_reasons

MANY = 512  # tokens from which on the reference serves; not measured yet
ROWS = 64  # outputs of a program


@triton.jit
def product_fp8(
    x, values, scales, of_row, bias, out, tokens, rows, columns, x_stride, wide,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKED: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM tokens. BLOCKED: a scale for each BLOCK columns, of which BK is a divisor."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    line = tl.load(of_row + n, mask=n < rows, other=0)
    matrix = values + n.to(tl.int64)[:, None] * columns + k[None, :]
    source = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    sums = tl.zeros((BN, BM), tl.float32)
    for first in tl.range(0, columns, BK, num_stages=STAGES):
        inside = first + k < columns
        weight = tl.load(matrix + first, mask=(n < rows)[:, None] & inside[None, :], other=0.0)
        weight = weight.to(x.dtype.element_ty)
        some = tl.load(source + first, mask=(m < tokens)[None, :] & inside[:, None], other=0.0)
        if BLOCKED:
            scale = tl.load(scales + line * wide + first // BLOCK)
            sums += tl.dot(weight, some, input_precision=PRECISION) * scale[:, None]
        else:
            sums = tl.dot(weight, some, sums, input_precision=PRECISION)
    if not BLOCKED:
        sums = sums * tl.load(scales + line)[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    target = out + m.to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(
        target, sums.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < rows)[:, None]
    )


@triton.jit
def product_nvfp4(
    x, values, scales, factors, bias, out, tokens, rows, columns, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM tokens; BK divides `columns`. Even and odd columns have a product each."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.minimum(n, rows - 1).to(tl.int64)[:, None]
    token = tl.minimum(m, tokens - 1).to(tl.int64)[:, None]
    matrix = values + row * (columns // 2) + tl.arange(0, BK // 2)[None, :]
    shared = scales + row * (columns // 16) + tl.arange(0, BK // 16)[None, :]
    source = x + token * x_stride + tl.arange(0, BK)[None, :]
    kind = x.dtype.element_ty
    sums = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(0, columns // BK, num_stages=STAGES):
        scale = block_scales(shared + step * (BK // 16), BN, BK // 2)
        even, odd = unpack(tl.load(matrix + step * (BK // 2)), scale, ASM)
        some = tl.load(source + step * BK)
        even_x, odd_x = tl.split(tl.reshape(some, (BM, BK // 2, 2)))
        # A weight is e2m1 * e4m3: exact in float16, and in bfloat16 too.
        sums = tl.dot(even.to(kind), tl.trans(even_x), sums, input_precision=PRECISION)
        sums = tl.dot(odd.to(kind), tl.trans(odd_x), sums, input_precision=PRECISION)
    sums = sums * tl.load(factors + n, mask=n < rows, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    target = out + m.to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(
        target, sums.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < rows)[:, None]
    )


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device, FP8)
    if need["packing"] == "NVFP4" and need["columns"] % 32:
        found.append(f"{need['columns']} columns of NVFP4: it takes multiples of 32")
    return found


@gemm_scaled.backend("triton", reasons=reasons, plan=keep, rank=10)
def run(weight: PackedWeight, x: Tensor, bias: Tensor) -> Tensor:
    tokens = len(x)
    if tokens > MANY:
        return gemm_scaled.reference.run(weight, x, bias)  # type: ignore[no-any-return]
    out = torch.empty(tokens, weight.rows, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    exact = x.dtype == torch.float32
    size = min(64, max(16, triton.next_power_of_2(tokens)))
    grid = (triton.cdiv(weight.rows, ROWS), triton.cdiv(tokens, size))
    values, scales, others = weight.tensors
    shapes = (tokens, weight.rows, weight.columns, x.stride(0))
    common = {"BM": size, "BN": ROWS, "BIAS": len(bias) > 0, "STAGES": 2 if exact else 3}
    common |= {"PRECISION": "ieee" if exact else "tf32", "num_warps": 4}
    depth = 64 if exact else 128
    if weight.packing == "NVFP4":
        product_nvfp4[grid](
            x, values, scales.view(torch.uint8), others, bias, out, *shapes,
            BK=min(depth, weight.columns & -weight.columns), ASM=x.is_cuda, **common,
        )  # fmt: skip
    else:
        product_fp8[grid](
            x, values, scales, others, bias, out, *shapes, scales.shape[1],
            BK=depth, BLOCK=FP8_BLOCK, BLOCKED=scales.shape[1] > 1, **common,
        )  # fmt: skip
    return out
