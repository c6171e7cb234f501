"""gemm_scaled: rows times a matrix of small floats with scales (NVFP4, FP8); activations stay wide.

gemm's sibling for the packings of `SCALED`. Knows how they lie in memory, not where they came from.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from detour.ops.gemm import SCALED, PackedWeight, keep, select, unpack
from detour.ops.op import Need, op
from detour.ops.scaled import FP8_BLOCK, NVFP4_BLOCK, random_fp8

UNPACKED = 1 << 22  # weights that the reference holds expanded at once


def random_scaled(packing: str, rows: int, columns: int, source: torch.Generator) -> PackedWeight:
    """A matrix of sane scale (about 1 / sqrt(columns)), on the source's device."""
    shape = (rows, columns)
    where = {"generator": source, "device": source.device}
    if packing == "NVFP4":
        values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, **where)
        scales = torch.rand(rows, columns // NVFP4_BLOCK, **where) * 0.4 + 0.1
        factors = torch.full((rows,), columns**-0.5, device=source.device)
        return PackedWeight(packing, *shape, (values, scales.to(torch.float8_e4m3fn), factors))
    values = random_fp8(shape, source)
    sharing = {"FP8_TENSOR": rows, "FP8_CHANNEL": 1, "FP8_BLOCK": FP8_BLOCK}[packing]
    wide = -(-columns // FP8_BLOCK) if packing == "FP8_BLOCK" else 1
    of_row = (torch.arange(rows, device=source.device) // sharing).to(torch.int32)
    scales = (torch.rand(int(of_row[-1]) + 1, wide, **where) + 0.5) * 1.5 * columns**-0.5
    return PackedWeight(packing, *shape, (values, scales, of_row))


def scale_bytes(packing: str, rows: int, columns: int) -> int:
    """Of the scales alone, as a matrix that was quantised by itself has them."""
    if packing == "NVFP4":
        return rows * (columns // NVFP4_BLOCK)
    sharing = {"FP8_TENSOR": rows, "FP8_CHANNEL": 1, "FP8_BLOCK": FP8_BLOCK}[packing]
    wide = -(-columns // FP8_BLOCK) if packing == "FP8_BLOCK" else 1
    return 4 * -(-rows // sharing) * wide


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator(device).manual_seed(7)
    shapes = ((1, 96, 64), (7, 136, 160), (65, 200, 256))
    cases = [(packing, *shape) for packing in SCALED for shape in shapes]
    for number, (packing, tokens, rows, columns) in enumerate(cases):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        weight = random_scaled(packing, rows, columns, source)
        x = torch.randn(tokens, columns, generator=source, device=device).to(dtype)
        bias = torch.randn(rows if number % 3 else 0, generator=source, device=device).to(dtype)
        need = {"packing": packing, "dtype": dtype, "rows": rows, "columns": columns}
        yield need, (weight, x, bias)


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    plan=keep,
    planned=1,
)
def gemm_scaled(weight: PackedWeight, x: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias -> [T, rows] of x's dtype; the weight is rounded to x's dtype first.

    plan(weight: PackedWeight) is called once, when the weight is loaded; it may rearrange the
    weight for the backend. Its result is `weight` here.
    x     [T, columns] floating, rows contiguous (stride 1 along columns)
    bias  [rows] of x's dtype, or empty: none

    A need is {"packing", "dtype" (x's), "rows", "columns"}. The reference expands some rows at a
    time, so that what it holds beside the packed weight is bounded.
    """
    out = x.new_empty(x.shape[0], weight.rows)
    step = max(1, UNPACKED // weight.columns)
    for start in range(0, weight.rows, step):
        part = slice(start, min(start + step, weight.rows))
        expanded = unpack(select(weight, part), x.dtype)
        out[:, part] = functional.linear(x, expanded, bias[part] if len(bias) else None)
    return out
