"""Triton kernels of the NVFP4 expert layer: sort, gate/up + SwiGLU, down.

Weights are the matrix units' M side and tokens the N side, so 2 to 16 tokens an expert waste
nothing. A weight is e2m1 * e4m3, exact in float16; activations are float16 with a power-of-two
scale a row, so that no value overflows. Low and high nibbles (even and odd k) go through a product
each: activations are stored with their even columns before their odd ones.
"""

import triton
import triton.language as tl

from detour.ops.expert_tiles import list_tiles, rank_pairs


@triton.jit
def unpack(packed, scale, ASM: tl.constexpr):
    """(even, odd) float16 weights of packed bytes; scale: e4m3 as float16, times 64.

    A nibble's bits moved into e4m3's places read as the weight / 64: 7 integer operations and 4
    conversions for 8 weights, where the plain form takes an operation a weight and step.
    """
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b; .reg .b16 l, h;
            shl.b32 a, $4, 4; and.b32 a, a, 0x80808080;
            shl.b32 b, $4, 2; and.b32 b, b, 0x1C1C1C1C; or.b32 a, a, b;
            mov.b32 {l, h}, a; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;
            mul.f16x2 $0, $0, $5; mul.f16x2 $1, $1, $6;
            and.b32 a, $4, 0x80808080;
            shr.u32 b, $4, 2; and.b32 b, b, 0x1C1C1C1C; or.b32 a, a, b;
            mov.b32 {l, h}, a; cvt.rn.f16x2.e4m3x2 $2, l; cvt.rn.f16x2.e4m3x2 $3, h;
            mul.f16x2 $2, $2, $5; mul.f16x2 $3, $3, $6;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed << 4) & 0x80) | ((packed << 2) & 0x1C)
        high = (packed & 0x80) | ((packed >> 2) & 0x1C)
        even = low.to(tl.float8e4nv, bitcast=True).to(tl.float16) * scale
        odd = high.to(tl.float8e4nv, bitcast=True).to(tl.float16) * scale
    return even, odd


