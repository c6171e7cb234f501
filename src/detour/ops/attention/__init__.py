"""attention: causal grouped-query attention over paged keys and values.

One contract for decodes, chunks, whole prompts and cached prefixes: a row's tokens attend to
everything of their sequence up to themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detour.ops.batch import Batch
from detour.ops.kv_layout import KVLayout, grouped_query
from detour.ops.op import Need, op, takes


@dataclass(frozen=True)
class AttentionShape:
    """What a plan may want to know of the layers it will serve. `scale` multiplies q @ k."""

    heads: int  # query heads; head h reads kv head h // (heads / kv_heads)
    kv_heads: int
    head_dim: int
    scale: float
    layout: KVLayout


def make_batch(
    rows: list[tuple[int, int]], page_size: int, device: torch.device, source: torch.Generator
) -> Batch:
    """A batch of rows (start, count) whose pages are scattered, for tests and benchmarks."""
    starts = np.array([start for start, _ in rows], np.int32)
    counts = np.array([count for _, count in rows], np.int32)
    lengths = starts + counts
    needed = -(-lengths // page_size)
    pages = 1 + torch.randperm(int(needed.sum()), generator=source)
    table = torch.zeros(len(rows), int(needed.max()), dtype=torch.int64)
    row_of_token = torch.arange(len(rows)).repeat_interleave(torch.from_numpy(counts))
    row_starts = torch.from_numpy(np.concatenate([[0], counts.cumsum()])).int()
    for row, part in enumerate(pages.split(needed.tolist())):
        table[row, : len(part)] = part
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    write_slots = table[row_of_token, positions // page_size] * page_size + positions % page_size
    return Batch(
        tokens=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=positions.to(device),
        write_slots=write_slots.to(device),
        row_of_token=row_of_token.to(device),
        row_starts=row_starts.to(device),
        kv_lengths=torch.from_numpy(lengths).to(device),
        page_table=table.int().to(device),
        logits_at=(row_starts[1:] - 1).long().to(device),
        page_size=page_size,
        counts=counts,
        lengths=lengths,
    )


def _written(batch: Batch, pages: int) -> Tensor:
    """[pages, page_size] bool: places that some sequence has reached."""
    written = torch.zeros(pages, batch.page_size, dtype=torch.bool, device=batch.positions.device)
    for row, length in enumerate(batch.lengths.tolist()):
        place = torch.arange(length, device=written.device)
        pages_there = batch.page_table[row].long()[place // batch.page_size]
        written[pages_there, place % batch.page_size] = True
    return written


MIXES = (
    [(0, 1)],
    [(37, 1), (0, 5), (130, 1), (16, 17), (3, 2), (63, 1), (64, 1)],
    [(0, 70), (200, 40)],
    [(0, 5), (90, 2), (7, 16)],
    [(number * 7 % 90, 1) for number in range(33)],
)


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(21)
    for dtype, stored, head_dim, heads, kv_heads in (
        (torch.float32, torch.float32, 64, 9, 3),
        (torch.float32, torch.float32, 128, 4, 4),
        (torch.bfloat16, torch.bfloat16, 64, 8, 1),
        (torch.float32, torch.float32, 8, 4, 2),
        (torch.float32, torch.bfloat16, 64, 4, 2),
        (torch.float32, torch.float8_e4m3fn, 64, 4, 2),
    ):
        layout = grouped_query(stored, kv_heads, head_dim)
        shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, layout)
        for rows in MIXES:
            for page_size in (1, 16):
                batch = make_batch(rows, page_size, device, source)
                pages = int(batch.page_table.max()) + 1
                caches = torch.randn(2, pages, page_size, kv_heads, head_dim, generator=source).to(
                    device, dtype
                )
                caches = torch.where(_written(batch, pages)[..., None, None], caches, torch.nan)
                caches = caches.to(stored)
                tokens = len(batch.positions)
                # Heads of a fused projection: the token stride is larger than what is read.
                q = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=source)
                need = {
                    "dtype": dtype,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "head_dim": head_dim,
                    "layout": layout,
                }
                yield need, (batch, shape, q.to(device, dtype)[:, :heads], caches[0], caches[1])


@dataclass(frozen=True)
class RowsPlan:
    """The reference's plan: the cache slots of every row, in order."""

    shape: AttentionShape
    bounds: tuple[tuple[int, int], ...]  # tokens [first, last) of each row
    slots: tuple[Tensor, ...]  # [length] int64 of each row


def plan_rows(batch: Batch, shape: AttentionShape) -> RowsPlan:
    ends = batch.counts.cumsum().tolist()
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    slots = []
    for row, length in enumerate(batch.lengths.tolist()):
        place = torch.arange(length, device=batch.page_table.device)
        pages = batch.page_table[row].long()[place // batch.page_size]
        slots.append(pages * batch.page_size + place % batch.page_size)
    return RowsPlan(shape, bounds, tuple(slots))


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    plan=plan_rows,
    planned=2,
    replays=False,
    reasons=takes("grouped_query"),
)
def attention(plan: Any, q: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """Attention of every token over its own sequence -> [T, heads, head_dim] of q's dtype.

    plan(batch: Batch, shape: AttentionShape) is called once a step, after nothing but staging; its
    result, a type of the backend's own, serves all layers of that shape.
    q                       [T, heads, head_dim] floating, rotated; tokens may be strided
    key_cache, value_cache  [pages, page_size, kv_heads, head_dim] contiguous, layout grouped_query;
                            this step's keys and values are already written

    Token t of row r sees cache positions [0, positions[t]] of the sequence. Cache positions beyond
    a row's length hold anything, NaN included, and must not be able to reach the result.
    Softmax in float32. A need is {"dtype", "heads", "kv_heads", "head_dim", "layout"}.
    """
    shape = plan.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for (first, last), slots in zip(plan.bounds, plan.slots, strict=True):
        keys = key_cache.view(-1, shape.kv_heads, shape.head_dim)[slots].float()
        values = value_cache.view(-1, shape.kv_heads, shape.head_dim)[slots].float()
        grouped = q[first:last].float().unflatten(1, (shape.kv_heads, -1))
        scores = torch.einsum("tkgd,skd->kgts", grouped, keys) * shape.scale
        count, length = last - first, len(slots)
        position = torch.arange(length - count, length, device=q.device)
        later = torch.arange(length, device=q.device) > position[:, None]
        weights = scores.masked_fill_(later, -torch.inf).softmax(dim=-1)
        out[first:last] = torch.einsum("kgts,skd->tkgd", weights, values).flatten(1, 2).to(q.dtype)
    return out
