"""Triton backends of sparse_mla and dense_mla: one kernel, keys split among programs."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from torch import Tensor

from detour.ops.attention.triton import TilePlan, Tiles, make_tiles
from detour.ops.batch import Batch
from detour.ops.device import Device, probe
from detour.ops.kv_layout import LATENT_BLOCK, latent
from detour.ops.mla import LatentShape, dense_mla, kernels, sparse_mla
from detour.ops.op import Need
from detour.ops.split_keys import choose_splits, empty_parts, join
from detour.ops.triton_device import FP8, triton_reasons

LAYOUTS = ("latent", "latent_fp8_packed")


def reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"].name
    found = triton_reasons(device, FP8 if layout == "latent_fp8_packed" else (8, 0))
    if layout not in LAYOUTS:
        found.append(f"it reads {' and '.join(LAYOUTS)} rows, not {layout}")
    elif layout == "latent_fp8_packed" and need["dtype"] == torch.float32:
        found.append("it reads packed rows as float16, which float32 queries would feel")
    elif layout == "latent" and need["layout"].dtype != need["dtype"]:
        found.append(f"the cache is {need['layout'].dtype}, the queries are {need['dtype']}")
    rank, rope = need["rank"], need["rope"]
    ranks = (16, 32, 64, 128, 256, 512)
    if rank not in ranks or rope not in ranks[:4]:
        found.append(f"latent rank {rank} with {rope} rope numbers: it has {ranks} with up to 128")
    return found


@dataclass(frozen=True)
class Launch:
    """How a launch is cut: keys a tile, warps, pipeline stages."""

    keys: int
    warps: int
    stages: int


def choose_launch(columns: int, packed: bool, dtype: torch.dtype) -> Launch:
    """For `columns` (token, head) pairs a tile; measured in bench/kernels.py."""
    if dtype == torch.float32:
        return Launch(32, 4, 1)
    if columns >= 64:
        return Launch(64, 8, 2)
    return Launch(64, 4, 2)


def launch(
    how: Launch, shape: LatentShape, q: Tensor, cache: Tensor, out: Tensor, tiles: Tiles,
    places: tuple[Tensor, ...], slots: Tensor, counts: Tensor, page_size: int,
) -> None:  # fmt: skip
    """`places` = row_of_token, positions, page_table; empty for sparse, as slots are for dense."""
    heads, rank = shape.heads, shape.rank
    pairs = q.shape[0] * heads
    packed = shape.layout.name == "latent_fp8_packed"
    heads_p = max(8, triton.next_power_of_2(heads))
    parts, sums = empty_parts(tiles.splits, pairs, rank, q.device)
    if tiles.splits > 1 and len(tiles.first):
        sums.fill_(-torch.inf)
    exact = q.dtype == torch.float32 or not q.is_cuda  # the interpreter's bfloat16 products err
    kernels.mla[(tiles.tiles, tiles.splits)](
        q, cache, cache.view(torch.float32) if packed else cache,
        cache.view(torch.bfloat16) if packed else cache, out, parts, sums, slots, counts,
        tiles.first, tiles.count, *places, slots.stride(0), places[2].stride(0), pairs,
        shape.scale * 1.4426950408889634,
        HEADS=heads, HEADS_P=heads_p, RANK=rank, BLOCK=min(rank, LATENT_BLOCK), ROPE=shape.rope,
        ROW=cache.shape[-1], PAGE=page_size, BQ=tiles.queries, BS=how.keys, SPLITS=tiles.splits,
        SPARSE=slots.shape[0] > 0, DIRECT=not len(tiles.first), PACKED=packed,
        PRECISION="ieee" if exact else "tf32", STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip
    if tiles.splits > 1:
        join(parts, sums, out.view(pairs, rank))


def new_output(q: Tensor, shape: LatentShape) -> Tensor:
    return torch.empty(*q.shape[:2], shape.rank, dtype=q.dtype, device=q.device)


@sparse_mla.backend("triton", reasons=reasons, rank=10)
def run_sparse(
    q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, shape: LatentShape
) -> Tensor:
    out = new_output(q, shape)
    tokens = q.shape[0]
    if tokens:
        empty = torch.empty(0, dtype=torch.int32, device=q.device)
        table = torch.empty(0, 1, dtype=torch.int32, device=q.device)
        splits = choose_splits(tokens, probe(str(q.device)).multiprocessors, slots.shape[1])
        how = choose_launch(shape.heads, shape.layout.name != "latent", q.dtype)
        tiles = Tiles(empty, empty, tokens, 1, splits)
        launch(how, shape, q, cache, out, tiles, (empty, empty, table), slots, counts, 1)
    return out


@dataclass(frozen=True)
class Unpacking:
    """The pages of rows longer than one token, to be widened for their tiles; all empty without."""

    row: Tensor  # [pages] int32 of the batch
    column: Tensor  # [pages] int32 of its page table
    table: Tensor  # [R, P] int32: the batch's page table in terms of the widened pages


@dataclass(frozen=True)
class LatentPlan:
    shape: LatentShape
    tiles: TilePlan
    unpacking: Unpacking


def plan(batch: Batch, shape: LatentShape) -> LatentPlan:
    columns = max(8, triton.next_power_of_2(shape.heads))
    tiles = make_tiles(batch, 1, max(1, 64 // columns))
    device = batch.page_table.device
    empty = torch.empty(0, dtype=torch.int32, device=device)
    if not tiles.chunks.tiles or shape.layout.name == "latent":
        return LatentPlan(shape, tiles, Unpacking(empty, empty, batch.page_table))
    needed = np.where(batch.counts > 1, -(-batch.lengths // batch.page_size), 0)
    first = needed.cumsum() - needed
    row = np.repeat(np.arange(batch.rows), needed)
    column = np.arange(len(row)) - np.repeat(first, needed)
    both = torch.from_numpy(np.stack([row, column]).astype(np.int32)).to(device)
    start = torch.from_numpy(first.astype(np.int32)).to(device)
    places = torch.arange(batch.page_table.shape[1], dtype=torch.int32, device=device)
    return LatentPlan(shape, tiles, Unpacking(both[0], both[1], start[:, None] + places))


def run_chunks(plan: LatentPlan, q: Tensor, cache: Tensor, out: Tensor) -> None:
    """Rows of more than one token. Packed pages are widened once: many tiles read each of them."""
    shape, batch, tiles = plan.shape, plan.tiles.batch, plan.tiles.chunks
    page_size, rank, rope = batch.page_size, shape.rank, shape.rope
    if shape.layout.name == "latent_fp8_packed":
        wide = latent(q.dtype, rank, rope)
        pages = len(plan.unpacking.row)
        rows = torch.empty(pages, page_size, wide.width, dtype=q.dtype, device=q.device)
        table = batch.page_table
        kernels.widen[(pages, triton.cdiv(page_size, 16))](
            cache.view(torch.float8_e4m3fn), cache.view(torch.float32),
            cache.view(torch.bfloat16), rows, plan.unpacking.row, plan.unpacking.column, table,
            table.stride(0),
            RANK=rank, BLOCK=min(rank, LATENT_BLOCK), ROPE=rope, ROW=cache.shape[-1],
            PAGE=page_size, num_warps=4,
        )  # fmt: skip
        shape, cache = replace(shape, layout=wide), rows
    columns = tiles.queries * max(8, triton.next_power_of_2(shape.heads))
    none = torch.empty(0, 1, dtype=torch.int32, device=q.device)
    places = (batch.row_of_token, batch.positions, plan.unpacking.table)
    how = choose_launch(columns, False, q.dtype)
    launch(how, shape, q, cache, out, tiles, places, none, none, page_size)


@dense_mla.backend("triton", reasons=reasons, plan=plan, rank=10)
def run_dense(plan: LatentPlan, q: Tensor, cache: Tensor) -> Tensor:
    shape, batch, tiles = plan.shape, plan.tiles.batch, plan.tiles.decodes
    out = new_output(q, shape)
    if tiles.tiles:
        none = torch.empty(0, 1, dtype=torch.int32, device=q.device)
        places = (batch.row_of_token, batch.positions, batch.page_table)
        how = choose_launch(shape.heads, shape.layout.name != "latent", q.dtype)
        launch(how, shape, q, cache, out, tiles, places, none, none, batch.page_size)
    if plan.tiles.chunks.tiles:
        run_chunks(plan, q, cache, out)
    return out
