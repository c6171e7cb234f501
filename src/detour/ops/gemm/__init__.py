"""gemm: rows times a weight matrix, whatever form the weight is packed in.

Knows how the packings it names lie in memory; not which file they came from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from detour.ops.op import Need, op
from detour.ops.scaled import unpack_fp8, unpack_nvfp4

GROUP = 32  # columns that share a scale in Q4_0, Q4_1 and Q8_0
GROUP_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
PACKINGS = ("dense", *GROUP_BYTES)
SCALED = ("NVFP4", "FP8_TENSOR", "FP8_CHANNEL", "FP8_BLOCK")  # of the op gemm_scaled


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [rows, columns] = [outputs, inputs].

    packing  dense             (weight,): [rows, columns] of a floating dtype
             Q4_0, Q4_1, Q8_0  (blocks,): [rows, columns / 32 * group bytes] uint8, as GGUF lays
                               them (ggml-common.h: float16 scale, for Q4_1 float16 minimum, then
                               the quants; low nibbles are columns 0..15 of a group)
             NVFP4             (values, scales, factors): [rows, columns / 2] uint8, two e2m1 a
                               byte, the even column low; [rows, columns / 16] e4m3; [rows] float32
             FP8_*             (values, scales, of_row): [rows, columns] e4m3; [s, 1] float32, of
                               FP8_BLOCK [s, columns / 128] (rounded up); [rows] int32: which of
                               the s is a row's, so that parts with other scales can be joined

    Rows can be cut and joined without unpacking: `select` cuts.
    """

    packing: str
    rows: int
    columns: int
    tensors: tuple[Tensor, ...]


def dense(weight: Tensor) -> PackedWeight:
    return PackedWeight("dense", weight.shape[0], weight.shape[1], (weight,))


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[rows, columns] of `dtype`: expanded in float32 (q * scale + minimum), then cast."""
    if weight.packing == "NVFP4":
        values, scales, factors = weight.tensors
        return unpack_nvfp4(values, scales, factors[:, None]).to(dtype)
    if weight.packing in SCALED:
        return unpack_fp8(*weight.tensors).to(dtype)
    (stored,) = weight.tensors
    if weight.packing == "dense":
        return stored.to(dtype)
    blocks = stored.view(weight.rows, -1, GROUP_BYTES[weight.packing])
    scale = blocks[:, :, :2].contiguous().view(torch.float16).float()
    if weight.packing == "Q8_0":
        quants = blocks[:, :, 2:].contiguous().view(torch.int8).float()
        return (quants * scale).view(weight.rows, weight.columns).to(dtype)
    start = 4 if weight.packing == "Q4_1" else 2
    nibbles = blocks[:, :, start:]
    quants = torch.cat([nibbles & 15, nibbles >> 4], dim=2).float()
    if weight.packing == "Q4_1":
        values = quants * scale + blocks[:, :, 2:4].contiguous().view(torch.float16).float()
    else:
        values = (quants - 8) * scale
    return values.view(weight.rows, weight.columns).to(dtype)


def select(weight: PackedWeight, rows: Tensor | slice) -> PackedWeight:
    """Some rows: a slice, or numbers [n] int64."""
    first, *rest = weight.tensors
    if weight.packing in SCALED and weight.packing != "NVFP4":
        scales, of_row = rest
        tensors = (first[rows], scales, of_row[rows])
    else:
        tensors = tuple(tensor[rows] for tensor in weight.tensors)
    return PackedWeight(weight.packing, len(tensors[0]), weight.columns, tensors)


def random_weight(packing: str, rows: int, columns: int, source: torch.Generator) -> PackedWeight:
    """A float32 or quantised matrix of sane scale (about 1 / sqrt(columns)), on the CPU."""
    if packing == "dense":
        return dense(torch.randn(rows, columns, generator=source) * columns**-0.5)
    shape = (rows, columns // GROUP, GROUP_BYTES[packing])
    blocks = torch.randint(0, 256, shape, generator=source, dtype=torch.uint8)
    spread = 128 if packing == "Q8_0" else 8
    scale = (torch.rand(rows, columns // GROUP, 1, generator=source) + 0.5) * columns**-0.5 / spread
    blocks[:, :, :2] = scale.half().view(torch.uint8)
    if packing == "Q4_1":
        blocks[:, :, 2:4] = (-7.5 * scale).half().view(torch.uint8)
    return PackedWeight(packing, rows, columns, (blocks.view(rows, -1),))


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(3)
    cases = [
        (packing, torch.float32, tokens, rows, columns)
        for packing in PACKINGS
        for tokens, rows, columns in ((1, 96, 64), (7, 40, 128), (65, 200, 96))
    ]
    cases += [
        (packing, torch.bfloat16, tokens, rows, columns)
        for packing in PACKINGS
        for tokens, rows, columns in ((1, 96, 64), (7, 40, 128), (33, 96, 288), (205, 200, 96))
    ]
    cases += [("bfloat16", torch.float32, tokens, 96, 64) for tokens in (1, 33)]
    for number, (stored, dtype, tokens, rows, columns) in enumerate(cases):
        packing = "dense" if stored == "bfloat16" else stored
        kept = {"dense": dtype, "bfloat16": torch.bfloat16}.get(stored, torch.uint8)
        weight = random_weight(packing, rows, columns, source)
        cast = tuple(tensor.to(device, kept) for tensor in weight.tensors)
        bias = torch.randn(rows if number % 2 else 0, generator=source)
        x = torch.randn(tokens, columns, generator=source)
        need = {"packing": packing, "dtype": dtype, "stored": kept}
        need |= {"rows": rows, "columns": columns}
        yield (
            need,
            (
                PackedWeight(packing, rows, columns, cast),
                x.to(device, dtype),
                bias.to(device, dtype),
            ),
        )


def keep(weight: PackedWeight) -> PackedWeight:
    """The plan of backends that compute on a weight as it is."""
    return weight


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    plan=keep,
    planned=1,
)
def gemm(weight: PackedWeight, x: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias -> [T, rows] of x's dtype.

    plan(weight: PackedWeight) is called once, when the weight is loaded; it may rearrange the
    weight for the backend. Its result is `weight` here.
    x     [T, columns] floating, rows contiguous (stride 1 along columns)
    bias  [rows] of x's dtype, or empty: none

    A need is {"packing", "dtype" (x's), "stored" (a dense weight's dtype, else uint8), "rows",
    "columns"}. A dense weight may be bfloat16 where x is float32: it is widened, exactly.
    """
    return functional.linear(x, unpack(weight, x.dtype), bias if len(bias) else None)
