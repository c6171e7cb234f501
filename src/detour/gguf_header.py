"""What a GGUF file says about itself: its metadata and where its tensors lie. Reads no tensor.

Both `text` (vocabulary) and `loading` (weights) need it. The `gguf` package's own reader makes
several numpy objects per vocabulary entry: 35 s and 540 MB for a 152k vocabulary, where this takes
0.2 s, and it reports a damaged file as an index error deep inside.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detour.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_RANK = 4

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
# GGUF's number of a scalar type -> struct and array codes
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in row-major (PyTorch) order; GGUF writes it reversed."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml's number of the element type
    offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Any]  # str, int, float, bool, or a list of these
    tensors: Mapping[str, GgufTensor]
    file_size: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the model's own section: `llama.block_count` is `get("block_count")`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Cursor:
    """Walks over the header; a read beyond the end of the file is an error that says so."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def skip(self, size: int) -> int:
        """Moves over `size` bytes that must be there; returns where they start."""
        start = self.at
        if size < 0 or start + size > len(self.data):
            raise CheckpointError(f"{self.path} is truncated: its header ends after {start} bytes.")
        self.at = start + size
        return start

    def scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.skip(layout.size))[0]

    def text(self) -> str:
        size = self.scalar("Q")
        start = self.skip(size)
        # Some vocabularies hold bytes that are no UTF-8; they must not stop the file from loading.
        return self.data[start : start + size].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} holds a metadata value of unknown type {kind}.")
        item, count = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return self.texts(count)
        if item == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        if item not in _SCALARS:
            raise CheckpointError(f"{self.path} holds a metadata list of unknown type {item}.")
        code = "B" if item == _BOOL else _SCALARS[item]
        start = self.skip(count * struct.calcsize("<" + code))
        numbers = array(code, self.data[start : self.at]).tolist()
        return [bool(n) for n in numbers] if item == _BOOL else numbers

    def texts(self, count: int) -> list[str]:
        """Many strings: the vocabulary's hot loop, so without a call per field."""
        data, at, end = self.data, self.at, len(self.data)
        size_of = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            if at + 8 > end:
                self.skip(end)
            start = at + 8
            at = start + size_of(data, at)[0]
            if at > end:
                self.skip(end)
            out.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return out


def read_gguf_header(path: Path) -> GgufHeader:
    """The metadata and the tensor table of a GGUF file.

    Raises CheckpointError for a missing file, a bad magic, an unknown version or a truncated
    header. That the tensors' data is all there is checked where it is known how large each type is.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(data, path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _read(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    cursor.skip(4)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        big_endian = version & 0xFFFF == 0
        kind = "big-endian" if big_endian else f"of version {version}"
        raise CheckpointError(f"{path} is a GGUF {kind}; supported are 2 and 3, little-endian.")
    tensor_count, value_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    found = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, not a power of two.")
    start = -(-cursor.at // alignment) * alignment
    tensors = {t.name: GgufTensor(t.name, t.shape, t.kind, start + t.offset) for t in found}
    if len(tensors) != len(found):
        raise CheckpointError(f"{path} names a tensor twice.")
    return GgufHeader(path, metadata, tensors, len(cursor.data))


def _tensor(cursor: _Cursor) -> GgufTensor:
    name = cursor.text()
    rank = cursor.scalar("I")
    if rank > MAX_RANK:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} claims {rank} dimensions.")
    dims = [cursor.scalar("Q") for _ in range(rank)]
    kind = cursor.scalar("I")
    return GgufTensor(name, tuple(reversed(dims)), kind, cursor.scalar("Q"))


# Ends of a turn that files often carry only as a token, not as a metadata field.
_TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|user|>",
)
_CONTROL = 3  # tokenizer.ggml.token_type of a token that is never text


def end_of_text_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: its own end first, then end of turn, then well-known ends."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == _CONTROL}
    found += [control.get(text) for text in _TURN_ENDS]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int)))
