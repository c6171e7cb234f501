"""Attention over pages on a CPU in C++, float32 or bfloat16: decodes, chunks and prompts in one call.

A token's result is the same bit for bit whatever else the step holds and however its prompt is cut.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from detour.ops import native
from detour.ops.attention import AttentionShape, attention
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.op import Need

QUERIES = 16  # tokens a task has at most: they share a walk over the sequence


@dataclass(frozen=True)
class Tasks:
    """Pieces of rows of at most 16 tokens, those with the longest contexts first."""

    shape: AttentionShape
    tasks: Tensor  # [n, 4] int32: row, first token in the step, its position, tokens
    page_table: Tensor  # [R, P] int32
    page_size: int


def _reasons(device: Device, need: Need) -> list[str]:
    if need["layout"].dtype not in native.CACHED:
        return [f"it reads float32, bfloat16 and e4m3 caches, not {need['layout'].dtype}"]
    width = need["head_dim"]
    if width % 8 or width > 256:
        return [f"a head's width must be a multiple of 8 up to 256, not {width}"]
    return native.dtype_reasons(device, need["dtype"])


def make_tasks(batch: Batch) -> Tensor:
    """[n, 4] int32, as Tasks has them."""
    counts = batch.counts.astype(np.int32)
    pieces = -(-counts // QUERIES)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), pieces)
    offset = (np.arange(len(row)) - np.repeat(pieces.cumsum() - pieces, pieces)) * QUERIES
    tasks = np.empty((len(row), 4), dtype=np.int32)
    tasks[:, 0] = row
    tasks[:, 1] = (counts.cumsum() - counts)[row] + offset
    tasks[:, 2] = (batch.lengths - counts)[row] + offset
    tasks[:, 3] = np.minimum(counts[row] - offset, QUERIES)
    work = (tasks[:, 2] + tasks[:, 3]).astype(np.int64) * tasks[:, 3]
    return torch.from_numpy(tasks[np.argsort(-work, kind="stable")])


def plan_tasks(batch: Batch, shape: AttentionShape) -> Tasks:
    return Tasks(shape, make_tasks(batch), batch.page_table.contiguous(), batch.page_size)


@attention.backend("native", reasons=_reasons, plan=plan_tasks, rank=2)
def attention_native(plan: Tasks, q: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    shape = plan.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    native.function("detour_attention", "pnpnpnppnnnnfpii")(
        plan.tasks.data_ptr(),
        plan.tasks.shape[0],
        plan.page_table.data_ptr(),
        plan.page_table.stride(0),
        q.data_ptr(),
        q.stride(0),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        plan.page_size,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.scale,
        out.data_ptr(),
        native.DTYPES[q.dtype],
        native.CACHED[key_cache.dtype],
        native.threads(),
    )
    return out
