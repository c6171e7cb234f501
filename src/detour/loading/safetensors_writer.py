"""Writes one safetensors file tensor by tensor: shapes first, then the numbers as they come.

The memory held is one piece of one tensor. A file is whole or absent: it gets its name at the end.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from detour.errors import CheckpointError
from detour.loading.safetensors import DTYPES


class Space(NamedTuple):
    """What a tensor takes in the file."""

    kind: str  # a key of safetensors.DTYPES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.kind].itemsize


def write_safetensors(
    path: Path, spaces: Mapping[str, Space], pieces: Iterable[tuple[str, Tensor]]
) -> None:
    """spaces: every tensor, in the order of the file. pieces: their numbers in that order; a
    tensor may come in several pieces, cut along its first dimension.

    Raises CheckpointError where the disk refuses, ValueError where pieces do not fill the spaces.
    """
    part = path.with_suffix(".part")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, space in spaces.items():
        ends = [offset, offset + space.nbytes]
        header[name] = {"dtype": space.kind, "shape": list(space.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for piece in _in_order(spaces, pieces):
                numbers = piece.contiguous().view(-1).view(torch.uint8).numpy()
                file.write(numbers.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error


def _in_order(
    spaces: Mapping[str, Space], pieces: Iterable[tuple[str, Tensor]]
) -> Iterator[Tensor]:
    """Every piece, once it is clear that it goes where the header says."""
    wanted = iter(spaces.items())
    name, left = "", 0
    for given, piece in pieces:
        while not left and given != name:
            name, space = next(wanted, ("", Space("U8", ())))
            left = space.nbytes
        if given != name or DTYPES[spaces[name].kind] != piece.dtype or piece.nbytes > left:
            raise ValueError(f"{given} does not fit where {name or 'the end'} is expected")
        left -= piece.nbytes
        yield piece
    if left or any(space.nbytes for _, space in wanted):
        raise ValueError(f"{name} or one of those after it was not given")
