"""What the makers of some GPUs say of them, to plan for one that is not here."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from detour.ops.device import Device

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One GPU. Rates are those of data sheets, dense; what a group of them exchanges is NCCL's."""

    name: str  # as torch calls the device, or a part of that
    bandwidth: float  # bytes a second
    flops: Mapping[str, float]  # a second, by the type that is multiplied: bf16, fp8, nvfp4
    memory: int  # bytes that a program can have
    link_bandwidth: float  # bytes a second of an all-reduce's bus
    link_latency: float  # seconds that an all-reduce takes at least
    capability: tuple[int, int]
    shared_memory: int  # bytes a block may have
    multiprocessors: int

    @property
    def device(self) -> Device:
        """For routes; nothing can be allocated there."""
        return Device(
            torch.device("cuda"),
            self.name,
            self.capability,
            self.shared_memory,
            self.multiprocessors,
            frozenset(),
        )


def _rates(bf16: float, fp8: float, nvfp4: float) -> Mapping[str, float]:
    return {"bf16": bf16 * 1e12, "fp8": fp8 * 1e12, "nvfp4": nvfp4 * 1e12}


_HOPPER = (9, 0), 232_448, 132
# Hopper multiplies no e2m1: such weights are widened to bfloat16 first.
CHIPS = {
    "h100": Chip("H100", 3.35e12, _rates(989, 1979, 989), 79 * GIB, 360e9, 8e-6, *_HOPPER),
    "h200": Chip("H200", 4.8e12, _rates(989, 1979, 989), 139 * GIB, 360e9, 8e-6, *_HOPPER),
    # What large copies and products reach on one, which is what kernels are best held against.
    "h200-measured": Chip("H200", 4.3e12, _rates(788, 1450, 788), 139 * GIB, 360e9, 8e-6, *_HOPPER),
    "b200": Chip(
        "B200", 8.0e12, _rates(2250, 4500, 9000), 179 * GIB, 700e9, 8e-6, (10, 0), 232_448, 148
    ),
    "rtxpro6000": Chip(
        *("RTX PRO 6000", 1.792e12, _rates(504, 1010, 2015), 95 * GIB, 41e9, 7.5e-6),
        *((12, 0), 101_376, 188),
    ),
}


def chip_of(device: Device) -> Chip | None:
    """The one that a device is, if it is here known."""
    named = (chip for chip in CHIPS.values() if chip.name in device.name)
    return next(named, None) if device.is_cuda else None
