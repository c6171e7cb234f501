"""Safetensors files, one or many, as named lazy tensors.

Reads with plain file reads instead of a memory map: the memory held is one tensor, not the pages of
every file touched so far, and a file that is cut short under us is an error and not a bus error.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from detour.errors import CheckpointError
from detour.loading.tensors import ALL, CHUNK_BYTES, span

MAX_HEADER = 100 << 20  # bytes; the format's own limit
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Entry(NamedTuple):
    """Where one tensor lies."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsSource:
    """All tensors of a folder. Every header is read and checked when it is opened, no tensor is.

    Raises CheckpointError naming the file (and the tensor) for a missing, truncated or damaged
    shard, an index that names what no shard has, and a tensor that two shards have.
    """

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, Entry] = {}
        weight_map = _read_index(folder / INDEX)
        for path in _shards(folder, weight_map):
            for name, entry in read_header(path).items():
                wanted = weight_map.get(name, path.name)
                if wanted != path.name:
                    continue
                if name in self.entries:
                    raise CheckpointError(
                        f"{path} and {self.entries[name].path.name} both hold the tensor {name}."
                    )
                self.entries[name] = entry
        for name, file in weight_map.items():
            if name not in self.entries:
                raise CheckpointError(
                    f"{folder / INDEX} says that {file} holds the tensor {name}, but it does not."
                )

    @property
    def names(self) -> Sequence[str]:
        return sorted(self.entries, key=lambda n: (self.entries[n].path, self.entries[n].offset))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def kind(self, name: str) -> str:
        return self.entries[name].kind

    def nbytes(self, name: str) -> int:
        return self.entries[name].nbytes

    def read(
        self,
        name: str,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        entry = self.entries[name]
        stored = DTYPES[entry.kind]
        dtype = dtype or stored
        if not entry.shape:
            return _read_span(entry, name, 0, 1, stored).reshape(()).to(dtype)
        start, stop = span(rows, entry.shape[0])
        if columns == ALL and dtype == stored:
            flat = math.prod(entry.shape[1:])
            part = _read_span(entry, name, start * flat, stop * flat, stored)
            return part.reshape(stop - start, *entry.shape[1:])
        return self._convert(entry, name, (start, stop), columns, dtype)

    def _convert(
        self, entry: Entry, name: str, rows: tuple[int, int], columns: slice, dtype: torch.dtype
    ) -> torch.Tensor:
        """Reads some rows at a time, so that the whole never lies here twice."""
        stored, shape = DTYPES[entry.kind], entry.shape
        flat = math.prod(shape[1:])
        start, stop = rows
        out_shape = [stop - start, *shape[1:]]
        if len(shape) > 1:
            first, last = span(columns, shape[1])
            out_shape[1] = last - first
        out = torch.empty(out_shape, dtype=dtype)
        step = max(1, CHUNK_BYTES // max(1, flat * stored.itemsize))
        for at in range(start, stop, step):
            end = min(at + step, stop)
            part = _read_span(entry, name, at * flat, end * flat, stored).reshape(
                end - at, *shape[1:]
            )
            out[at - start : end - start] = part[:, columns] if len(shape) > 1 else part
        return out


def _read_span(entry: Entry, name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements start..stop of a tensor, flat."""
    size = (stop - start) * dtype.itemsize
    if size == 0:
        return torch.empty(0, dtype=dtype)
    buffer = bytearray(size)
    try:
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset + start * dtype.itemsize)
            view = memoryview(buffer)
            while view:  # one read returns at most 2 GiB
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(
                        f"{entry.path} is truncated: it ends inside tensor {name}."
                    )
                view = view[count:]
    except OSError as error:
        raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}.") from error
    return torch.frombuffer(buffer, dtype=dtype)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors that one file says it holds, each checked to lie inside it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > MAX_HEADER or 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: its header of {length} bytes "
                    f"does not fit into its {size} bytes."
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    for name, entry in entries.items():
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {entry.offset + entry.nbytes}, "
                f"the file at {size}."
            )
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    try:
        kind, shape = value["dtype"], tuple(int(n) for n in value["shape"])
        start, stop = (int(n) for n in value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of tensor {name} is damaged.") from error
    if kind not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has the unsupported element type {kind!r}.")
    size = math.prod(shape) * DTYPES[kind].itemsize
    if start < 0 or stop - start != size or any(n < 0 for n in shape):
        raise CheckpointError(
            f"{path}: tensor {name} of {list(shape)} {kind} takes {size} bytes, its header entry "
            f"gives it {stop - start}."
        )
    return Entry(path, kind, shape, data_start + start, size)


def _read_index(path: Path) -> Mapping[str, str]:
    """The index's map from tensor to file; {} where there is no index."""
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no valid index: it holds no weight_map.") from error
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names.")
    return weight_map


def _shards(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    if not weight_map:
        single = folder / "model.safetensors"
        found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{folder} holds no safetensors weights.")
        return found
    paths = [folder / file for file in sorted(set(weight_map.values()))]
    for path in paths:
        if path.parent != folder:
            raise CheckpointError(f"{folder / INDEX} names a file outside its folder: {path}.")
        if not path.is_file():
            count = sum(file == path.name for file in weight_map.values())
            raise CheckpointError(
                f"{folder} lacks the shard {path.name}, which holds {count} of its "
                f"{len(weight_map)} tensors."
            )
    return paths
