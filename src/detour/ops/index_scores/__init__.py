"""index_scores: the lightning indexer's score of every cached position for every token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detour.ops.attention import make_batch
from detour.ops.batch import Batch
from detour.ops.index_key import quantise_index, read_index, write_index
from detour.ops.kv_layout import KVLayout, index_keys, index_keys_fp8
from detour.ops.op import Need, op, takes


def make_cache(
    pages: int, page_size: int, layout: KVLayout, device: torch.device, source: torch.Generator
) -> Tensor:
    """A cache of random index keys in either layout."""
    cache = torch.zeros(pages, page_size, layout.width, dtype=layout.dtype, device=device)
    width = layout.width - (4 if layout.name == "index_keys_fp8" else 0)
    for first in range(0, pages, 1024):
        count = min(1024, pages - first)
        keys = torch.randn(count * page_size, width, generator=source, device=source.device)
        keys = 2 * keys.to(device)
        part = cache[first : first + count]
        if layout.name == "index_keys_fp8":
            slots = torch.arange(count * page_size, device=device)
            write_index(part, slots, *quantise_index(keys))
        else:
            part.copy_(keys.view(part.shape))
    return cache


def make_inputs(
    rows: list[tuple[int, int]], heads: int, width: int, page_size: int, layout: KVLayout,
    dtype: torch.dtype, device: torch.device, source: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """(batch, layout, queries, head weights, cache) for rows of (start, count)."""
    batch = make_batch(rows, page_size, device, source)
    tokens = len(batch.positions)
    q = torch.randn(tokens, heads, width, generator=source).to(device)
    weight = torch.randn(tokens, heads, generator=source).to(device)
    fast = torch.Generator(device).manual_seed(source.initial_seed())
    cache = make_cache(int(batch.page_table.max()) + 1, page_size, layout, device, fast)
    if layout.name == "index_keys_fp8":
        queries, scale = quantise_index(q)
        return batch, layout, queries, weight * scale, cache
    return batch, layout, q.to(dtype), weight, cache


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    # Every token sees the whole width, since what lies beyond is left open by the contract.
    source = torch.Generator().manual_seed(45)
    kinds = [(torch.float32, 16, 32, 16), (torch.float32, 32, 128, 64)]
    widths = [(1, 1), (3, 128)]
    if device.type == "cuda":
        kinds += [(torch.bfloat16, 32, 128, 64)]
        widths += [(5, 4096)]
    for dtype, heads, width, page_size in kinds:
        for layout in (index_keys(dtype, width), index_keys_fp8(width)):
            for rows, length in widths:
                length = -(-length // page_size) * page_size
                need = {"dtype": dtype, "heads": heads, "width": width, "layout": layout}
                several = [(length - 1, 1)] * rows
                yield (
                    need,
                    make_inputs(several, heads, width, page_size, layout, dtype, device, source),
                )


@dataclass(frozen=True)
class RowsPlan:
    batch: Batch
    layout: KVLayout


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 1e-3, torch.bfloat16: 1e-2},
    plan=RowsPlan,
    planned=2,
    replays=False,
    reasons=takes("index_keys", "index_keys_fp8"),
)
def index_scores(plan: Any, q: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
    """scores[t, s] = sum_h weight[t, h] * relu(q[t, h] @ key[s]) -> [T, P * page_size] float32.

    plan(batch: Batch, layout: KVLayout) is called once a step.
    q, weight  as index_query returns them: [T, H, D] (e4m3 for index_keys_fp8), [T, H] float32
    cache      [pages, page_size, D or D + 4] contiguous, layout index_keys or index_keys_fp8

    Position s of the token's row; scores beyond positions[t] are left open (a backend may
    not even write them). Products in float32. A need is {"dtype", "heads", "width": D, "layout"}.
    """
    batch = plan.batch
    columns = batch.page_table.shape[1] * batch.page_size
    place = torch.arange(columns, device=q.device)
    out = torch.full((len(q), columns), -torch.inf, device=q.device)
    first = 0
    for row, count in enumerate(batch.counts.tolist()):
        slots = batch.page_table[row].long()[place // batch.page_size] * batch.page_size
        keys = read_index(cache, slots + place % batch.page_size, plan.layout)
        some = slice(first, first + count)
        products = torch.einsum("thd,sd->ths", q[some].float(), keys).relu_()
        scores = torch.einsum("ths,th->ts", products, weight[some])
        seen = place <= batch.positions[some, None]
        out[some] = scores.masked_fill_(~seen, -torch.inf)
        first += count
    return out
