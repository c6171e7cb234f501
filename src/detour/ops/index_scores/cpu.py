"""index_scores on a CPU with torch alone: decodes together, a row of many tokens in parts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from detour.ops.attention.cpu import LongRow, alike, slots_of
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.index_key import read_index
from detour.ops.index_scores import index_scores
from detour.ops.kv_layout import KVLayout
from detour.ops.op import Need

PRODUCTS = 2 << 20  # numbers of a part's products, all heads


@dataclass(frozen=True)
class CpuPlan:
    layout: KVLayout
    columns: int  # of the scores
    groups: tuple[tuple[Tensor, Tensor], ...]  # tokens [B], slots [B, L] of rows of one token
    long_rows: tuple[LongRow, ...]


def _plan(batch: Batch, layout: KVLayout) -> CpuPlan:
    first = np.concatenate([[0], batch.counts.cumsum()]).astype(np.int64)
    long_rows = []
    for row in np.flatnonzero(batch.counts > 1).tolist():
        slots = slots_of(batch, np.array([row]), int(batch.lengths[row]))
        long_rows.append(LongRow(int(first[row]), int(first[row + 1]), slots.view(-1)))
    groups = tuple(
        (torch.from_numpy(first[rows]), slots_of(batch, rows, int(batch.lengths[rows].max())))
        for rows in alike(batch, 4 * layout.width, np.flatnonzero(batch.counts == 1))
    )
    columns = batch.page_table.shape[1] * batch.page_size
    return CpuPlan(layout, columns, groups, tuple(long_rows))


def _reasons(device: Device, need: Need) -> list[str]:
    return ["it computes on the CPU"] if device.is_cuda else []


@index_scores.backend("cpu", reasons=_reasons, plan=_plan, rank=1)
def index_scores_cpu(plan: CpuPlan, q: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
    out = torch.full((len(q), plan.columns), -torch.inf)
    heads = q.shape[1]
    for tokens, slots in plan.groups:
        keys = read_index(cache, slots, plan.layout)
        products = torch.bmm(q[tokens].float(), keys.transpose(1, 2)).relu_()
        out[tokens, : slots.shape[1]] = torch.bmm(weight[tokens, None], products)[:, 0]
    for row in plan.long_rows:
        keys = read_index(cache, row.slots, plan.layout)
        step = max(1, PRODUCTS // (heads * len(keys)))
        for first in range(row.first, row.last, step):
            some = slice(first, min(first + step, row.last))
            products = (q[some].float().flatten(0, 1) @ keys.T).relu_().unflatten(0, (-1, heads))
            out[some, : len(keys)] = torch.bmm(weight[some, None], products)[:, 0]
    return out
