"""GGUF files as named lazy tensors: dequantised on reading, or packed as they lie.

Rows are read and dequantised a chunk at a time, so the memory held is the result and one chunk.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from detour.errors import CheckpointError
from detour.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from detour.loading.gguf_names import Placed, placed_tensors
from detour.loading.packing import INTEGER_KINDS, PackedTensor, to_float, unpack
from detour.loading.tensors import ALL, span

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
CHUNK_ELEMENTS = 1 << 18  # dequantised at once; measured fastest: temporaries stay in cache


class GgufSource:
    """All tensors of a GGUF model (of all its parts, if it is split), under Hugging Face names.

    Raises CheckpointError naming the file and the tensor for a missing part, a truncated file or an
    unsupported element type.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.placed: dict[str, Placed] = {}
        for part in split_parts(path):
            header = read_gguf_header(part)
            for tensor in header.tensors.values():
                _check(header, tensor)
            self.placed |= placed_tensors(header, config)

    @property
    def names(self) -> Sequence[str]:
        return list(self.placed)

    def shape(self, name: str) -> tuple[int, ...]:
        placed = self.placed[name]
        return placed.tensor.shape[1:] if placed.expert >= 0 else placed.tensor.shape

    def kind(self, name: str) -> str:
        return type_name(self.placed[name].tensor.kind)

    def nbytes(self, name: str) -> int:
        shape = self.shape(name)
        return math.prod(shape[:-1]) * row_bytes(self.placed[name].tensor)

    def read(
        self,
        name: str,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """dtype: None keeps F32, F16 and BF16 as they are and makes quantised weights float32."""
        placed, shape, kind = self.placed[name], self.shape(name), self.kind(name)
        vector = len(shape) == 1  # lies as one row; its "rows" are elements
        matrix = (1, shape[0]) if vector else (math.prod(shape[:-1]), shape[-1])
        start, stop = (0, 1) if vector else span(rows, matrix[0])
        first, last = span(ALL if vector else columns, matrix[1])
        dtype = dtype or PLAIN.get(kind, torch.float32)
        out = torch.empty(stop - start, last - first, dtype=dtype)
        step = max(1, CHUNK_ELEMENTS // matrix[1])
        for at in range(start, stop, step):
            end = min(at + step, stop)
            part = decode(self._rows(placed, matrix[0], at, end), kind)
            out[at - start : end - start] = part[:, first:last]
        if vector:
            flat = out[0] if not len(placed.order) else out[0][torch.from_numpy(placed.order)]
            return flat[rows]
        return out if len(shape) == 2 else out.reshape(-1, *shape[1:])

    def read_packed(self, name: str, *, rows: slice = ALL) -> PackedTensor:
        """A matrix's bytes, untouched but for the order of its rows (see PackedTensor)."""
        placed, shape = self.placed[name], self.shape(name)
        if len(shape) != 2:
            raise ValueError(f"{name} is no matrix: {list(shape)}")
        start, stop = span(rows, shape[0])
        data = self._rows(placed, shape[0], start, stop)
        return PackedTensor(self.kind(name), (stop - start, shape[1]), data)

    def _rows(self, placed: Placed, count: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Our rows start..stop of a tensor of `count` rows as bytes, [stop - start, row bytes]."""
        size = row_bytes(placed.tensor)
        base = placed.tensor.offset + max(placed.expert, 0) * count * size
        path = placed.header.path
        if not len(placed.order) or count == 1:
            return _read_bytes(path, base + start * size, stop - start, size)
        order = placed.order[start:stop]
        low, high = int(order.min()), int(order.max()) + 1  # within the heads that are touched
        return _read_bytes(path, base + low * size, high - low, size)[order - low]


def _read_bytes(path: Path, offset: int, rows: int, row_size: int) -> NDArray[np.uint8]:
    try:
        data = np.fromfile(path, np.uint8, rows * row_size, offset=offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if data.size != rows * row_size:
        raise CheckpointError(
            f"{path} is truncated: it ends before byte {offset + rows * row_size}."
        )
    return data.reshape(rows, row_size)


def decode(data: NDArray[np.uint8], kind: str) -> torch.Tensor:
    """Rows of bytes [rows, row bytes] as numbers [rows, columns]: F32, F16, BF16, or float32."""
    if kind in PLAIN:
        return torch.from_numpy(data).view(PLAIN[kind])
    if kind in INTEGER_KINDS:  # the library's way gives the same numbers in twice the time
        packed = PackedTensor(kind, matrix_shape(data, kind), data)
        return torch.from_numpy(to_float(unpack(packed)))
    blocks = data.reshape(1, -1)  # as one row: the library works off 16 rows at a time
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind])).reshape(len(data), -1)


def matrix_shape(data: NDArray[np.uint8], kind: str) -> tuple[int, int]:
    """The shape of the matrix whose rows lie in `data`."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return data.shape[0], data.shape[1] // size * block


def type_name(kind: int) -> str:
    """ggml's name of an element type; its number where it is unknown."""
    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"


def row_bytes(tensor: GgufTensor) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return tensor.shape[-1] // block * size


def _check(header: GgufHeader, tensor: GgufTensor) -> None:
    kind = type_name(tensor.kind)
    if kind not in PLAIN and kind not in QUANTISED:
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} has the unsupported type {kind}; supported are "
            f"{', '.join((*PLAIN, *QUANTISED))}."
        )
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    if not tensor.shape or tensor.shape[-1] % block:
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} of shape {list(tensor.shape)} does not divide "
            f"into {kind} blocks of {block}."
        )
    end = tensor.offset + math.prod(tensor.shape[:-1]) * row_bytes(tensor)
    if end > header.file_size:
        raise CheckpointError(
            f"{header.path} is truncated: tensor {tensor.name} ends at byte {end}, the file at "
            f"{header.file_size}."
        )


def split_parts(path: Path) -> list[Path]:
    """The files of a GGUF model, the first being `path`: `x-00001-of-00003.gguf` has two more."""
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})", path.stem)
    if not match:
        return [path]
    if int(match[2]) != 1:
        raise CheckpointError(
            f"{path} is part {int(match[2])} of a split model: name its first part."
        )
    parts = [
        path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
        for number in range(1, int(match[3]) + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} is missing: the model is split into {len(parts)} files.")
    return parts
