"""index_topk on a CPU with torch alone: by the k-th largest score, without a full sort."""

import torch
from torch import Tensor

from detour.ops.device import Device
from detour.ops.index_topk import index_topk
from detour.ops.op import Need


def _reasons(device: Device, need: Need) -> list[str]:
    return ["it computes on the CPU"] if device.is_cuda else []


@index_topk.backend("cpu", reasons=_reasons, rank=1)
def index_topk_cpu(
    scores: Tensor,
    lengths: Tensor,
    row_of_token: Tensor,
    page_table: Tensor,
    page_size: int,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    slots = torch.full((len(scores), top_k), -1, dtype=torch.int32)
    counts = lengths.clamp(max=top_k)
    width = int(lengths.max()) if len(lengths) else 0
    outside = torch.arange(width) >= lengths[:, None]
    chosen = ~outside
    if width > top_k:
        ranked = scores[:, :width].masked_fill(outside, -torch.inf)
        least = ranked.topk(top_k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        above = ranked > least
        # What equals the least is taken from the lowest position on until the row is full.
        equal = (ranked == least).logical_and_(chosen)
        room = top_k - above.sum(dim=1, keepdim=True)
        best = above.logical_or_(equal.logical_and_(equal.cumsum(dim=1, dtype=torch.int32) <= room))
        chosen = torch.where((lengths > top_k)[:, None], best, chosen)
    token, position = chosen.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(token)) - starts[token]
    pages = page_table[row_of_token[token], position // page_size]
    slots[token, place] = pages * page_size + (position % page_size).int()
    return slots, counts
