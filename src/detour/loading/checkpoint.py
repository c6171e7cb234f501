"""Opens a model folder or a `.gguf`: its configuration and its tensors under one set of names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from detour.errors import CheckpointError
from detour.loading.gguf import PLAIN, GgufSource
from detour.loading.model_config import read_model_config
from detour.loading.packing import PackedTensor
from detour.loading.safetensors import SafetensorsSource
from detour.loading.tensors import ALL, TensorSource


@dataclass(frozen=True)
class Checkpoint:
    """A model's files. Tensor names are Hugging Face's in every format; nothing is read ahead."""

    path: Path
    config: Mapping[str, Any]  # see read_model_config
    quantization: Mapping[str, Any]  # quantization_config; {} = none. GGUF: see `packed`
    source: TensorSource

    @property
    def names(self) -> Sequence[str]:
        """Every tensor, in the order in which reading them is fastest."""
        return self.source.names

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        return sum(self.source.nbytes(name) for name in self.source.names)

    def __contains__(self, name: str) -> bool:
        try:
            self.source.shape(name)
        except KeyError:
            return False
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found(name)

    def read(
        self,
        name: str,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor, or the part of it that one rank needs, on the CPU.

        rows, columns: contiguous parts of the first and second dimension.
        dtype: None = as stored; quantised GGUF weights are dequantised to float32.

        Raises CheckpointError when the file has no such tensor, or ends inside it.
        """
        self._found(name)
        return self.source.read(name, rows=rows, columns=columns, dtype=dtype)

    def packed(self, name: str) -> str:
        """The kind of packing of a quantised GGUF weight ("Q4_1"); "" where it is plain numbers."""
        self._found(name)
        kind = self.source.kind(name)
        return kind if isinstance(self.source, GgufSource) and kind not in PLAIN else ""

    def read_packed(self, name: str, *, rows: slice = ALL) -> PackedTensor:
        """A quantised GGUF weight's bytes, for a backend that computes on them. See `packed`."""
        if not self.packed(name) or not isinstance(self.source, GgufSource):
            raise ValueError(f"{name} is not packed")
        return self.source.read_packed(name, rows=rows)

    def _found(self, name: str) -> tuple[int, ...]:
        try:
            return self.source.shape(name)
        except KeyError:
            raise CheckpointError(f"{self.path} lacks the tensor {name}.") from None


def open_checkpoint(path: Path, overrides: Mapping[str, Any] = {}) -> Checkpoint:
    """Opens a model folder (config.json + safetensors) or a `.gguf` file.

    overrides: laid over the configuration, see read_model_config.

    Raises CheckpointError, in a sentence that names file and tensor, for anything missing, cut
    short or unknown.
    """
    config = read_model_config(path, overrides)
    quantization = config.get("quantization_config") or {}
    source: TensorSource
    source = GgufSource(path, config) if path.suffix == ".gguf" else SafetensorsSource(path)
    return Checkpoint(path, config, quantization, source)
