"""Main memory in huge pages, for what every step reads: weights and the KV cache.

With 4 KB pages a step over 100 MB makes 25,000 address translations, most of them slow; pages of
2 MB double the rate at which a core reads (bench/cpu_ops.py). Linux gives them where it is asked to
(Documentation/admin-guide/mm/transhuge.rst); elsewhere these are ordinary allocations.
"""

import ctypes
import mmap
import sys
import threading
from functools import cache

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 32 << 20  # bytes that small pieces are cut from: a huge page holds several matrices
ALIGNMENT = 64

_cutting = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last one


@cache
def _advise() -> ctypes._CFuncPtr | None:
    """madvise, where there is one."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def ask_huge(tensor: Tensor) -> Tensor:
    """The tensor itself; its untouched memory will come in huge pages. On a GPU nothing is done."""
    call = _advise()
    if call is not None and tensor.device.type == "cpu" and tensor.nbytes >= HUGE:
        first = tensor.data_ptr() & -mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.nbytes & -mmap.PAGESIZE
        call(first, end - first, mmap.MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return tensor


def settle(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, as uint8 [bytes], beside what was settled before it."""
    global _chunk
    flat = tensor.contiguous().view(torch.uint8).view(-1)
    size = -(-len(flat) // ALIGNMENT) * ALIGNMENT
    with _cutting:
        if size > len(_chunk):
            _chunk = ask_huge(torch.empty(max(CHUNK, size), dtype=torch.uint8))
        place, _chunk = _chunk[: len(flat)], _chunk[size:]
    return place.copy_(flat)
