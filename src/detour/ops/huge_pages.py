"""Main memory in huge pages, for what every step reads: weights and the KV cache.

With 4 KB pages a step over 100 MB makes 25,000 address translations, most of them slow; pages of
2 MB double the rate at which a core reads (bench/cpu_ops.py). Linux gives them where it is asked to
(Documentation/admin-guide/mm/transhuge.rst); elsewhere these are ordinary allocations.
"""

import contextlib
import math
import mmap
import sys
import threading

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 32 << 20  # bytes that small pieces are cut from: a huge page holds several matrices
ALIGNMENT = 64

_cutting = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last one


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, contiguous. What is never written takes no memory."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: ordinary pages
        block.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # whoever asks, others write to it too
        return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(shape)


def settle(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, as uint8 [bytes], beside what was settled before it."""
    global _chunk
    flat = tensor.contiguous().view(torch.uint8).view(-1)
    size = -(-len(flat) // ALIGNMENT) * ALIGNMENT
    with _cutting, torch.inference_mode(False):
        if size > len(_chunk):
            _chunk = zeros((max(CHUNK, size),), torch.uint8)
        place, _chunk = _chunk[: len(flat)], _chunk[size:]
        return place.copy_(flat)
