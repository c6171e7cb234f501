"""CUDA C++ backends of sparse_mla and dense_mla over packed rows of 512 + 64 numbers (latent.cu).

Triton widens a packed row in shared memory and waits for its rows; this kernel keeps both products
on the bytes and the next rows in flight. Decodes alone: longer rows go to the Triton kernel.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from detour.ops.attention.triton import Tiles
from detour.ops.batch import Batch
from detour.ops.cuda_source import Kernel, kernel, missing
from detour.ops.device import Device, probe
from detour.ops.mla import LatentShape, dense_mla, sparse_mla
from detour.ops.mla.triton import LatentPlan, new_output, plan, run_chunks
from detour.ops.op import Need
from detour.ops.split_keys import choose_splits, empty_parts, join

HEADS = 8  # of a block
STRIDE, TILE = 672, 16  # bytes of a buffered row, rows of a tile: latent.cu's
CAPABILITY = (8, 9)  # e4m3 conversions
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Warps:
    """Warps of a block and tiles each keeps in flight, the one in use included."""

    warps: int = 4
    stages: int = 2

    @property
    def shared(self) -> int:
        return self.warps * self.stages * TILE * STRIDE


def reasons(device: Device, need: Need) -> list[str]:
    if not device.is_cuda:
        return ["it is compiled for CUDA devices"]
    found = [missing()] if missing() else []
    if device.capability < CAPABILITY:
        found.append("it needs compute capability 8.9 for e4m3")
    if device.shared_memory < Warps().shared + 2048:
        found.append(f"it needs {Warps().shared + 2048} bytes of shared memory a block")
    if need["layout"].name != "latent_fp8_packed":
        found.append(f"it reads latent_fp8_packed rows, not {need['layout'].name}")
    if (need["rank"], need["rope"]) != (512, 64) or need["heads"] % HEADS:
        found.append(f"it serves rows of 512 + 64 numbers and multiples of {HEADS} heads")
    if need["dtype"] not in (torch.bfloat16, torch.float16):
        found.append("its products are in float16")
    return found


def compiled(how: Warps, splits: int, page_size: int, dtype: torch.dtype, device: int) -> Kernel:
    """page_size 0: over chosen slots."""
    source = Path(__file__).with_name("latent.cu").read_text()
    defines = {
        "WARPS": how.warps,
        "STAGES": how.stages,
        "SPLITS": splits,
        "DENSE": int(page_size > 0),
        "PAGE": max(page_size, 1),
        "Q_BF16": int(dtype == torch.bfloat16),
    }
    pairs = tuple(f"{name}={value}" for name, value in defines.items())
    return kernel(source, "latent_attention", how.shared, pairs, device)


def launch(
    how: Warps, splits: int, shape: LatentShape, q: Tensor, cache: Tensor, out: Tensor,
    slots: Tensor, counts: Tensor, places: tuple[Tensor, Tensor, Tensor], page_size: int,
) -> None:  # fmt: skip
    """`places` = row_of_token, positions, page_table for dense; slots and counts for sparse."""
    tokens, heads = q.shape[:2]
    pairs = tokens * heads
    parts, sums = empty_parts(splits, pairs, shape.rank, q.device)
    run = compiled(how, splits, page_size, q.dtype, q.device.index or 0)
    stride = places[2].stride(0) if page_size else slots.stride(0)
    run(
        (tokens, splits, heads // HEADS), how.warps * 32,
        q, cache, out, parts, sums, slots, counts, *places, stride, pairs, heads,
        shape.scale * LOG2_E,
    )  # fmt: skip
    if splits > 1:
        join(parts, sums, out.view(pairs, shape.rank))


@sparse_mla.backend("cuda", reasons=reasons, rank=20)
def run_sparse(
    q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, shape: LatentShape
) -> Tensor:
    out = new_output(q, shape)
    if len(q):
        blocks = len(q) * shape.heads // HEADS
        splits = choose_splits(blocks, probe(str(q.device)).multiprocessors, slots.shape[1])
        places = (counts, counts, slots)
        launch(Warps(), splits, shape, q, cache, out, slots, counts, places, 0)
    return out


@dense_mla.backend("cuda", reasons=reasons, plan=plan, rank=20)
def run_dense(plan: LatentPlan, q: Tensor, cache: Tensor) -> Tensor:
    shape, batch, tiles = plan.shape, plan.tiles.batch, plan.tiles.decodes
    out = new_output(q, shape)
    if tiles.tiles:
        decode(plan.shape, batch, tiles, q, cache, out)
    if plan.tiles.chunks.tiles:
        run_chunks(plan, q, cache, out)
    return out


def decode(
    shape: LatentShape, batch: Batch, tiles: Tiles, q: Tensor, cache: Tensor, out: Tensor
) -> None:
    """The rows of one token: all of the batch, or (then q and out are gathered) some."""
    page_size = batch.page_size
    if not len(tiles.first):
        places = (batch.row_of_token, batch.positions, batch.page_table)
        launch(Warps(), tiles.splits, shape, q, cache, out, q, q, places, page_size)
        return
    some = tiles.first.long()
    places = (batch.row_of_token[some], batch.positions[some], batch.page_table)
    gathered = q[some]
    part = new_output(gathered, shape)
    launch(Warps(), tiles.splits, shape, gathered, cache, part, q, q, places, page_size)
    out[some] = part
