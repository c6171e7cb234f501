"""Triton backend of kv_write: keys and values of a token in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.kv_write import kv_write
from detour.ops.op import Need
from detour.ops.triton_device import FP8, triton_reasons


@triton.jit
def copy_rows(
    keys, values, key_cache, value_cache, slots, key_stride, value_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    key = tl.load(keys + token * key_stride + at, mask=mask)
    value = tl.load(values + token * value_stride + at, mask=mask)
    if NARROW:
        key = tl.clamp(key.to(tl.float32), -448.0, 448.0)
        value = tl.clamp(value.to(tl.float32), -448.0, 448.0)
    tl.store(key_cache + slot * WIDTH + at, key.to(key_cache.dtype.element_ty), mask=mask)
    tl.store(value_cache + slot * WIDTH + at, value.to(value_cache.dtype.element_ty), mask=mask)


def reasons(device: Device, need: Need) -> list[str]:
    narrow = need["layout"].dtype == torch.float8_e4m3fn
    found = triton_reasons(device, FP8 if narrow else (8, 0))
    if need["layout"].name != "grouped_query":
        found.append(f"it writes grouped_query rows, not {need['layout'].name}")
    return found


@kv_write.backend("triton", reasons=reasons, rank=10)
def run(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, write_slots: Tensor
) -> None:
    tokens, heads, head_dim = keys.shape
    width = heads * head_dim
    block = triton.next_power_of_2(width)
    if tokens:
        copy_rows[(tokens,)](
            keys, values, key_cache, value_cache, write_slots, keys.stride(0), values.stride(0),
            WIDTH=width, BLOCK=block, NARROW=key_cache.dtype == torch.float8_e4m3fn,
            num_warps=4 if block >= 1024 else 1,
        )  # fmt: skip
