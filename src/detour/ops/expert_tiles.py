"""Triton kernels that every expert layer's backend shares: pairs in the order of their experts, cut
into tiles of one expert each, without the host; and the sum of a token's pairs.

A pair is a token and one of its experts, numbered token * top_k + place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Above this many pairs a radix sort beats ranking every pair against every other.
RANKED_PAIRS = 8192


@triton.jit
def list_tiles(
    experts, ends, tile_expert, tile_start, pairs, tiles,
    EB: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """ends[e]: where expert e's pairs end in the order; each tile's expert (-1 = none) and start."""
    ids = tl.arange(0, EB)
    counts = tl.zeros((EB,), tl.int32)
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        some = tl.load(experts + at, mask=at < pairs, other=EB - 1).to(tl.int32)
        counts += tl.histogram(some, EB)
        # pairs beyond the end were counted as the last id
        counts -= tl.where(ids == EB - 1, tl.sum((at >= pairs).to(tl.int32), 0), 0)
    end = tl.cumsum(counts, 0)
    tl.store(ends + ids, end, mask=ids < E)
    needed = (counts + BM - 1) // BM
    base = tl.cumsum(needed, 0) - needed
    for step in range(tl.max(needed, 0)):
        here = step < needed
        tl.store(tile_expert + base + step, ids, mask=here)
        tl.store(tile_start + base + step, end - counts + step * BM, mask=here)
    rest = tl.arange(0, TILES)
    tl.store(tile_expert + rest, -1, mask=(rest >= tl.sum(needed, 0)) & (rest < tiles))


@triton.jit
def rank_pairs(experts, order, pairs, part, EB: tl.constexpr):
    """Places of pairs [64 * part, 64 * part + 64) in the order by expert, ties by pair."""
    own = part * 64 + tl.arange(0, 64)
    mine = tl.load(experts + own, mask=own < pairs, other=EB).to(tl.int32)
    rank = tl.zeros((64,), tl.int32)
    for first in range(0, pairs, 64):
        at = first + tl.arange(0, 64)
        other = tl.load(experts + at, mask=at < pairs, other=EB + 1).to(tl.int32)
        before = (other[None, :] < mine[:, None]) | (
            (other[None, :] == mine[:, None]) & (at[None, :] < own[:, None])
        )
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(order + rank, own, mask=own < pairs)


@triton.jit
def tile_pairs(
    experts, order, ends, tile_expert, tile_start, pairs, tiles,
    EB: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program 0 lists the tiles, the others rank 64 pairs each."""
    program = tl.program_id(0)
    if program == 0:
        list_tiles(experts, ends, tile_expert, tile_start, pairs, tiles, EB, E, BM, CHUNK, TILES)
    else:
        rank_pairs(experts, order, pairs, program - 1, EB)


@triton.jit
def sum_pairs(parts, output, H: tl.constexpr, TOP_K: tl.constexpr, BH: tl.constexpr):
    """output[t, :] = the sum of the token's TOP_K pairs, in float32."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(parts + (token * TOP_K + j) * H + at, mask=at < H, other=0.0).to(
            tl.float32
        )
    tl.store(output + token * H + at, total.to(output.dtype.element_ty), mask=at < H)


def add_up(parts: Tensor, output: Tensor) -> None:
    """parts [T * k, H], output [T, H]."""
    tokens, hidden = output.shape
    block = min(1024, triton.next_power_of_2(hidden))
    sum_pairs[(tokens, triton.cdiv(hidden, block))](
        parts, output, H=hidden, TOP_K=len(parts) // tokens, BH=block, num_warps=4
    )


def make_tiles(experts: Tensor, count: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order [pairs], ends [count], tile_expert [tiles], tile_start [tiles]), all int32.

    experts [T, k]; tiles of `size` pairs. As many tiles as any choice of experts may need: how many
    are used is known to the device alone.
    """
    pairs = experts.numel()
    tiles = min(pairs, count + pairs // size)
    integers = torch.empty(pairs + count + 2 * tiles, dtype=torch.int32, device=experts.device)
    order, ends, tile_expert, tile_start = integers.split((pairs, count, tiles, tiles))
    ranks = triton.cdiv(pairs, 64) if pairs <= RANKED_PAIRS else 0
    if not ranks:
        order = torch.sort(experts.flatten(), stable=True).indices.int()
    power = triton.next_power_of_2
    tile_pairs[(1 + ranks,)](
        experts, order, ends, tile_expert, tile_start, pairs, tiles,
        EB=power(count), E=count, BM=size, CHUNK=min(1024, max(32, power(pairs))),
        TILES=power(tiles), num_warps=8,
    )  # fmt: skip
    return order, ends, tile_expert, tile_start
