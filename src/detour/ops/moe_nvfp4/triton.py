"""Triton backend of moe_nvfp4: four launches, no host synchronisation, fixed grids (CUDA graphs)."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from detour.ops.device import Device
from detour.ops.expert_tiles import RANKED_PAIRS, add_up
from detour.ops.moe_nvfp4 import kernels, moe_nvfp4
from detour.ops.op import Need
from detour.ops.triton_device import FP8, triton_reasons


@dataclass(frozen=True)
class Blocks:
    """Tile shapes: tokens, gate/up columns and k, warps and stages; the same of down."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int
    down_columns: int
    down_loops: int
    down_warps: int
    down_stages: int


def choose_blocks(pairs: int, experts: int) -> Blocks:
    """Good shapes on an H200 for this many pairs; measured in bench/kernels.py."""
    mean = pairs / experts
    if mean <= 3:
        return Blocks(8, 64, 128, 4, 3, 64, 8, 4, 3)
    if mean <= 12:
        return Blocks(16, 32, 128, 2, 3, 64, 8, 4, 3)
    if mean <= 24:
        return Blocks(32, 32, 128, 2, 3, 64, 16, 4, 3)
    if mean <= 96:
        return Blocks(64, 64, 128, 4, 3, 64, 8, 4, 3)
    return Blocks(64, 64, 128, 4, 3, 64, 16, 4, 3)


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device, FP8)
    hidden, width = need["hidden"], need["width"]
    if hidden % 128 or width % 64 or width & (width - 1):
        found.append(
            f"hidden size {hidden} must be a multiple of 128 and expert width {width} a power "
            "of two of at least 64"
        )
    return found


def launch(blocks: Blocks, asm: bool, *args: Tensor) -> Tensor:
    x, gate_up, gate_scale, gate_global, down, down_scale, down_global, weights, experts = args
    tokens, hidden = x.shape
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    top_k = experts.shape[1]
    pairs = tokens * top_k
    tiles = min(pairs, count + pairs // blocks.tokens)
    integers = torch.empty(pairs + count + 2 * tiles, dtype=torch.int32, device=x.device)
    order, ends, tile_expert, tile_start = integers.split((pairs, count, tiles, tiles))
    scaled = torch.empty(tokens, hidden, dtype=torch.float16, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    ranks = triton.cdiv(pairs, 64) if pairs <= RANKED_PAIRS else 0
    if not ranks:
        order = torch.sort(experts.flatten(), stable=True).indices.int()
    power = triton.next_power_of_2
    kernels.sort_and_scale[(1 + ranks + tokens,)](
        x, experts, scaled, scales, order, ends, tile_expert, tile_start, pairs, tiles,
        H=hidden, HB=power(hidden), EB=power(count), E=count, BM=blocks.tokens, RANKS=ranks,
        CHUNK=min(1024, max(32, power(pairs))), TILES=power(tiles), num_warps=8,
    )  # fmt: skip
    columns = min(blocks.columns, width)
    middle = torch.empty(pairs, width, dtype=torch.float16, device=x.device)
    middle_scale = torch.empty(pairs, width // columns, dtype=torch.float32, device=x.device)
    kernels.gate_up_swiglu[(width // columns, tiles)](
        scaled, scales, gate_up, gate_scale.view(torch.uint8), gate_global, order, ends,
        tile_expert, tile_start, middle, middle_scale,
        H=hidden, WIDTH=width, TOP_K=top_k, BM=blocks.tokens, BN=columns,
        BK=min(blocks.depth, 128), STAGES=blocks.stages, ASM=asm, num_warps=blocks.warps,
    )  # fmt: skip
    kind = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    parts = torch.empty(pairs, hidden, dtype=kind, device=x.device)
    rows = blocks.down_columns
    loops = blocks.down_loops
    while hidden % (rows * loops):
        loops //= 2
    kernels.down_weighted[(hidden // (rows * loops), tiles)](
        middle, middle_scale, down, down_scale.view(torch.uint8), down_global, weights, order,
        ends, tile_expert, tile_start, parts,
        H=hidden, WIDTH=width, HIDDEN_BN=columns, BM=blocks.tokens, BN=rows, LOOPS=loops,
        STAGES=blocks.down_stages, ASM=asm, num_warps=blocks.down_warps,
    )  # fmt: skip
    output = torch.empty_like(x)
    add_up(parts, output)
    return output


@moe_nvfp4.backend("triton", reasons=reasons, rank=10)
def run(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_global: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_global: Tensor,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    if not len(x):
        return torch.empty_like(x)
    blocks = choose_blocks(experts.numel(), gate_up.shape[0])
    return launch(
        blocks, x.is_cuda, x, gate_up, gate_up_scale, gate_up_global, down, down_scale,
        down_global, weights, experts,
    )  # fmt: skip
