"""Named lazy tensors: what every file format offers, and the checks shared by them."""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from detour.errors import CheckpointError

ALL = slice(None)
CHUNK_BYTES = 32 << 20  # what is read at once where a tensor is converted on the way


class TensorSource(Protocol):
    """The tensors of one checkpoint by name. Nothing is read before it is asked for."""

    @property
    def names(self) -> Sequence[str]:
        """Every tensor, in the order in which reading them is fastest."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def kind(self, name: str) -> str:
        """How its elements lie in the file: "BF16", "F32", "Q4_1"…"""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes in the file."""
        ...

    def read(
        self, name: str, *, rows: slice, columns: slice, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Only the rows (first dimension) and columns (second) asked for, on the CPU."""
        ...


def expect_shape(tensor: torch.Tensor, shape: Sequence[int], name: str, path: Path) -> torch.Tensor:
    """The tensor if it has this shape, else CheckpointError naming it and both shapes."""
    if tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(
            f"{path}: tensor {name} has shape {list(tensor.shape)}, but the configuration asks for "
            f"{list(shape)}."
        )
    return tensor


def span(part: slice, size: int) -> tuple[int, int]:
    """A slice's start and stop inside a dimension of `size`; only contiguous parts are read."""
    start, stop, step = part.indices(size)
    if step != 1 or stop < start:
        raise ValueError(f"only forward contiguous parts can be read, got {part}")
    return start, stop


def return_freed_memory() -> None:
    """Give back to the system what was freed.

    glibc keeps freed pieces of up to 32 MiB for itself, and one that lies between pieces in use for
    good: a loaded model held nearly twice its weights that way.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim:
            trim(0)
