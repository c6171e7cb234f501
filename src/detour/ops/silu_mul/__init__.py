"""silu_mul: the gate of a SwiGLU block (Shazeer 2020)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from detour.ops.op import Need, op


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(15)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, width in ((1, 1536), (33, 96)):
            x = torch.randn(tokens, 2 * width, generator=source)
            yield {"dtype": dtype, "width": width}, (x.to(device, dtype),)


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
)
def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :width]) * x[:, width:] -> [T, width] of x's dtype, contiguous.

    x  [T, 2 * width] floating, contiguous: gate, then up
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
