"""Attention whose keys were split among programs: how many splits, and joining their parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SPLITS = 32


def choose_splits(programs: int, multiprocessors: int, longest: int) -> int:
    """Splits of the keys so that `programs` programs fill the device about twice, a power of two.

    `longest` is the most keys a program may see: below 128 keys a split is not worth its part.
    Depends on nothing that changes while a captured graph is replayed.
    """
    splits = 1
    while (
        splits < MOST_SPLITS
        and programs * splits * 2 <= 2 * multiprocessors + multiprocessors // 8
        and splits * 256 <= longest
    ):
        splits *= 2
    return splits


@triton.jit
def join_parts(
    parts, sums, out, rows, splits, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """out[row] = sum_s 2 ** (sums[s, row] - total) * parts[s, row]; sums are base-2 log-sum-exps."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    lse = tl.load(sums + split * rows + row, mask=split < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - top)
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    at = tl.arange(0, BLOCK)
    live = (split < splits)[:, None] & (at < WIDTH)[None, :] & (weight > 0)[:, None]
    offset = (split.to(tl.int64)[:, None] * rows + row) * WIDTH + at[None, :]
    part = tl.load(parts + offset, mask=live, other=0.0)
    joined = tl.sum(part * weight[:, None], 0)
    tl.store(out + row * WIDTH + at, joined.to(out.dtype.element_ty), mask=at < WIDTH)


def join(parts: Tensor, sums: Tensor, out: Tensor) -> None:
    """parts [S, rows, width] float32, each normalised; sums [S, rows]; out [rows, width]."""
    splits, rows, width = parts.shape
    if rows:
        join_parts[(rows,)](
            parts, sums, out, rows, splits, WIDTH=width, BLOCK=triton.next_power_of_2(width),
            SPLITS=triton.next_power_of_2(splits), num_warps=4 if width >= 256 else 1,
        )  # fmt: skip


def empty_parts(splits: int, rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the parts of `rows` (token, head) pairs; two empty tensors where nothing is split."""
    if splits == 1:
        rows = 0
    parts = torch.empty(splits, rows, width, dtype=torch.float32, device=device)
    return parts, torch.empty(splits, rows, dtype=torch.float32, device=device)
