"""What the lightning indexer stores and asks: index_key writes keys, index_query makes queries.

Knows the two index layouts of KVLayout. DeepSeek-V3.2's indexer (arXiv 2512.02556).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.kv_layout import KVLayout, index_keys, index_keys_fp8
from detour.ops.op import Need, op, takes

E4M3_LARGEST = 448.0


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rope on the FIRST 2 * cos.shape[-1] numbers of [T, ..., D] float32; the rest passes through."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    shape = (len(x), *(1,) * (x.dim() - 2), half)
    cos, sin = cos.view(shape), sin.view(shape)
    if interleaved:
        one, two = turned[..., 0::2], turned[..., 1::2]
        both = torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1).flatten(-2)
    else:
        one, two = turned[..., :half], turned[..., half:]
        both = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    return torch.cat((both, rest), dim=-1)


def quantise_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., D], float32 scale [...]): the least power of two >= largest magnitude / 448."""
    largest = x.abs().amax(-1).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_LARGEST)))
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


def write_index(cache: Tensor, slots: Tensor, keys: Tensor, scale: Tensor) -> None:
    """Put e4m3 keys [T, D] and scales [T] at slots of an index_keys_fp8 cache."""
    pages, page_size, bytes_ = cache.shape
    width = bytes_ - 4
    flat = cache.view(pages, page_size * bytes_)
    planes = flat[:, : page_size * width].view(pages, page_size, width)
    scales = flat[:, page_size * width :].view(torch.float32)
    page, place = slots // page_size, slots % page_size
    planes[page, place] = keys.view(torch.uint8)
    scales[page, place] = scale


def read_index(cache: Tensor, slots: Tensor, layout: KVLayout) -> Tensor:
    """Index keys [..., D] float32 at cache slots of either layout."""
    pages, page_size, width = cache.shape
    page, place = slots // page_size, slots % page_size
    if layout.name == "index_keys":
        return cache[page, place].float()
    width -= 4
    flat = cache.view(pages, -1)
    planes = flat[:, : page_size * width].view(pages, page_size, width)
    scales = flat[:, page_size * width :].view(torch.float32)
    keys = planes[page, place].view(torch.float8_e4m3fn).float()
    return keys * scales[page, place][..., None]


def key_inputs(
    device: torch.device, packed: bool = False
) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    """Packed caches are bytes, which two right backends may round apart: not for every test."""
    source = torch.Generator().manual_seed(41)
    for dtype, width, half in ((torch.float32, 32, 8), (torch.bfloat16, 128, 32)):
        for layout in (index_keys_fp8(width) if packed else index_keys(dtype, width),):
            for tokens, page_size, interleaved in ((1, 1, True), (21, 16, False), (9, 64, True)):
                k = torch.randn(tokens, width, generator=source)
                weight = 1 + 0.1 * torch.randn(width, generator=source)
                bias = 0.1 * torch.randn(width, generator=source)
                angles = 6.28 * torch.rand(tokens, half, generator=source)
                slots = torch.randperm(3 * page_size + tokens, generator=source)[:tokens]
                pages = -(-(3 * page_size + tokens) // page_size)
                cache = torch.zeros(pages, page_size, layout.width, dtype=layout.dtype)
                first = tuple(t.to(device, dtype) for t in (k, weight, bias))
                turns = (angles.cos().to(device), angles.sin().to(device))
                need = {"dtype": dtype, "width": width, "layout": layout}
                rest = (interleaved, cache.to(device), slots.to(device), layout)
                yield need, (*first, 1e-6, *turns, *rest)


@op(
    __name__,
    inputs=key_inputs,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2},
    writes=(7,),
    reasons=takes("index_keys", "index_keys_fp8"),
)
def index_key(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    write_slots: Tensor,
    layout: KVLayout,
) -> None:
    """cache[write_slots[t]] = rope(LayerNorm(k[t])), quantised where the layout is.

    k            [T, D] floating, tokens may be strided; weight, bias [D] of its dtype
    cos, sin     [T, r / 2] float32; rope turns the first r of D, pairs (2i, 2i + 1) if
                 interleaved, else (i, i + r / 2)
    cache        [pages, page_size, D or D + 4] contiguous, layout index_keys or index_keys_fp8
    write_slots  [T] int64; distinct except in page 0

    In float32 up to the store. A need is {"dtype", "width": D, "layout"}.
    """
    wide = torch.nn.functional.layer_norm(
        k.float(), k.shape[-1:], weight.float(), bias.float(), eps
    )
    turned = rotate_first(wide, cos, sin, interleaved)
    if layout.name == "index_keys_fp8":
        write_index(cache, write_slots, *quantise_index(turned))
    else:
        cache.view(-1, cache.shape[-1])[write_slots] = turned.to(cache.dtype)


def _query_inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(43)
    for dtype, heads, width, half in (
        (torch.float32, 16, 32, 8),
        (torch.bfloat16, 32, 128, 32),
    ):
        for layout in (index_keys(dtype, width), index_keys_fp8(width)):
            for tokens, interleaved in ((1, True), (11, False)):
                q = torch.randn(tokens, heads, width, generator=source).to(device, dtype)
                gate = torch.randn(tokens, heads, generator=source).to(device)
                angles = 6.28 * torch.rand(tokens, half, generator=source)
                need = {"dtype": dtype, "width": width, "heads": heads, "layout": layout}
                turns = (angles.cos().to(device), angles.sin().to(device))
                yield need, (q, gate, *turns, interleaved, layout)


@op(
    __name__,
    inputs=_query_inputs,
    tolerance={torch.float32: 1e-2, torch.bfloat16: 1e-2},
    reasons=takes("index_keys", "index_keys_fp8"),
)
def index_query(
    q: Tensor, gate: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, layout: KVLayout
) -> tuple[Tensor, Tensor]:
    """(rotated queries [T, H, D], head weights [T, H] float32) as index_scores takes them.

    q     [T, H, D] floating, contiguous; gate [T, H] float32 (weights_proj, may be negative)
    The head weight is gate * H^-0.5 * D^-0.5. For index_keys_fp8 queries become e4m3 and their
    scale joins the head weight; else they keep q's dtype. cos, sin, interleaved as index_key's.
    """
    heads, width = q.shape[1:]
    turned = rotate_first(q.float(), cos, sin, interleaved)
    weight = gate * (heads**-0.5 * width**-0.5)
    if layout.name == "index_keys_fp8":
        queries, scale = quantise_index(turned)
        return queries, weight * scale
    return turned.to(q.dtype), weight
