"""Triton backend of moe: four launches, no host synchronisation, fixed grids (CUDA graphs).

Weights are the matrix units' M side and tokens the N side, so that few tokens an expert waste
little. Both products sum in float32; what lies between them is rounded to x's dtype.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device, probe
from detour.ops.expert_tiles import add_up, make_tiles
from detour.ops.moe import moe
from detour.ops.op import Need
from detour.ops.triton_device import triton_reasons


@triton.jit
def gate_up_swiglu(
    x, weights, order, ends, tile_expert, tile_start, hidden, x_stride,
    H: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
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
    k = tl.arange(0, BK)
    first = expert.to(tl.int64) * (2 * WIDTH)
    matrix = weights + (first + column)[:, None] * H + k[None, :]
    source = x + token.to(tl.int64)[None, :] * x_stride + k[:, None]
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(0, H // BK, num_stages=STAGES):
        rows = tl.load(source + step * BK, mask=live[None, :], other=0.0)
        gate = tl.dot(tl.load(matrix + step * BK), rows, gate, input_precision=PRECISION)
        above = tl.load(matrix + step * BK + WIDTH * H)
        up = tl.dot(above, rows, up, input_precision=PRECISION)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(hidden.dtype.element_ty)
    target = hidden + at.to(tl.int64)[None, :] * WIDTH + column[:, None]
    tl.store(target, value, mask=live[None, :])


@triton.jit
def down_weighted(
    hidden, weights, factors, order, ends, tile_expert, tile_start, parts,
    H: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[pair, :] = router weight * down(hidden), BN columns of one tile."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.load(tile_start + tile) + tl.arange(0, BM)
    live = at < tl.load(ends + expert)
    pair = tl.load(order + at, mask=live, other=0)
    k = tl.arange(0, BK)
    matrix = weights + (expert.to(tl.int64) * H + column)[:, None] * WIDTH + k[None, :]
    source = hidden + at.to(tl.int64)[None, :] * WIDTH + k[:, None]
    sums = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(0, WIDTH // BK, num_stages=STAGES):
        rows = tl.load(source + step * BK, mask=live[None, :], other=0.0)
        sums = tl.dot(tl.load(matrix + step * BK), rows, sums, input_precision=PRECISION)
    sums = sums * tl.load(factors + pair, mask=live, other=0.0)[None, :]
    target = parts + pair.to(tl.int64)[None, :] * H + column[:, None]
    tl.store(target, sums.to(parts.dtype.element_ty), mask=live[None, :])


@dataclass(frozen=True)
class Blocks:
    """Tile shapes: tokens, columns, depth; warps and stages."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int

    def fitting(self, shared_memory: int, itemsize: int) -> "Blocks":
        """As many bytes deep for any type; fewer stages where a thread block may use less memory."""
        depth = self.depth * 2 // itemsize
        stage = (2 * self.columns + self.tokens) * depth * itemsize
        return replace(self, depth=depth, stages=max(2, min(self.stages, shared_memory // stage)))


def choose_blocks(pairs: int, experts: int) -> Blocks:
    """By the tokens an expert gets in the mean. Not measured yet: moe_nvfp4's shapes, unpacked."""
    mean = pairs / experts
    if mean <= 6:
        return Blocks(8, 64, 128, 4, 3)
    if mean <= 16:
        return Blocks(16, 64, 128, 4, 3)
    if mean <= 96:
        return Blocks(32, 64, 64, 4, 3)
    return Blocks(128, 128, 64, 8, 3)


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device)
    hidden, width = need["hidden"], need["width"]
    if hidden % 16 or width % 16:
        found.append(f"hidden size {hidden} and expert width {width} must be multiples of 16")
    return found


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)


@moe.backend("triton", reasons=reasons, rank=10)
def run(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    if not len(x):
        return torch.empty_like(x)
    blocks = choose_blocks(experts.numel(), gate_up.shape[0])
    blocks = blocks.fitting(probe(str(x.device)).shared_memory, x.dtype.itemsize)
    return launch(blocks, x, gate_up, down, weights, experts)


def launch(
    blocks: Blocks, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor
) -> Tensor:
    hidden = x.shape[1]
    count, width, pairs = gate_up.shape[0], gate_up.shape[1] // 2, experts.numel()
    tiles = make_tiles(experts, count, blocks.tokens)
    grid = len(tiles[2])
    exact = x.dtype == torch.float32
    shared = {"H": hidden, "WIDTH": width, "BM": blocks.tokens, "num_warps": blocks.warps}
    shared |= {"STAGES": blocks.stages, "PRECISION": "ieee" if exact else "tf32"}
    middle = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    columns = _divisor(width, blocks.columns)
    gate_up_swiglu[(width // columns, grid)](
        x, gate_up, *tiles, middle, x.stride(0),
        TOP_K=experts.shape[1], BN=columns, BK=_divisor(hidden, blocks.depth), **shared,
    )  # fmt: skip
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    columns = _divisor(hidden, blocks.columns)
    down_weighted[(hidden // columns, grid)](
        middle, down, weights, *tiles, parts,
        BN=columns, BK=_divisor(width, blocks.depth), **shared,
    )  # fmt: skip
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_up(parts, output)
    return output
