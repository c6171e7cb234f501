"""gemm of bfloat16 activations on a CPU with AVX512_BF16 in C++: as native.py's, two inputs a product.

Plain weights lie in panels of 16 outputs and pairs of inputs; packed ones as native.py lays them,
expanded inside the kernel and rounded to bfloat16. A row's result does not depend on the batch.
"""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.gemm import PackedWeight, gemm
from detour.ops.gemm.native import Panels, by_panel, multiply, panels, quantised
from detour.ops.op import Need


def _reasons(device: Device, need: Need) -> list[str]:
    if need["dtype"] is not torch.bfloat16:
        return ["it computes in bfloat16 alone"]
    if "amx" in device.instructions:
        return ["the processor has AMX, whose products torch's own kernels use"]
    if not {"avx512", "avx512_bf16"} <= device.instructions:
        return ["the processor has no AVX512_BF16"]
    if need["packing"] == "dense" and need["columns"] % 2:
        return [f"it takes inputs in pairs, and there are {need['columns']}"]
    return native.reasons(device)


def _plan(weight: PackedWeight) -> Panels:
    if weight.packing != "dense":
        kind = "Q8_0" if weight.packing == "Q8_0" else "Q4_1"
        return panels(kind, weight, quantised(weight))
    (stored,) = weight.tensors
    rows = by_panel(stored.to(torch.bfloat16))  # [panels, 16, columns]
    pairs = rows.unflatten(2, (-1, 2)).transpose(1, 2)  # [panels, columns / 2, 16, 2]
    return panels("bfloat16", weight, [pairs])


@gemm.backend("native_bf16", reasons=_reasons, plan=_plan, rank=2)
def gemm_native_bf16(weight: Panels, x: Tensor, bias: Tensor) -> Tensor:
    return multiply("detour_gemm_bf16", weight, x, bias)
