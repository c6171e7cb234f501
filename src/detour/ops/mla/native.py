"""Latent attention on a CPU in C++, over every layout of latents.

Dense and sparse attention walk rows alike: a token that selects all it sees gets the same bits, and
the same ones alone, in a batch, in chunks and on any page size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.attention.native import make_tasks
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.kv_layout import LATENT_BLOCK
from detour.ops.mla import LatentShape, dense_mla, sparse_mla
from detour.ops.op import Need

PACKED = 2  # as latent.cpp numbers kinds of rows, after native.DTYPES


@dataclass(frozen=True)
class Tasks:
    """Pieces of rows of a few tokens."""

    shape: LatentShape
    tasks: Tensor  # [n, 4] int32: row, first token in the step, its position, tokens
    page_table: Tensor  # [R, P] int32, contiguous


def _reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"]
    if layout.name == "latent" and layout.dtype not in native.DTYPES:
        return [f"it reads float32 and bfloat16 rows, not {layout.dtype}"]
    if need["rank"] % 8 or need["rope"] % 8:
        return ["it takes ranks and rope parts of a multiple of 8 numbers"]
    return native.dtype_reasons(device, need["dtype"])


def _plan(batch: Batch, shape: LatentShape) -> Tasks:
    return Tasks(shape, make_tasks(batch), batch.page_table.contiguous())


def _run(q: Tensor, cache: Tensor, shape: LatentShape, tasks: Tensor, table: Tensor) -> Tensor:
    """tasks: of dense attention [n, 4], or the counts of sparse attention [n]."""
    out = torch.empty(*q.shape[:2], shape.rank, dtype=q.dtype)
    dense = tasks.dim() > 1
    native.function("detour_latent_attention", "pnpnnppnnnpnnifpii")(
        tasks.data_ptr(),
        len(tasks),
        table.data_ptr(),
        table.stride(0),
        cache.shape[1],
        0 if dense else tasks.data_ptr(),
        q.data_ptr(),
        shape.heads,
        shape.rank,
        shape.rope,
        cache.data_ptr(),
        cache.shape[-1] * cache.itemsize,
        min(shape.rank, LATENT_BLOCK),
        native.DTYPES.get(shape.layout.dtype, PACKED),
        shape.scale,
        out.data_ptr(),
        native.DTYPES[q.dtype],
        native.threads(),
    )
    return out


@sparse_mla.backend("native", reasons=_reasons, rank=2)
def sparse_mla_native(
    q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, shape: LatentShape
) -> Tensor:
    return _run(q, cache, shape, counts, slots)


@dense_mla.backend("native", reasons=_reasons, plan=_plan, rank=2)
def dense_mla_native(plan: Tasks, q: Tensor, cache: Tensor) -> Tensor:
    return _run(q, cache, plan.shape, plan.tasks, plan.page_table)
