"""attention on a CPU with torch alone: gathered keys and values, then torch's flash kernel.

Rows of few tokens (decodes) are computed together, padded to one length; a row of many tokens is
computed alone, in parts that see no more keys than they need. All indices are made once a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from detour.ops.attention import AttentionShape, attention
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.op import Need

FEW = 16  # tokens of a row that is computed together with others
PART = 256  # tokens of a long row that are computed at a time
GATHER_BYTES = 64 << 20  # most that is gathered of the keys, and of the values, for one group


@dataclass(frozen=True)
class Group:
    """B rows of at most C tokens and L cache positions each, padded."""

    tokens: Tensor  # [B * C] int64 into T; a row's last token repeats
    slots: Tensor  # [B * L] int64 cache slots; padding repeats a row's first
    hidden: Tensor  # [B, 1, C * (heads / kv_heads), L] floating: 0 or -inf
    rows: int
    every: bool  # `tokens` are all of the step's, in order


@dataclass(frozen=True)
class LongRow:
    """A row of many tokens: [first, last) of the step, at the end of its `slots`."""

    first: int
    last: int
    slots: Tensor  # [length] int64


@dataclass(frozen=True)
class CpuPlan:
    shape: AttentionShape
    groups: tuple[Group, ...]
    long_rows: tuple[LongRow, ...]


def _plan(batch: Batch, shape: AttentionShape) -> CpuPlan:
    few = np.flatnonzero(batch.counts <= FEW)
    row_starts = batch.row_starts.numpy()
    token_bytes = shape.kv_heads * shape.head_dim * shape.layout.dtype.itemsize
    alike_rows = alike(batch, token_bytes, few)
    groups = tuple(_group(batch, shape, rows, row_starts) for rows in alike_rows)
    long_rows = []
    for row in np.flatnonzero(batch.counts > FEW).tolist():
        slots = slots_of(batch, np.array([row]), int(batch.lengths[row]))
        first = int(row_starts[row])
        long_rows.append(LongRow(first, first + int(batch.counts[row]), slots.view(-1)))
    return CpuPlan(shape, groups, tuple(long_rows))


def alike(batch: Batch, token_bytes: int, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Rows whose padding wastes at most about half, in groups that `GATHER_BYTES` hold.

    token_bytes: gathered for a cached token.
    """
    order = rows[np.lexsort((batch.lengths[rows], batch.counts[rows] > 1))[::-1]]
    lengths, several = batch.lengths[order].tolist(), (batch.counts[order] > 1).tolist()
    begin = 0
    for place in range(1, len(order) + 1):
        longest = lengths[begin]
        ends = (
            place == len(order)
            or several[place] != several[begin]
            or 2 * lengths[place] + 64 < longest
            or (place - begin + 1) * longest * token_bytes > GATHER_BYTES
        )
        if ends:
            yield np.sort(order[begin:place])
            begin = place


def _group(
    batch: Batch,
    shape: AttentionShape,
    rows: NDArray[np.int64],
    row_starts: NDArray[np.int32],
) -> Group:
    counts, lengths = batch.counts[rows], batch.lengths[rows]
    count, length = int(counts.max()), int(lengths.max())
    within = np.minimum(np.arange(count), counts[:, None] - 1)  # [B, C]
    positions = (lengths - counts)[:, None] + within
    sees = np.arange(length) <= positions[:, :, None]  # [B, C, L]
    narrow = shape.layout.dtype.itemsize == 1  # no type to compute in
    hidden = torch.zeros(sees.shape, dtype=torch.float32 if narrow else shape.layout.dtype)
    hidden.masked_fill_(torch.from_numpy(~sees), -torch.inf)
    tokens = (row_starts[rows][:, None] + within).astype(np.int64).ravel()
    return Group(
        tokens=torch.from_numpy(tokens),
        slots=slots_of(batch, rows, length).view(-1),
        hidden=hidden.repeat_interleave(shape.heads // shape.kv_heads, dim=1).unsqueeze(1),
        rows=len(rows),
        every=np.array_equal(tokens, np.arange(len(batch.positions))),
    )


def slots_of(batch: Batch, rows: NDArray[np.int64], length: int) -> Tensor:
    """[len(rows), length] int64: the cache slot of every position, a row's first beyond its end."""
    own = torch.from_numpy(batch.lengths[rows].astype(np.int64))[:, None]
    positions = torch.arange(length).expand(len(rows), length)
    positions = positions.masked_fill(positions >= own, 0)
    table = batch.page_table.index_select(0, torch.from_numpy(rows)).long()
    if batch.page_size == 1:
        return table.gather(1, positions)
    columns = positions.div(batch.page_size, rounding_mode="floor")
    return table.gather(1, columns) * batch.page_size + positions % batch.page_size


def _reasons(device: Device, need: Need) -> list[str]:
    return ["it computes on the CPU"] if device.is_cuda else []


@attention.backend("cpu", reasons=_reasons, plan=_plan, rank=1)
def attention_cpu(plan: CpuPlan, q: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    shape = plan.shape
    flat = (-1, shape.kv_heads, shape.head_dim)
    keys, values = key_cache.view(flat), value_cache.view(flat)
    if len(plan.groups) == 1 and plan.groups[0].every:
        return _together(plan.groups[0], shape, q, keys, values)
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in plan.groups:
        own = _together(group, shape, q.index_select(0, group.tokens), keys, values)
        out.index_copy_(0, group.tokens, own)
    for row in plan.long_rows:
        _alone(row, shape, q, keys, values, out)
    return out


def _together(
    group: Group, shape: AttentionShape, q: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """q: [B * C, heads, head_dim] -> the same. Queries that share a kv head are its query rows."""
    rows, kv_heads = group.rows, shape.kv_heads
    queries = q.reshape(rows, -1, kv_heads, shape.heads // kv_heads, shape.head_dim)
    queries = queries.transpose(1, 2).reshape(rows, kv_heads, -1, shape.head_dim)
    attended = functional.scaled_dot_product_attention(
        queries,
        keys.index_select(0, group.slots).to(q.dtype).unflatten(0, (rows, -1)).transpose(1, 2),
        values.index_select(0, group.slots).to(q.dtype).unflatten(0, (rows, -1)).transpose(1, 2),
        attn_mask=group.hidden.to(q.dtype),
        scale=shape.scale,
    )
    apart = attended.unflatten(2, (-1, shape.heads // kv_heads)).transpose(1, 2)
    return apart.reshape(-1, shape.heads, shape.head_dim)


def _alone(
    row: LongRow, shape: AttentionShape, q: Tensor, keys: Tensor, values: Tensor, out: Tensor
) -> None:
    own_keys = keys.index_select(0, row.slots).to(q.dtype).transpose(0, 1)[None]
    own_values = values.index_select(0, row.slots).to(q.dtype).transpose(0, 1)[None]
    start = len(row.slots) - (row.last - row.first)
    for first in range(row.first, row.last, PART):
        last = min(first + PART, row.last)
        seen = start + last - row.first
        count = last - first
        hidden = torch.full((count, seen), -torch.inf, dtype=q.dtype).triu_(seen - count + 1)
        attended = functional.scaled_dot_product_attention(
            q[first:last].transpose(0, 1)[None],
            own_keys[:, :, :seen],
            own_values[:, :, :seen],
            attn_mask=hidden,
            scale=shape.scale,
            enable_gqa=True,
        )
        out[first:last] = attended[0].transpose(0, 1)
