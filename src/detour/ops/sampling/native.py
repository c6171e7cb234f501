"""Sampling on a CPU in C++: one pass a row, logarithms only for tokens that could win."""

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.sampling import draw, greedy


def _reasons(device: Device, need: Need) -> list[str]:
    return native.reasons(device)


@greedy.backend("native", reasons=_reasons, rank=2)
def greedy_native(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    finite = torch.empty(rows, dtype=torch.bool)
    native.function("detour_greedy", "pnnppi")(
        logits.data_ptr(),
        rows,
        vocab,
        tokens.data_ptr(),
        finite.data_ptr(),
        native.threads(),
    )
    return tokens, finite


@draw.backend("native", reasons=_reasons, rank=2)
def draw_native(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
) -> Tensor:
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    scratch = torch.empty_like(logits)
    native.function("detour_draw", "pnnppppppppi")(
        logits.data_ptr(),
        rows,
        vocab,
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        scratch.data_ptr(),
        tokens.data_ptr(),
        native.threads(),
    )
    return tokens
