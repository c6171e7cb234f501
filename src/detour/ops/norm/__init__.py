"""rms_norm and add_rms_norm: root-mean-square normalisation (Zhang and Sennrich 2019)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.op import Need, op

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _cases(device: torch.device, inputs: int) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(5)
    shapes = ((1, 576), (33, 64), (5, 3, 128))
    for dtype in (torch.float32, torch.bfloat16):
        for shape in shapes if inputs == 1 else shapes[:2]:
            x = [torch.randn(shape, generator=source).to(device, dtype) for _ in range(inputs)]
            weight = 1 + 0.1 * torch.randn(shape[-1], generator=source)
            yield {"dtype": dtype, "width": shape[-1]}, (*x, weight.to(device, dtype), 1e-5)


def _one(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    return _cases(device, 1)


def _two(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    return _cases(device, 2)


@op(__name__, inputs=_one, tolerance=TOLERANCE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension -> as x, contiguous.

    x       [..., width] floating; its last dimension has stride 1
    weight  [width] of x's dtype

    The mean is taken in float32; the normalised value is rounded to x's dtype before the weight
    multiplies it.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


@op(__name__, inputs=_two, tolerance=TOLERANCE)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to x's dtype first.

    x, residual  [T, width] contiguous, of one floating dtype. A backend may write the sum into
                 `residual` and the norm into `x`, so the caller uses neither afterwards.
    """
    total = x + residual
    return rms_norm.reference.run(total, weight, eps), total