@triton.jit
def block_scales(pointers, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """The e4m3 scales [ROWS, BYTES / 8] at `pointers`, times 64, one per packed byte."""
    scale = tl.load(pointers).to(tl.float8e4nv, bitcast=True).to(tl.float16) * 64.0
    wide = tl.broadcast_to(scale[:, :, None], (ROWS, BYTES // 8, 8))
    return tl.reshape(wide, (ROWS, BYTES))


@triton.jit
def power_of_two(top):
    """The largest power of two <= top > 0, at least 2**-100."""
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits, 27 << 23).to(tl.float32, bitcast=True)


@triton.jit
def sort_and_scale(
    x, experts, scaled, scales, order, ends, tile_expert, tile_start, pairs, tiles,
    H: tl.constexpr, HB: tl.constexpr, EB: tl.constexpr, E: tl.constexpr, BM: tl.constexpr,
    RANKS: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One launch, three kinds of program: 0 builds the tile list, 1 .. RANKS rank 64 pairs each
    (position in the order by expert, ties by pair), the rest scale a token's row to float16."""
    program = tl.program_id(0)
    if program == 0:
        list_tiles(experts, ends, tile_expert, tile_start, pairs, tiles, EB, E, BM, CHUNK, TILES)
    elif program <= RANKS:
        rank_pairs(experts, order, pairs, program - 1, EB)
    else:
        token = (program - 1 - RANKS).to(tl.int64)
        at = tl.arange(0, HB)
        row = tl.load(x + token * H + at, mask=at < H, other=0.0).to(tl.float32)
        unit = power_of_two(tl.max(tl.abs(row), 0)) * 0.000244140625  # 2**-12
        even, odd = tl.split(tl.reshape((row / unit).to(tl.float16), (HB // 2, 2)))
        half = tl.arange(0, HB // 2)
        tl.store(scaled + token * H + half, even, mask=half < H // 2)
        tl.store(scaled + token * H + H // 2 + half, odd, mask=half < H // 2)
        tl.store(scales + token, unit)


@triton.jit
def gate_up_swiglu(
    scaled, scales, packed, packed_scale, packed_global, order, ends, tile_expert, tile_start,
    hidden, hidden_scale,
    H: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """hidden[pair in order, :] = silu(gate) * up for one tile of one expert's tokens, BN columns."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.load(tile_start + tile) + tl.arange(0, BM)
    live = at < tl.load(ends + expert)
    token = tl.load(order + at, mask=live, other=0) // TOP_K
    byte = tl.arange(0, BK // 2)
    group = tl.arange(0, BK // 16)
    first = expert.to(tl.int64) * (2 * WIDTH)
    weights = packed + first * (H // 2) + column[:, None] * (H // 2) + byte[None, :]
    factors = packed_scale + first * (H // 16) + column[:, None] * (H // 16) + group[None, :]
    source = scaled + token.to(tl.int64)[None, :] * H + byte[:, None]
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(0, H // BK, num_stages=STAGES):
        even_x = tl.load(source + k * (BK // 2), mask=live[None, :], other=0.0)
        odd_x = tl.load(source + k * (BK // 2) + H // 2, mask=live[None, :], other=0.0)
        factor = block_scales(factors + k * (BK // 16), BN, BK // 2)
        even, odd = unpack(tl.load(weights + k * (BK // 2)), factor, ASM)
        gate = tl.dot(even, even_x, gate)
        gate = tl.dot(odd, odd_x, gate)
        factor = block_scales(factors + k * (BK // 16) + WIDTH * (H // 16), BN, BK // 2)
        even, odd = unpack(tl.load(weights + k * (BK // 2) + WIDTH * (H // 2)), factor, ASM)
        up = tl.dot(even, even_x, up)
        up = tl.dot(odd, odd_x, up)
    unit = tl.load(scales + token)
    gate = gate * (tl.load(packed_global + expert * 2) * unit)[None, :]
    up = up * (tl.load(packed_global + expert * 2 + 1) * unit)[None, :]
    value = gate / (1.0 + tl.exp(-gate)) * up
    unit = power_of_two(tl.max(tl.abs(value), 0)) * 0.000244140625
    value = (value / unit[None, :]).to(tl.float16)
    place = (column % 2) * (WIDTH // 2) + column // 2  # even columns first, as `down` reads them
    row = at.to(tl.int64)
    tl.store(hidden + row[None, :] * WIDTH + place[:, None], value, mask=live[None, :])
    tl.store(hidden_scale + row * (WIDTH // BN) + tl.program_id(0), unit, mask=live)


@triton.jit
def down_weighted(
    hidden, hidden_scale, packed, packed_scale, packed_global, weights, order, ends, tile_expert,
    tile_start, output,
    H: tl.constexpr, WIDTH: tl.constexpr, HIDDEN_BN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LOOPS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """output[pair, :] = router weight * down(hidden), BN * LOOPS columns of one tile."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    at = tl.load(tile_start + tile) + tl.arange(0, BM)
    live = at < tl.load(ends + expert)
    pair = tl.load(order + at, mask=live, other=0)
    row = at.to(tl.int64)
    byte = tl.arange(0, WIDTH // 2)
    group = tl.arange(0, WIDTH // 16)
    # the columns of one hidden tile share a unit; bring a row's tiles to the largest of them
    unit_at = hidden_scale + row[None, :] * (WIDTH // HIDDEN_BN) + (2 * byte // HIDDEN_BN)[:, None]
    unit = tl.load(unit_at, mask=live[None, :], other=1.0)
    top = tl.max(unit, 0)
    ratio = unit / top[None, :]
    source = hidden + row[None, :] * WIDTH + byte[:, None]
    even_x = tl.load(source, mask=live[None, :], other=0.0).to(tl.float32)
    odd_x = tl.load(source + WIDTH // 2, mask=live[None, :], other=0.0).to(tl.float32)
    even_x = (even_x * ratio).to(tl.float16)
    odd_x = (odd_x * ratio).to(tl.float16)
    factor = tl.load(weights + pair, mask=live, other=0.0)
    factor = factor * top * tl.load(packed_global + expert)
    column = tl.program_id(0) * (BN * LOOPS) + tl.arange(0, BN)
    first = expert.to(tl.int64) * H
    matrix = packed + (first + column)[:, None] * (WIDTH // 2) + byte[None, :]
    factors = packed_scale + (first + column)[:, None] * (WIDTH // 16) + group[None, :]
    target = output + pair.to(tl.int64)[None, :] * H + column[:, None]
    for step in tl.range(0, LOOPS, num_stages=STAGES):
        scale = block_scales(factors + step * (BN * (WIDTH // 16)), BN, WIDTH // 2)
        even, odd = unpack(tl.load(matrix + step * (BN * (WIDTH // 2))), scale, ASM)
        sums = tl.zeros((BN, BM), tl.float32)
        sums = tl.dot(even, even_x, sums)
        sums = tl.dot(odd, odd_x, sums) * factor[None, :]
        tl.store(target + step * BN, sums.to(output.dtype.element_ty), mask=live[None, :])
