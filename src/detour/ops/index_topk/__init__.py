"""index_topk: the cache slots of each token's best-scored positions."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.op import Need, op


def make_inputs(
    lengths: list[int], columns: int, top_k: int, page_size: int, device: torch.device, seed: int
) -> tuple[Any, ...]:
    """Random scores with many ties in every third row; a page table of scattered pages."""
    source = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(lengths), columns, generator=source)
    scores[::3] = (scores[::3] * 4).round() / 4
    scores[::2, ::5] = 0.0
    scores[1::2, ::7] = -0.0
    pages = torch.randperm(len(lengths) * (columns // page_size), generator=source).int()
    table = pages.view(len(lengths), -1)
    counts = torch.tensor(lengths, dtype=torch.int32)
    rows = torch.arange(len(lengths))
    tensors = (scores, counts, rows, table)
    return (*(tensor.to(device) for tensor in tensors), page_size, top_k)


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    shapes = [([5, 64, 0, 63], 64, 16, 16), ([128, 17, 100], 128, 16, 64)]
    if device.type == "cuda":
        shapes += [([32768, 2048, 2049, 31000] * 4, 32768, 2048, 64)]
        shapes += [([70000, 100, 32769, 4000], 71680, 2048, 64)]
    for seed, (lengths, columns, top_k, page_size) in enumerate(shapes):
        need = {"dtype": torch.float32, "top_k": top_k, "page_size": page_size}
        yield need, make_inputs(lengths, columns, top_k, page_size, device, seed)


@op(__name__, inputs=_inputs, tolerance={torch.float32: 0.0})
def index_topk(
    scores: Tensor,
    lengths: Tensor,
    row_of_token: Tensor,
    page_table: Tensor,
    page_size: int,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """(slots [T, top_k] int32, counts [T] int32): cache slots of the top_k largest scores.

    scores        [T, L] float32, not NaN; what lies at or beyond lengths[t] is not read
    lengths       [T] int32, 0 <= lengths[t] <= L
    row_of_token  [T] int64; page_table [R, P] int32, P * page_size >= every length

    counts[t] = min(lengths[t], top_k) slots come first, in ascending order of their positions; the
    rest is -1. Of equal scores (0.0 and -0.0 are equal) the lower position wins, so every rank and
    backend selects the same set. All positions where lengths[t] <= top_k.
    """
    columns = torch.arange(scores.shape[1], device=scores.device)
    outside = columns >= lengths[:, None]
    ranked = scores.masked_fill(outside, -torch.inf) + 0.0
    width = min(top_k, scores.shape[1])
    # A row's own positions sort before the masked ones, -inf among its scores included.
    order = torch.where(outside, -torch.inf, ranked).sort(dim=-1, descending=True, stable=True)
    best = order.indices[:, :width].sort(dim=-1).values
    counts = lengths.clamp(max=top_k)
    # After sorting positions ascending, those beyond a short row's length are its last ones.
    pages = page_table[row_of_token].gather(1, best // page_size)
    slots = (pages * page_size + best % page_size).int()
    slots = slots.masked_fill(columns[:width] >= counts[:, None], -1)
    pad = top_k - width
    return torch.nn.functional.pad(slots, (0, pad), value=-1), counts
