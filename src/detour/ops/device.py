"""What this device can do: probed, never inferred from a marketing name."""

import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """The device a worker computes on."""

    torch_device: torch.device
    name: str
    capability: tuple[int, int]  # CUDA compute capability; (0, 0) on a CPU
    shared_memory: int  # bytes a thread block may use; 0 on a CPU
    multiprocessors: int  # streaming multiprocessors, or CPU cores
    instructions: frozenset[str]  # CPU instruction sets that decide which kernels are fast

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"


@cache
def probe(kind: str) -> Device:
    """The device named `kind` ("cpu", "cuda", "cuda:1")."""
    device = torch.device(kind)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(
            device,
            properties.name,
            (properties.major, properties.minor),
            properties.shared_memory_per_block_optin,
            properties.multi_processor_count,
            frozenset(),
        )
    found = torch.backends.cpu.get_cpu_capability().lower()
    names = {found}
    if torch.cpu._is_amx_tile_supported():
        names |= {"amx", "avx512_bf16"}
    if torch.cpu._is_avx512_bf16_supported():
        names.add("avx512_bf16")
    return Device(device, "cpu", (0, 0), 0, os.cpu_count() or 1, frozenset(names))
