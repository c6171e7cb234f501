"""index_scores on a CPU in C++: a score is the same bits whatever is computed beside it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from detour.ops import native
from detour.ops.attention.native import make_tasks
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.index_scores import index_scores
from detour.ops.kv_layout import KVLayout
from detour.ops.op import Need

PACKED = 2  # as index.cpp numbers kinds of keys and queries, after native.DTYPES


@dataclass(frozen=True)
class Tasks:
    """Pieces of rows of a few tokens."""

    layout: KVLayout
    tasks: Tensor  # [n, 4] int32: row, first token in the step, its position, tokens
    page_table: Tensor  # [R, P] int32, contiguous


def _reasons(device: Device, need: Need) -> list[str]:
    layout = need["layout"]
    if layout.name == "index_keys" and layout.dtype not in native.DTYPES:
        return [f"it reads float32, bfloat16 and e4m3 keys, not {layout.dtype}"]
    if need["width"] % 8 or need["heads"] % 4:
        return ["it takes keys of a multiple of 8 numbers, heads in fours"]
    return native.dtype_reasons(device, need["dtype"])


def _plan(batch: Batch, layout: KVLayout) -> Tasks:
    return Tasks(layout, make_tasks(batch), batch.page_table.contiguous())


@index_scores.backend("native", reasons=_reasons, plan=_plan, rank=2)
def index_scores_native(plan: Tasks, q: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
    tokens, heads, width = q.shape
    table, page_size = plan.page_table, cache.shape[1]
    columns = table.shape[1] * page_size
    out = torch.full((tokens, columns), -torch.inf)
    native.function("detour_index_scores", "pnpnnpipnnpipni")(
        plan.tasks.data_ptr(),
        len(plan.tasks),
        table.data_ptr(),
        table.stride(0),
        page_size,
        q.data_ptr(),
        native.DTYPES.get(q.dtype, PACKED),
        weight.data_ptr(),
        heads,
        width,
        cache.data_ptr(),
        native.DTYPES.get(plan.layout.dtype, PACKED),
        out.data_ptr(),
        columns,
        native.threads(),
    )
    return out
