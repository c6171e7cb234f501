"""How quantised weights lie in bytes, and their exact integer values, scales and offsets.

For backends that compute on packed weights. Turning them into floats is the file reader's part.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # elements that share a scale in Q4_0, Q4_1 and Q8_0


class PackedTensor(NamedTuple):
    """A quantised matrix as it lies in the file, rows in Hugging Face order.

    Each row stands alone: rows can be cut or reordered without unpacking.
    """

    kind: str  # "Q4_0", "Q4_1", "Q8_0", "Q6_K"…
    shape: tuple[int, ...]  # [rows, columns]
    data: NDArray[np.uint8]  # [rows, bytes a row]


class Unpacked(NamedTuple):
    """weight[r, c] = values[r, c] * scales[r, c // 32] + mins[r, c // 32], exactly."""

    values: NDArray[np.int8]  # [rows, columns]
    scales: NDArray[np.float32]  # [rows, columns / 32]; each is a float16's value
    mins: NDArray[np.float32]  # [rows, columns / 32]; 0 where the kind has none


def unpack(packed: PackedTensor) -> Unpacked:
    """The integers, scales and mins of a Q4_0, Q4_1 or Q8_0 matrix.

    Q4_0: values -8..7, no mins. Q4_1: values 0..15. Q8_0: values -128..127, no mins.
    Layouts: ggml-common.h (block_q4_0, block_q4_1, block_q8_0). Raises ValueError for other kinds.
    """
    if packed.kind not in _UNPACKERS:
        raise ValueError(f"{packed.kind} has no integer form with a scale for every 32 elements")
    rows, columns = packed.shape
    blocks = packed.data.reshape(rows, columns // BLOCK, -1)
    return _UNPACKERS[packed.kind](blocks, rows, columns)


def to_float(unpacked: Unpacked) -> NDArray[np.float32]:
    """The matrix in float32, [rows, columns]."""
    rows, columns = unpacked.values.shape
    blocks = unpacked.values.reshape(rows, columns // BLOCK, BLOCK)
    out = np.multiply(blocks, unpacked.scales[:, :, None], dtype=np.float32)
    if unpacked.mins.any():
        out += unpacked.mins[:, :, None]
    return out.reshape(rows, columns)


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at byte `at` of every block, [rows, blocks]."""
    halves = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)
    return halves[:, :, 0].astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8], at: int, rows: int, columns: int) -> NDArray[np.int8]:
    """16 bytes a block: low nibbles are elements 0..15, high nibbles 16..31."""
    low_high = np.empty((*blocks.shape[:2], BLOCK), np.int8)
    np.bitwise_and(blocks[:, :, at:], 15, out=low_high[:, :, :16], casting="unsafe")
    np.right_shift(blocks[:, :, at:], 4, out=low_high[:, :, 16:], casting="unsafe")
    return low_high.reshape(rows, columns)


def _q4_0(blocks: NDArray[np.uint8], rows: int, columns: int) -> Unpacked:
    scales = _half(blocks, 0)
    values = _nibbles(blocks, 2, rows, columns)
    values -= 8
    return Unpacked(values, scales, np.zeros_like(scales))


def _q4_1(blocks: NDArray[np.uint8], rows: int, columns: int) -> Unpacked:
    return Unpacked(_nibbles(blocks, 4, rows, columns), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: NDArray[np.uint8], rows: int, columns: int) -> Unpacked:
    scales = _half(blocks, 0)
    values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(rows, columns)
    return Unpacked(values, scales, np.zeros_like(scales))


_UNPACKERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
INTEGER_KINDS = tuple(_UNPACKERS)
