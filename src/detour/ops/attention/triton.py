"""Triton backend of attention: tiles of queries against pages of keys.

Decodes (rows of one token) get a program per kv head and split of the keys; longer rows get tiles
of queries. A tile's M side is (token, query head of one kv head), so that keys are read once for a
group. A batch of decodes alone is planned without host data: its plan can be captured in a graph.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.attention import AttentionShape, attention
from detour.ops.batch import Batch
from detour.ops.device import Device, probe
from detour.ops.op import Need
from detour.ops.split_keys import choose_splits, empty_parts, join
from detour.ops.triton_device import FP8, triton_reasons


@triton.jit
def attend(
    q, keys, values, out, parts, sums, tile_first, tile_count, row_of_token, positions, table,
    q_stride, table_stride, pairs, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of up to BQ tokens of a row, one kv head, one split of the keys."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if DIRECT:
        first = tile
        count = 1
    else:
        first = tl.load(tile_first + tile)
        count = tl.load(tile_count + tile)
    row = tl.load(row_of_token + first)
    m = tl.arange(0, BQ * GROUP_P)
    token = first + m // GROUP_P
    head = kv_head * GROUP + m % GROUP_P
    live = (m // GROUP_P < count) & (m % GROUP_P < GROUP)
    position = tl.load(positions + token, mask=live, other=-1).to(tl.int32)
    end = tl.max(position, 0) + 1
    span = tl.cdiv(tl.cdiv(end, SPLITS), BS) * BS
    begin = split * span
    stop = tl.minimum(begin + span, end)
    d = tl.arange(0, WIDTH_P)
    wide = d < WIDTH
    source = q + token.to(tl.int64)[:, None] * q_stride + head[:, None] * WIDTH + d[None, :]
    query = tl.load(source, mask=live[:, None] & wide[None, :], other=0.0)
    top = tl.full((BQ * GROUP_P,), float("-inf"), tl.float32)
    total = tl.zeros((BQ * GROUP_P,), tl.float32)
    acc = tl.zeros((BQ * GROUP_P, WIDTH_P), tl.float32)
    for start in range(begin, stop, BS):
        at = start + tl.arange(0, BS)
        inside = at < stop
        page = tl.load(table + row * table_stride + at // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + at % PAGE
        offset = (slot * KV_HEADS + kv_head)[:, None] * WIDTH + d[None, :]
        mask = inside[:, None] & wide[None, :]
        key = tl.load(keys + offset, mask=mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(
            (at[None, :] <= position[:, None]) & inside[None, :], scores, float("-inf")
        )
        higher = tl.maximum(top, tl.max(scores, 1))
        calm = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - calm[:, None])
        fade = tl.exp2(top - calm)
        total = total * fade + tl.sum(weight, 1)
        value = tl.load(values + offset, mask=mask, other=0.0).to(query.dtype)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(query.dtype), value, acc, input_precision=PRECISION)
        top = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    pair = token.to(tl.int64) * HEADS + head
    mask = live[:, None] & wide[None, :]
    if SPLITS == 1:
        tl.store(out + pair[:, None] * WIDTH + d[None, :], acc.to(out.dtype.element_ty), mask=mask)
    else:
        pair = pair + split.to(tl.int64) * pairs
        tl.store(parts + pair[:, None] * WIDTH + d[None, :], acc, mask=mask)
        tl.store(sums + pair, top + tl.log2(total), mask=live)


@dataclass(frozen=True)
class Tiles:
    """Tokens [first, first + count) for every tile; both empty where tile t is token t."""

    first: Tensor  # [tiles] int32
    count: Tensor  # [tiles] int32
    tiles: int
    queries: int  # tokens a tile may hold
    splits: int


@dataclass(frozen=True)
class TilePlan:
    batch: Batch
    decodes: Tiles
    chunks: Tiles


@dataclass(frozen=True)
class AttentionPlan:
    shape: AttentionShape
    tiles: TilePlan


def _cut(batch: Batch, rows: np.ndarray, queries: int, splits: int) -> Tiles:
    starts = np.concatenate([[0], batch.counts.cumsum()]).astype(np.int32)
    counts = batch.counts[rows]
    pieces = -(-counts // queries)
    index = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
    first = np.repeat(starts[rows], pieces) + index * queries
    count = np.minimum(np.repeat(counts, pieces) - index * queries, queries)
    both = torch.from_numpy(np.stack([first, count]).astype(np.int32)).to(batch.positions.device)
    return Tiles(both[0], both[1], len(first), queries, splits)


def make_tiles(batch: Batch, programs: int, queries: int) -> TilePlan:
    """Tiles of the batch's rows: single tokens with split keys, longer rows cut by `queries`.

    `programs` is how many programs share a tile (kv heads). Reads the host's counts; copies to
    the device only where rows are mixed, so that a batch of decodes can be captured in a graph.
    """
    device = batch.positions.device
    longest = batch.page_table.shape[1] * batch.page_size
    processors = probe(str(device)).multiprocessors
    empty = torch.empty(0, dtype=torch.int32, device=device)
    single = batch.counts == 1
    number = int(single.sum())
    splits = choose_splits(max(number, 1) * programs, processors, longest)
    if number == batch.rows:
        decodes = Tiles(empty, empty, number, 1, splits)
        return TilePlan(batch, decodes, Tiles(empty, empty, 0, 1, 1))
    decodes = _cut(batch, np.flatnonzero(single), 1, splits)
    return TilePlan(batch, decodes, _cut(batch, np.flatnonzero(~single), queries, 1))


def plan(batch: Batch, shape: AttentionShape) -> AttentionPlan:
    group = triton.next_power_of_2(shape.heads // shape.kv_heads)
    return AttentionPlan(shape, make_tiles(batch, shape.kv_heads, max(1, 64 // group)))


def reasons(device: Device, need: Need) -> list[str]:
    narrow = need["layout"].dtype == torch.float8_e4m3fn
    found = triton_reasons(device, FP8 if narrow else (8, 0))
    group = need["heads"] // need["kv_heads"]
    if need["layout"].name != "grouped_query":
        found.append(f"it reads grouped_query rows, not {need['layout'].name}")
    if need["head_dim"] > 256 or group > 64:
        found.append(
            f"head size {need['head_dim']} with {group} heads a group is more than a tile holds"
        )
    return found


@attention.backend("triton", reasons=reasons, plan=plan, rank=10)
def run(plan: AttentionPlan, q: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    shape, batch = plan.shape, plan.tiles.batch
    group = shape.heads // shape.kv_heads
    padded = triton.next_power_of_2(group)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    exact = q.dtype == torch.float32
    for tiles in (plan.tiles.decodes, plan.tiles.chunks):
        if not tiles.tiles:
            continue
        pairs = q.shape[0] * shape.heads
        parts, sums = empty_parts(tiles.splits, pairs, shape.head_dim, q.device)
        if tiles.splits > 1 and len(tiles.first):
            sums.fill_(-torch.inf)  # tokens of other tiles are joined too; they are written after
        queries = max(tiles.queries, 16 // padded)  # the matrix units take no fewer than 16 rows
        attend[(tiles.tiles, shape.kv_heads, tiles.splits)](
            q, key_cache, value_cache, out, parts, sums, tiles.first, tiles.count,
            batch.row_of_token, batch.positions, batch.page_table, q.stride(0),
            batch.page_table.stride(0), pairs, shape.scale * 1.4426950408889634,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, GROUP=group, GROUP_P=padded,
            WIDTH=shape.head_dim, WIDTH_P=max(16, triton.next_power_of_2(shape.head_dim)), BQ=queries,
            BS=32 if exact else 64, PAGE=batch.page_size, SPLITS=tiles.splits,
            DIRECT=not len(tiles.first), PRECISION="ieee" if exact else "tf32",
            num_warps=4, num_stages=2 if exact or shape.head_dim > 128 else 3,
        )  # fmt: skip
        if tiles.splits > 1:
            join(parts, sums, out.view(pairs, shape.head_dim))
    return out
