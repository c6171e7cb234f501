"""latent_write: norm, rope, quantise and store one token's latent row.

Together because a row is 1 kB: four launches would cost more than the work.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.index_key import rotate_first
from detour.ops.kv_layout import latent, latent_fp8_packed
from detour.ops.mla import LatentShape, pack_latent, rows_of
from detour.ops.norm import rms_norm
from detour.ops.op import Need, op


def make_inputs(
    device: torch.device, packed: bool = False
) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    """Packed caches are bytes, which two right backends may round apart: not for every test."""
    source = torch.Generator().manual_seed(51)
    for dtype, rank, width in ((torch.float32, 64, 16), (torch.bfloat16, 512, 64)):
        if packed:
            rank = max(rank, 128)
        layout = latent_fp8_packed(rank, width) if packed else latent(dtype, rank, width)
        shape = LatentShape(8, rank, width, 1.0, layout)
        for tokens, page_size, interleaved in ((1, 1, True), (19, 16, False), (33, 64, True)):
            kv = 3 * torch.randn(tokens, rank + width + 8, generator=source)
            weight = 1 + 0.1 * torch.randn(rank, generator=source)
            angles = 6.28 * torch.rand(tokens, width // 2, generator=source)
            pages = 2 + tokens // page_size
            slots = torch.randperm(pages * page_size, generator=source)[:tokens].to(device)
            cache = torch.zeros(pages, page_size, layout.width, dtype=layout.dtype, device=device)
            need = {"dtype": dtype, "rank": rank, "rope": width, "layout": layout}
            rows = kv.to(device, dtype)[:, : rank + width]
            turns = (angles.cos().to(device), angles.sin().to(device))
            rest = (interleaved, cache, slots, shape)
            yield need, (rows, weight.to(device, dtype), 1e-5, *turns, *rest)


@op(
    __name__,
    inputs=make_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2},
    writes=(6,),
    reasons=rows_of,
)
def latent_write(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    write_slots: Tensor,
    shape: LatentShape,
) -> None:
    """cache[write_slots[t]] = rms_norm(kv[t, :rank]) | rope(kv[t, rank:]) in the cache's layout.

    kv           [T, rank + rope] floating, tokens may be strided; weight [rank] of its dtype
    cos, sin     [T, rope / 2] float32; pairs (2i, 2i + 1) if interleaved, else (i, i + rope / 2)
    cache        [pages, page_size, width] contiguous, layout latent or latent_fp8_packed
    write_slots  [T] int64; distinct except in page 0

    Norm and rope each end in kv's dtype, as the separate ops would leave them; a packed row's
    scales are taken after. A need is {"dtype", "rank", "rope", "layout"}.
    """
    rank = shape.rank
    normal = rms_norm.reference.run(kv[:, :rank], weight, eps)
    turned = rotate_first(kv[:, rank:].float(), cos, sin, interleaved).to(kv.dtype)
    rows = torch.cat((normal, turned), dim=-1)
    if shape.layout.name == "latent_fp8_packed":
        rows = pack_latent(rows, rank)
    cache.view(-1, cache.shape[-1])[write_slots] = rows.to(cache.dtype)
