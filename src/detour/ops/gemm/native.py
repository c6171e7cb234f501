"""gemm of float32 activations on a CPU with AVX2 in C++: weights stay packed, rows do not mix.

Dense bfloat16 weights and GGUF's Q4_0, Q4_1 and Q8_0 are expanded inside the kernel, exactly, so a
step reads as few bytes as the checkpoint has. Each output is one ascending chain of multiply-adds
whatever the number of rows: a request's numbers are the same alone and among others, bit for bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.gemm import GROUP, GROUP_BYTES, PackedWeight, gemm
from detour.ops.huge_pages import settle
from detour.ops.op import Need

PANEL = 16  # outputs that lie together; NR in gemm.cpp
KINDS = {"float32": 0, "bfloat16": 1, "Q8_0": 2, "Q4_1": 3}


@dataclass(frozen=True)
class Panels:
    """A weight as the C++ reads it: panels of 16 outputs, inputs ascending within."""

    kind: int
    rows: int
    columns: int
    data: Tensor  # uint8


def _reasons(device: Device, need: Need) -> list[str]:
    if need["dtype"] is not torch.float32:
        return ["it computes in float32 alone"]
    return native.reasons(device)


def _plan(weight: PackedWeight) -> Panels:
    (stored,) = weight.tensors
    if weight.packing == "dense":
        kind = "bfloat16" if stored.dtype is torch.bfloat16 else "float32"
        rows = by_panel(stored if kind == "bfloat16" else stored.float())
        parts = [rows.transpose(1, 2)]
    else:
        kind = "Q8_0" if weight.packing == "Q8_0" else "Q4_1"
        parts = quantised(weight)
    return panels(kind, weight, parts)


def panels(kind: str, weight: PackedWeight, parts: list[Tensor]) -> Panels:
    """Parts of [panels, ...], or of [panels, groups, ...] where there are several, joined."""
    count = -(-weight.rows // PANEL)
    flat = [part.contiguous().view(torch.uint8).reshape(count, -1) for part in parts]
    if len(parts) > 1:
        groups = weight.columns // GROUP
        flat = [torch.cat([part.view(count, groups, -1) for part in flat], dim=2)]
    return Panels(KINDS[kind], weight.rows, weight.columns, settle(flat[0]))


def by_panel(rows: Tensor) -> Tensor:
    """[rows, ...] to [panels, 16, ...], zeros where the last panel is not full."""
    missing = -len(rows) % PANEL
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return rows.view(-1, PANEL, *rows.shape[1:])


def quantised(weight: PackedWeight) -> list[Tensor]:
    """Scales, minima (not for Q8_0) and quants, each [panels, groups, ...]."""
    groups = weight.columns // GROUP
    (stored,) = weight.tensors
    blocks = by_panel(stored.view(weight.rows, groups, GROUP_BYTES[weight.packing]))
    blocks = blocks.transpose(1, 2)  # [panels, groups, 16, bytes]
    scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(3)
    if weight.packing == "Q8_0":
        quants = blocks[..., 2:].transpose(2, 3)  # [panels, groups, 32, 16]
        return [scale, quants]
    least = -8 * scale  # exact: a power of two, and float16's range ends far above it
    if weight.packing == "Q4_1":
        least = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(3)
    nibbles = blocks[..., GROUP_BYTES[weight.packing] - 16 :]
    quants = torch.cat([nibbles & 15, nibbles >> 4], dim=3)  # [panels, groups, 16, 32]
    pairs = quants[..., 0::2] | quants[..., 1::2] << 4  # two inputs a byte: low nibble first
    # Four bytes, eight inputs, of every output lie together.
    lanes = pairs.view(*pairs.shape[:3], 4, 4).transpose(2, 3)
    return [scale, least, lanes]


@gemm.backend("native", reasons=_reasons, plan=_plan, rank=2)
def gemm_native(weight: Panels, x: Tensor, bias: Tensor) -> Tensor:
    return multiply("detour_gemm", weight, x, bias)


def multiply(kernel: str, weight: Panels, x: Tensor, bias: Tensor) -> Tensor:
    """As the op, by one of the C++ products, which take the same arguments."""
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.rows)
    native.function(kernel, "pnnnipnppni")(
        x.data_ptr(),
        x.shape[0],
        weight.columns,
        x.stride(0),
        weight.kind,
        weight.data.data_ptr(),
        weight.rows,
        bias.data_ptr() if bias.shape[0] else None,
        out.data_ptr(),
        weight.rows,
        native.threads(),
    )
    return out
