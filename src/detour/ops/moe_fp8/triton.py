"""Triton backend of moe_fp8: moe's launches, on weights that are widened in registers.

A weight is exact in x's dtype; its scale meets the sums, where the reference rounds their product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device, probe
from detour.ops.expert_tiles import add_up, make_tiles
from detour.ops.moe.triton import choose_blocks
from detour.ops.moe_fp8 import moe_fp8
from detour.ops.op import Need
from detour.ops.scaled import FP8_BLOCK
from detour.ops.triton_device import FP8, triton_reasons


@triton.jit
def gate_up_swiglu(
    x, values, scales, of_row, order, ends, tile_expert, tile_start, hidden, x_stride, count, wide,
    H: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BLOCK: tl.constexpr, BLOCKED: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden[pair in order, :] = silu(gate) * up for one tile of one expert's tokens, BN columns.

    `count` lines of scales an expert, `wide` scales a line (BLOCKED: one for BLOCK columns)."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    own = column < WIDTH
    at = tl.load(tile_start + tile) + tl.arange(0, BM)
    live = at < tl.load(ends + expert)
    token = tl.load(order + at, mask=live, other=0) // TOP_K
    k = tl.arange(0, BK)
    matrix = values + (expert.to(tl.int64) * (2 * WIDTH) + column)[:, None] * H + k[None, :]
    source = x + token.to(tl.int64)[None, :] * x_stride + k[:, None]
    lines = scales + expert * count * wide
    of_gate = lines + tl.load(of_row + column, mask=own, other=0) * wide
    of_up = lines + tl.load(of_row + WIDTH + column, mask=own, other=0) * wide
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    kind = x.dtype.element_ty
    for first in tl.range(0, H, BK, num_stages=STAGES):
        inside = own[:, None] & (first + k < H)[None, :]
        some = tl.load(source + first, mask=live[None, :] & (first + k < H)[:, None], other=0.0)
        low = tl.load(matrix + first, mask=inside, other=0.0).to(kind)
        high = tl.load(matrix + first + WIDTH * H, mask=inside, other=0.0).to(kind)
        if BLOCKED:
            scale = tl.load(of_gate + first // BLOCK)[:, None]
            gate += tl.dot(low, some, input_precision=PRECISION) * scale
            scale = tl.load(of_up + first // BLOCK)[:, None]
            up += tl.dot(high, some, input_precision=PRECISION) * scale
        else:
            gate = tl.dot(low, some, gate, input_precision=PRECISION)
            up = tl.dot(high, some, up, input_precision=PRECISION)
    if not BLOCKED:
        gate = gate * tl.load(of_gate)[:, None]
        up = up * tl.load(of_up)[:, None]
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(hidden.dtype.element_ty)
    target = hidden + at.to(tl.int64)[None, :] * WIDTH + column[:, None]
    tl.store(target, value, mask=live[None, :] & own[:, None])


@triton.jit
def down_weighted(
    hidden, values, scales, of_row, factors, order, ends, tile_expert, tile_start, parts,
    count, wide,
    H: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[pair, :] = router weight * down(hidden), BN columns of one tile."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    own = column < H
    at = tl.load(tile_start + tile) + tl.arange(0, BM)
    live = at < tl.load(ends + expert)
    pair = tl.load(order + at, mask=live, other=0)
    k = tl.arange(0, BK)
    matrix = values + (expert.to(tl.int64) * H + column)[:, None] * WIDTH + k[None, :]
    source = hidden + at.to(tl.int64)[None, :] * WIDTH + k[:, None]
    line = scales + expert * count * wide + tl.load(of_row + column, mask=own, other=0) * wide
    sums = tl.zeros((BN, BM), tl.float32)
    for first in tl.range(0, WIDTH, BK, num_stages=STAGES):
        inside = first + k < WIDTH
        some = tl.load(source + first, mask=live[None, :] & inside[:, None], other=0.0)
        weight = tl.load(matrix + first, mask=own[:, None] & inside[None, :], other=0.0)
        weight = weight.to(hidden.dtype.element_ty)
        if BLOCKED:
            scale = tl.load(line + first // BLOCK)[:, None]
            sums += tl.dot(weight, some, input_precision=PRECISION) * scale
        else:
            sums = tl.dot(weight, some, sums, input_precision=PRECISION)
    if not BLOCKED:
        sums = sums * tl.load(line)[:, None]
    sums = sums * tl.load(factors + pair, mask=live, other=0.0)[None, :]
    target = parts + pair.to(tl.int64)[None, :] * H + column[:, None]
    tl.store(target, sums.to(parts.dtype.element_ty), mask=live[None, :] & own[:, None])


def reasons(device: Device, need: Need) -> list[str]:
    return triton_reasons(device, FP8)


@moe_fp8.backend("triton", reasons=reasons, rank=10)
def run(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_row: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_row: Tensor,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return output
    hidden, width = x.shape[1], gate_up.shape[1] // 2
    blocks = choose_blocks(experts.numel(), gate_up.shape[0])
    blocks = blocks.fitting(probe(str(x.device)).shared_memory, x.dtype.itemsize)
    tiles = make_tiles(experts, gate_up.shape[0], blocks.tokens)
    exact = x.dtype == torch.float32
    common = {"H": hidden, "WIDTH": width, "BM": blocks.tokens, "BN": blocks.columns}
    common |= {"BK": blocks.depth, "BLOCK": FP8_BLOCK, "STAGES": blocks.stages}
    common |= {"PRECISION": "ieee" if exact else "tf32", "num_warps": blocks.warps}
    middle = torch.empty(experts.numel(), width, dtype=x.dtype, device=x.device)
    gate_up_swiglu[(triton.cdiv(width, blocks.columns), len(tiles[2]))](
        x, gate_up, gate_up_scale, gate_up_row, *tiles, middle, x.stride(0),
        *gate_up_scale.shape[1:], TOP_K=experts.shape[1], BLOCKED=gate_up_scale.shape[2] > 1,
        **common,
    )  # fmt: skip
    parts = torch.empty(experts.numel(), hidden, dtype=x.dtype, device=x.device)
    down_weighted[(triton.cdiv(hidden, blocks.columns), len(tiles[2]))](
        middle, down, down_scale, down_row, weights, *tiles, parts, *down_scale.shape[1:],
        BLOCKED=down_scale.shape[2] > 1, **common,
    )  # fmt: skip
    add_up(parts, output)
    return output
