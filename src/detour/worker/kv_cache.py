"""The KV cache's tensors: what a page costs, how many fit, and the memory itself.

Knows layouts, not models. Who owns which page is the engine's business.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from detour.errors import ConfigError
from detour.ops import huge_pages
from detour.ops.kv_layout import KVLayout

log = logging.getLogger(__name__)

CPU_MOST = 4 << 30  # bytes of main memory that are taken unasked


Spec = Sequence[tuple[KVLayout, ...]]  # what each layer stores per token


def bytes_per_token(spec: Spec) -> int:
    """Of all layers."""
    return sum(layout.bytes_per_token for layer in spec for layout in layer)


class KVCache:
    """One tuple of tensors per layer, as its layouts say, one after the other; zeros at first.

    num_pages counts page 0, which belongs to no sequence.
    """

    def __init__(
        self,
        spec: Spec,
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers = [
            tuple(
                _zeros(_shape(layout, num_pages, page_size), layout.dtype, device)
                for layout in layer
                for _ in range(layout.tensors)
            )
            for layer in spec
        ]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return huge_pages.zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _shape(layout: KVLayout, num_pages: int, page_size: int) -> tuple[int, ...]:
    if layout.name == "grouped_query":
        return (num_pages, page_size, layout.heads, layout.width)
    return (num_pages, page_size, layout.width)


def pages_for(budget: int, spec: Spec, page_size: int, wanted_tokens: int) -> int:
    """Pages (page 0 included) for `wanted_tokens`, or as many as `budget` bytes hold, if fewer.

    Raises ConfigError when not even one page fits beside page 0.
    """
    cost = bytes_per_token(spec) * page_size
    fits = budget // cost
    if fits < 2:
        raise ConfigError(
            f"There is no memory for a KV cache: a page of {page_size} tokens takes {cost:,} bytes "
            f"and {max(budget, 0):,} are left; choose a smaller model or a larger memory fraction."
        )
    return min(fits, math.ceil(wanted_tokens / page_size) + 1)


def cpu_budget(fraction: float, *, asked: bool) -> int:
    """Bytes of main memory for the KV cache: a fraction of what is free.

    Unless so many tokens were asked for, no more than a person would expect a server to take.
    """
    free = int(fraction * available_memory())
    return free if asked else min(free, CPU_MOST)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory that can be taken without swapping, within this container's limit.

    From /proc/meminfo and the cgroup's files; a generous guess where there are none.
    """
    found = [8 << 30]
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        found = [int(lines["MemAvailable"].split()[0]) * 1024]
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        found.append(max(int(most) - int(used.read_text()), 0))
    return min(found)
