"""gemm_scaled on a CPU: some rows of the weight are expanded at a time, and multiplied in C++.

A row's result is the same bits in any batch, since that product's is (ops/gemm/native.py).
"""

import torch
from torch import Tensor

from detour.ops.device import Device
from detour.ops.gemm import PackedWeight, gemm, keep, select, unpack
from detour.ops.gemm.native import KINDS, PANEL, Panels, by_panel, gemm_native
from detour.ops.gemm.native_bf16 import gemm_native_bf16
from detour.ops.gemm_scaled import gemm_scaled
from detour.ops.op import Need

EXPANDED = 1 << 18  # weights that are expanded at once: they stay in cache
PRODUCTS = {
    torch.float32: ("native", gemm_native),
    torch.bfloat16: ("native_bf16", gemm_native_bf16),
}


def _reasons(device: Device, need: Need) -> list[str]:
    if need["dtype"] not in PRODUCTS:
        return [f"it computes in float32 and bfloat16, not {need['dtype']}"]
    plain = {**need, "packing": "dense", "stored": need["dtype"]}
    return gemm.discover()[PRODUCTS[need["dtype"]][0]].reasons(device, plain)


def _panels(rows: Tensor) -> Panels:
    """Expanded rows as the product reads them; of bfloat16, pairs of inputs lie together."""
    count, columns = rows.shape
    if rows.dtype is torch.float32:
        laid, kind = by_panel(rows).transpose(1, 2), "float32"
    else:
        laid, kind = by_panel(rows).unflatten(2, (-1, 2)).transpose(1, 2), "bfloat16"
    return Panels(KINDS[kind], count, columns, laid.contiguous().view(torch.uint8).view(-1))


@gemm_scaled.backend("native", reasons=_reasons, plan=keep, rank=2)
def run(weight: PackedWeight, x: Tensor, bias: Tensor) -> Tensor:
    product = PRODUCTS[x.dtype][1]
    out = x.new_empty(x.shape[0], weight.rows)
    step = max(1, EXPANDED // weight.columns // PANEL) * PANEL
    for start in range(0, weight.rows, step):
        part = slice(start, min(start + step, weight.rows))
        rows = unpack(select(weight, part), x.dtype)
        out[:, part] = product(_panels(rows), x, bias[part] if len(bias) else bias)
    return out
