"""Triton backend of index_scores: key tiles against all heads of a few tokens, relu and sum in
registers.

Keys are the matrix units' M side; for e4m3 keys their scale meets the finished sum (relu and a
positive scale commute).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.attention.triton import TilePlan, Tiles, make_tiles
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.index_scores import index_scores
from detour.ops.kv_layout import KVLayout
from detour.ops.op import Need
from detour.ops.triton_device import FP8, triton_reasons


@triton.jit
def score(
    q, weight, keys, floats, out, tile_first, tile_count, row_of_token, positions, table,
    table_stride, columns,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PAGE_ROW: tl.constexpr,
    BQ: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr, DIRECT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Up to BQ tokens of one row over one split of the row's keys. PAGE_ROW: elements of a page."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if DIRECT:
        first = tile
        count = 1
    else:
        first = tl.load(tile_first + tile)
        count = tl.load(tile_count + tile)
    t = tl.arange(0, BQ)
    token = first + t
    position = tl.load(positions + token, mask=t < count, other=-1).to(tl.int32)
    end = tl.max(position, 0) + 1
    n = tl.arange(0, BQ * HEADS)
    live = n // HEADS < count
    d = tl.arange(0, WIDTH)
    pair = first.to(tl.int64) * HEADS + n
    query = tl.load(q + pair[None, :] * WIDTH + d[:, None], mask=live[None, :], other=0.0)
    gate = tl.load(weight + pair, mask=live, other=0.0)
    places = table + tl.load(row_of_token + first) * table_stride
    span = tl.cdiv(tl.cdiv(end, SPLITS), BS) * BS
    begin = split * span
    target = out + (first.to(tl.int64) + t) * columns
    for start in tl.range(begin, tl.minimum(begin + span, end), BS, num_stages=STAGES):
        at = start + tl.arange(0, BS)
        inside = at < end
        page = tl.load(places + at // PAGE, mask=inside, other=0).to(tl.int64)
        base = page * PAGE_ROW + at % PAGE * WIDTH
        key = tl.load(keys + base[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        products = tl.dot(key, query, input_precision=PRECISION)
        sums = tl.maximum(products, 0.0) * gate[None, :]
        if BQ == 1:
            total = tl.sum(sums, 1)[:, None]
        else:
            total = tl.sum(tl.reshape(sums, (BS, BQ, HEADS)), 2)
        if PACKED:
            scales = page * (PAGE_ROW // 4) + PAGE * WIDTH // 4 + at % PAGE
            total = total * tl.load(floats + scales, mask=inside, other=0.0)[:, None]
        seen = (at[:, None] <= position[None, :]) & (t < count)[None, :]
        tl.store(target[None, :] + at[:, None], total, mask=seen)


@dataclass(frozen=True)
class ScorePlan:
    layout: KVLayout
    tiles: TilePlan


def plan(batch: Batch, layout: KVLayout) -> ScorePlan:
    tiles = make_tiles(batch, 1, 4)
    # Scores of split keys need no joining, so twice the programs cost nothing and load more at once.
    decodes = replace(tiles.decodes, splits=2 * tiles.decodes.splits)
    return ScorePlan(layout, replace(tiles, decodes=decodes))


def reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"].name
    found = triton_reasons(device, FP8 if layout == "index_keys_fp8" else (8, 0))
    if layout not in ("index_keys", "index_keys_fp8"):
        found.append(f"it reads index_keys and index_keys_fp8 rows, not {layout}")
    if need["heads"] not in (16, 32, 64) or need["width"] not in (32, 64, 128):
        found.append(
            f"{need['heads']} heads of {need['width']}: it has 16, 32, 64 heads of 32, 64, 128"
        )
    return found


@dataclass(frozen=True)
class Launch:
    keys: int
    warps: int
    stages: int


def launch(
    how: Launch, tiles: Tiles, batch: Batch, layout: KVLayout, q: Tensor, weight: Tensor,
    cache: Tensor, out: Tensor,
) -> None:  # fmt: skip
    packed = layout.name == "index_keys_fp8"
    heads, width = q.shape[1:]
    score[(tiles.tiles, tiles.splits)](
        q, weight, cache.view(torch.float8_e4m3fn) if packed else cache,
        cache.view(torch.float32) if packed else cache, out, tiles.first, tiles.count,
        batch.row_of_token, batch.positions, batch.page_table, batch.page_table.stride(0),
        out.shape[1],
        HEADS=heads, WIDTH=width, PAGE=batch.page_size, PAGE_ROW=batch.page_size * layout.width,
        BQ=tiles.queries, BS=how.keys, SPLITS=tiles.splits, DIRECT=not len(tiles.first),
        PACKED=packed, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip


@index_scores.backend("triton", reasons=reasons, plan=plan, rank=10)
def run(plan: ScorePlan, q: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
    batch = plan.tiles.batch
    columns = batch.page_table.shape[1] * batch.page_size
    out = torch.empty(len(q), columns, dtype=torch.float32, device=q.device)
    how = Launch(64, 4, 2) if q.dtype == torch.float32 else Launch(128, 4, 3)
    for tiles in (plan.tiles.decodes, plan.tiles.chunks):
        if tiles.tiles:
            launch(how, tiles, batch, plan.layout, q, weight, cache, out)
    return out
