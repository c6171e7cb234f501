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
from detour.loading.quantization import AUTO, Quantization, read_quantization
from detour.loading.safetensors import SafetensorsSource
from detour.loading.scaled import KINDS, ScaledTensor
from detour.loading.scaled_source import ScaledSource
from detour.loading.tensors import ALL, TensorSource


@dataclass(frozen=True)
class Checkpoint:
    """A model's files. Tensor names are Hugging Face's in every format; nothing is read ahead."""

    path: Path
    config: Mapping[str, Any]  # see read_model_config
    quantization: Quantization  # what the configuration says; what is so: see `packed`
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
        dtype: None = as stored; quantised weights are dequantised to float32.

        Raises CheckpointError when the file has no such tensor, or ends inside it.
        """
        self._found(name)
        return self.source.read(name, rows=rows, columns=columns, dtype=dtype)

    def packed(self, name: str) -> str:
        """The packing of a quantised weight ("Q4_1", "NVFP4"); "" where it is plain numbers."""
        self._found(name)
        kind = self.source.kind(name)
        gguf = isinstance(self.source, GgufSource) and kind not in PLAIN
        return kind if gguf or kind in KINDS else ""

    def read_packed(self, name: str, *, rows: slice = ALL) -> PackedTensor:
        """A quantised GGUF weight's bytes, for a backend that computes on them. See `packed`."""
        if not self.packed(name) or not isinstance(self.source, GgufSource):
            raise ValueError(f"{name} is not packed as GGUF packs")
        return self.source.read_packed(name, rows=rows)

    def read_scaled(self, name: str, *, rows: slice = ALL, columns: slice = ALL) -> ScaledTensor:
        """A weight whose packing is in loading.scaled.KINDS, as it lies, or a part of it.

        Raises CheckpointError where `columns` cut through a block that shares a scale.
        """
        if self.packed(name) not in KINDS or not isinstance(self.source, ScaledSource):
            raise ValueError(f"{name} is not packed as small floats with scales")
        return self.source.read_scaled(name, rows=rows, columns=columns)

    def _found(self, name: str) -> tuple[int, ...]:
        try:
            return self.source.shape(name)
        except KeyError:
            raise CheckpointError(f"{self.path} lacks the tensor {name}.") from None


def open_checkpoint(
    path: Path, overrides: Mapping[str, Any] = {}, quantization: str = AUTO
) -> Checkpoint:
    """Opens a model folder (config.json + safetensors) or a `.gguf` file.

    overrides: laid over the configuration, see read_model_config.
    quantization: what the checkpoint is expected to be quantised with, see read_quantization.

    Raises CheckpointError, in a sentence that names file and tensor, for anything missing, cut
    short or unknown; ConfigError where it is not quantised as expected.
    """
    config = read_model_config(path, overrides)
    method = read_quantization(path, config, quantization)
    if path.suffix == ".gguf":
        return Checkpoint(path, config, method, GgufSource(path, config))
    return Checkpoint(path, config, method, ScaledSource(SafetensorsSource(path), path))
