"""dense_mla on a CPU with torch alone: decodes together, a row of many tokens in parts.

Sparse attention needs no file of its own there: its reference is made of large products already.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from detour.ops.attention.cpu import LongRow, alike, slots_of
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.mla import LatentShape, attend, dense_mla, unpack_latent
from detour.ops.op import Need

PART = 64  # tokens of a long row that are computed at a time


@dataclass(frozen=True)
class Together:
    """Rows of one token, padded to the longest."""

    tokens: Tensor  # [B] int64 into T
    slots: Tensor  # [B, L] int64; padding repeats a row's first
    beyond: Tensor  # [B, L] bool: padding


@dataclass(frozen=True)
class CpuPlan:
    shape: LatentShape
    groups: tuple[Together, ...]
    long_rows: tuple[LongRow, ...]


def _plan(batch: Batch, shape: LatentShape) -> CpuPlan:
    first = np.concatenate([[0], batch.counts.cumsum()]).astype(np.int64)
    long_rows = []
    for row in np.flatnonzero(batch.counts > 1).tolist():
        slots = slots_of(batch, np.array([row]), int(batch.lengths[row]))
        long_rows.append(LongRow(int(first[row]), int(first[row + 1]), slots.view(-1)))
    groups = _groups(batch, 4 * (shape.rank + shape.rope), first)
    return CpuPlan(shape, tuple(groups), tuple(long_rows))


def _groups(batch: Batch, token_bytes: int, first: np.ndarray) -> Iterator[Together]:
    for rows in alike(batch, token_bytes, np.flatnonzero(batch.counts == 1)):
        lengths = torch.from_numpy(batch.lengths[rows].astype(np.int64))
        longest = int(batch.lengths[rows].max())
        beyond = torch.arange(longest) >= lengths[:, None]
        yield Together(torch.from_numpy(first[rows]), slots_of(batch, rows, longest), beyond)


def _reasons(device: Device, need: Need) -> list[str]:
    return ["it computes on the CPU"] if device.is_cuda else []


@dense_mla.backend("cpu", reasons=_reasons, plan=_plan, rank=1)
def dense_mla_cpu(plan: CpuPlan, q: Tensor, cache: Tensor) -> Tensor:
    shape = plan.shape
    rows = cache.view(-1, cache.shape[-1])
    out = torch.empty(*q.shape[:2], shape.rank, dtype=q.dtype)
    for group in plan.groups:
        keys = unpack_latent(rows[group.slots], shape)
        out[group.tokens] = attend(q[group.tokens], keys, group.beyond, shape)
    for row in plan.long_rows:
        keys = unpack_latent(rows[row.slots], shape)
        start = len(row.slots) - (row.last - row.first)
        for first in range(row.first, row.last, PART):
            last = min(first + PART, row.last)
            out[first:last] = _part(q[first:last], keys[: start + last - row.first], shape)
    return out


def _part(q: Tensor, keys: Tensor, shape: LatentShape) -> Tensor:
    """The last len(q) tokens of a sequence over all its keys [L, rank + rope]."""
    scores = (q.float().flatten(0, 1) @ keys.T).mul_(shape.scale).view(*q.shape[:2], -1)
    count, length = len(q), len(keys)
    later = torch.ones(count, length, dtype=torch.bool).triu_(length - count + 1)
    weights = scores.masked_fill_(later[:, None], -torch.inf).softmax(dim=-1)
    return (weights.flatten(0, 1) @ keys[:, : shape.rank]).view(*q.shape[:2], -1).to(q.dtype)
