"""rope: rotary position embedding (Su et al. 2021), half-split pairs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.op import Need, op


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(9)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, heads, width, rotated in ((1, 12, 64, 64), (37, 4, 128, 128), (9, 3, 32, 16)):
            # A slice of a wider tensor, as the fused projection gives it.
            x = torch.randn(tokens, heads + 2, width, generator=source)[:, :heads]
            angles = torch.rand(tokens, rotated // 2, generator=source) * 6.28
            need = {"dtype": dtype, "head_dim": width, "rotated": rotated}
            yield (
                need,
                (x.to(device, dtype), angles.cos().to(device), angles.sin().to(device)),
            )


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3},
)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of every token -> x's shape and dtype.

    x         [T, heads, head_dim] floating; heads and head_dim contiguous, tokens may be strided
    cos, sin  [T, rotated / 2] float32, rotated <= head_dim

    Dimension i < rotated / 2 pairs with i + rotated / 2; dimensions from `rotated` on pass through.
    Computed in float32. A backend may rotate in place and return x: the caller uses x no more.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)
