"""A case of bench/kernels.py, and what the makers of cases share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from detour.ops.op import Op

GPU = torch.device("cuda")
BF16 = torch.bfloat16
L2_BYTES = 60e6
Calls = list[Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    op: str
    backend: str
    shape: str
    bytes: float  # that must move once
    operations: float  # on real rows
    make: Callable[[], Calls]  # one call per set of inputs


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator(GPU).manual_seed(seed)


def backend(op: Op, name: str = "triton") -> Callable[..., Any]:
    op.discover()
    return op.backends[name].run if name != "reference" else op.reference.run


def sets(size: float) -> int:
    """How many input sets of `size` bytes exceed the cache twice."""
    return max(1, min(64, int(2 * L2_BYTES / max(size, 1)) + 1))
