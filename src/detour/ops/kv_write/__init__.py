"""kv_write: this step's keys and values into their cache slots."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.kv_layout import grouped_query
from detour.ops.op import Need, op, takes

E4M3_LARGEST = 448.0


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(13)
    fp8 = torch.float8_e4m3fn
    kinds = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
    for dtype, stored in (*kinds, (torch.float32, torch.bfloat16), (torch.float32, fp8)):
        for tokens, page_size, heads, width in ((1, 1, 3, 64), (37, 16, 1, 32), (20, 64, 2, 128)):
            pages = 4 + 2 * tokens // page_size
            slots = page_size + torch.randperm((pages - 1) * page_size, generator=source)[:tokens]
            both = torch.randn(tokens, 2, heads + 1, width, generator=source).to(device, dtype)
            both[0, 0, 0, 0] = 1e4  # more than e4m3 holds
            caches = torch.zeros(2, pages, page_size, heads, width, dtype=stored, device=device)
            need = {"dtype": dtype, "layout": grouped_query(stored, heads, width)}
            keys, values = both[:, 0, :heads], both[:, 1, :heads]
            yield need, (keys, values, caches[0], caches[1], slots.to(device))


@op(
    __name__,
    inputs=_inputs,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
    writes=(2, 3),
    reasons=takes("grouped_query"),
)
def kv_write(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, write_slots: Tensor
) -> None:
    """cache[write_slots[t]] = token t, for keys and values.

    keys, values            [T, kv_heads, head_dim] floating; tokens may be strided
    key_cache, value_cache  [pages, page_size, kv_heads, head_dim] contiguous, layout grouped_query;
                            values are cast to its dtype, for e4m3 cut to what it holds
    write_slots             [T] int64, page * page_size + offset; distinct except in page 0, whose
                            contents mean nothing

    A need is {"dtype", "layout": KVLayout}.
    """
    for new, cache in ((keys, key_cache), (values, value_cache)):
        rows = cache.view(-1, *cache.shape[2:])
        if cache.dtype == torch.float8_e4m3fn:  # what is too large becomes the largest
            new = new.float().clamp(-E4M3_LARGEST, E4M3_LARGEST).to(cache.dtype).view(torch.uint8)
            rows = rows.view(torch.uint8)
        rows.index_copy_(0, write_slots, new.to(rows.dtype))
