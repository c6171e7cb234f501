"""The tensors of a checkpoint with every quantised weight and its scales as one tensor.

A weight's own element type and the scales beside it decide how it is packed: no name of a module
and no configuration does, so an expert may be quantised while its neighbour is not.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from detour.errors import CheckpointError
from detour.loading.scaled import (
    FP8_BLOCK,
    NVFP4_BLOCK,
    ScaledTensor,
    column_block,
    scale_rows,
    unpack_scaled,
)
from detour.loading.tensors import ALL, CHUNK_BYTES, TensorSource, span

log = logging.getLogger(__name__)

# What may lie beside a module's weight: other spellings of it, its scales, things that change it.
PACKED = "weight_packed"
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
# Scales of activations are for kernels that compute in few bits; here activations stay wide.
UNUSED = ("input_scale", "input_global_scale", "output_scale", "activation_scale")
KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")
UNKNOWN = (
    *("weight_zero_point", "weight_g_idx", "weight_shape", "qweight", "qzeros", "g_idx"),
    *("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "absmax", "quant_map"),
)
_COMPANIONS = frozenset((PACKED, *SCALES, *UNUSED, *UNKNOWN))
_FLOATS = ("F64", "F32", "F16", "BF16")
_PLAIN = (*_FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")
KNOWN = "NVFP4 (uint8 with e4m3 scales for 16) and FP8 (e4m3 by tensor, channel or block of 128)"


class Stored(NamedTuple):
    """How one weight lies: its kind ("" = plain), shape, and the names of the tensors it is of."""

    kind: str
    shape: tuple[int, ...]
    values: str
    scales: str = ""
    factor: str = ""  # NVFP4's float32 scale, or one divided by it


class ScaledSource:
    """A TensorSource over another one, whose names are those of an unquantised checkpoint.

    Raises CheckpointError naming the tensor, when a weight is asked for, where a scale is missing
    or of a wrong shape, or the packing is unknown.
    """

    def __init__(self, source: TensorSource, path: Path) -> None:
        self.source = source
        self.path = path
        self.stored: dict[str, Stored] = {}
        self.beside: dict[str, list[str]] = {}  # module -> last parts of its weight's companions
        own: list[str] = []
        ignored = 0
        for name in source.names:
            module, _, last = name.rpartition(".")
            if last in KV_SCALES:
                ignored += 1
            elif last in _COMPANIONS and module:
                self.beside.setdefault(module, []).append(last)
                own += [f"{module}.weight"] if last == PACKED else []
            else:
                own.append(name)
        if ignored:
            log.info("%s holds %d scales for a KV cache, which are not used", path, ignored)
        self.weights = dict.fromkeys(own)
        self.all = frozenset(source.names)
        self.orphans = [
            f"{module}.{last}"
            for module, lasts in self.beside.items()
            if f"{module}.weight" not in self.weights
            for last in lasts
        ]

    @property
    def names(self) -> Sequence[str]:
        return [*self.weights, *self.orphans]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def kind(self, name: str) -> str:
        stored = self._stored(name)
        return stored.kind or self.source.kind(stored.values)

    def nbytes(self, name: str) -> int:
        module, _, last = name.rpartition(".")
        beside = self.beside.get(module, []) if last == "weight" else []
        names = [f"{module}.{one}" for one in beside]
        names += [name] if name in self.all else []
        return sum(self.source.nbytes(one) for one in names)

    def read(
        self,
        name: str,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """dtype: None = as stored; a quantised weight is expanded, to float32 then."""
        stored = self._stored(name)
        if not stored.kind:
            return self.source.read(stored.values, rows=rows, columns=columns, dtype=dtype)
        start, stop = span(rows, stored.shape[0])
        first, last = span(columns, stored.shape[1])
        out = torch.empty(stop - start, last - first, dtype=dtype or torch.float32)
        step = max(1, CHUNK_BYTES // (4 * stored.shape[1]))
        for at in range(start, stop, step):
            end = min(at + step, stop)
            part = unpack_scaled(self.read_scaled(name, rows=slice(at, end)))
            out[at - start : end - start] = part[:, first:last]
        return out

    def read_scaled(self, name: str, *, rows: slice = ALL, columns: slice = ALL) -> ScaledTensor:
        """A quantised weight, or some rows and columns of it, as it lies.

        Raises CheckpointError where `columns` cut through a block that shares a scale.
        """
        stored = self._stored(name)
        start, stop = span(rows, stored.shape[0])
        first, last = span(columns, stored.shape[1])
        block = column_block(stored.kind)
        if block and (first % block or (last % block and last != stored.shape[1])):
            raise CheckpointError(
                f"{self.path}: tensor {name} has a scale for each {block} columns, so it cannot be "
                f"cut into columns {first} to {last}: share the model among fewer ranks."
            )
        shape = (stop - start, last - first)
        if stored.kind == "NVFP4":
            return self._nvfp4(stored, shape, slice(start, stop), (first, last))
        values = self.source.read(
            stored.values,
            rows=slice(start, stop),
            columns=_cut(first, last, stored.shape[1]),
            dtype=None,
        )
        scales = self._scales(stored)
        sharing = {"FP8_TENSOR": stored.shape[0], "FP8_CHANNEL": 1}.get(stored.kind, FP8_BLOCK)
        scales = scales[start // sharing : -(-stop // sharing)]
        if stored.kind == "FP8_BLOCK":
            scales = scales[:, first // FP8_BLOCK : -(-last // FP8_BLOCK)]
        return ScaledTensor(
            stored.kind, shape, values, scales.contiguous(), scale_rows(shape[0], sharing, start)
        )

    def _nvfp4(
        self, stored: Stored, shape: tuple[int, int], rows: slice, span: tuple[int, int]
    ) -> ScaledTensor:
        first, last = span
        width = stored.shape[1]
        values, scales = (
            self.source.read(
                name,
                rows=rows,
                columns=_cut(first // each, last // each, width // each),
                dtype=None,
            )
            for name, each in ((stored.values, 2), (stored.scales, NVFP4_BLOCK))
        )
        factor = self.source.read(stored.factor, rows=ALL, columns=ALL, dtype=torch.float32)
        if stored.factor.endswith("weight_global_scale"):
            factor = 1 / factor  # compressed-tensors keeps what weights were multiplied with
        return ScaledTensor("NVFP4", shape, values, scales, factor.reshape(1).repeat(shape[0]))

    def _scales(self, stored: Stored) -> Tensor:
        """FP8's scales as [s, t] float32."""
        scales = self.source.read(stored.scales, rows=ALL, columns=ALL, dtype=torch.float32)
        wide = -(-stored.shape[1] // FP8_BLOCK) if stored.kind == "FP8_BLOCK" else 1
        return scales.reshape(-1, wide)

    def _stored(self, name: str) -> Stored:
        if name not in self.stored:
            if name not in self.weights and name not in self.orphans:
                raise KeyError(name)
            self.stored[name] = self._found(name)
        return self.stored[name]

    def _found(self, name: str) -> Stored:
        module, _, last = name.rpartition(".")
        beside = set(self.beside.get(module, ())) if last == "weight" else set()
        scales = beside.intersection(SCALES)
        values = f"{module}.{PACKED}" if PACKED in beside else name
        kind, shape = self.source.kind(values), self.source.shape(values)
        changed = sorted(beside.intersection(UNKNOWN))
        if changed:
            raise self._unknown(values, kind, f"{module}.{changed[0]} lies beside it")
        if last != "weight" and kind in _PLAIN:
            return Stored("", shape, name)
        if kind in _FLOATS and PACKED not in beside:
            if scales:
                raise self._unknown(values, kind, f"{module}.{min(scales)} lies beside it")
            return Stored("", shape, name)
        if kind == "U8" and len(shape) == 2:
            return self._found_nvfp4(module, values, shape)
        if kind == "F8_E4M3" and len(shape) == 2 and last == "weight":
            return self._found_fp8(module, values, shape, scales)
        raise self._unknown(values, kind)

    def _found_nvfp4(self, module: str, values: str, shape: tuple[int, ...]) -> Stored:
        packed = values.endswith(PACKED)
        factor = f"{module}.{'weight_global_scale' if packed else 'weight_scale_2'}"
        scales = f"{module}.weight_scale"
        for needed in (scales, factor):
            self._demand(values, needed)
        if self.source.kind(scales) != "F8_E4M3":
            raise self._unknown(values, "U8", f"{scales} is {self.source.kind(scales)}")
        whole = (shape[0], shape[1] * 2)
        self._expect(scales, (shape[0], whole[1] // NVFP4_BLOCK), values)
        if math.prod(self.source.shape(factor)) != 1:
            raise self._wrong_shape(factor, [], values)
        return Stored("NVFP4", whole, values, scales, factor)

    def _found_fp8(
        self, module: str, values: str, shape: tuple[int, ...], found: set[str]
    ) -> Stored:
        if not found:
            self._demand(values, f"{module}.weight_scale_inv or {module}.weight_scale")
        if len(found) > 1 or not found <= {"weight_scale_inv", "weight_scale"}:
            raise self._unknown(values, "F8_E4M3", f"beside it lie {', '.join(sorted(found))}")
        scales = f"{module}.{found.pop()}"
        if self.source.kind(scales) not in ("F32", "BF16", "F16", "F8_E8M0"):
            raise self._unknown(values, "F8_E4M3", f"{scales} is {self.source.kind(scales)}")
        rows, columns = shape
        given = tuple(size for size in self.source.shape(scales) if size > 1)
        grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        if not given and (grid != (1, 1) or scales.endswith("weight_scale")):
            return Stored("FP8_TENSOR", (rows, columns), values, scales)
        if given == (rows,) and self.source.shape(scales)[0] == rows:
            return Stored("FP8_CHANNEL", (rows, columns), values, scales)
        if given == tuple(size for size in grid if size > 1):
            return Stored("FP8_BLOCK", (rows, columns), values, scales)
        raise self._wrong_shape(scales, list(grid), values)

    def _demand(self, values: str, needed: str) -> None:
        if needed not in self.all:
            raise CheckpointError(
                f"{self.path}: tensor {values} is quantised ({self.source.kind(values)}), but its "
                f"scale {needed} is missing."
            )

    def _expect(self, scales: str, shape: tuple[int, int], values: str) -> None:
        if self.source.shape(scales) != shape:
            raise self._wrong_shape(scales, list(shape), values)

    def _wrong_shape(self, scales: str, wanted: list[int], values: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: tensor {scales} has shape {list(self.source.shape(scales))}, but "
            f"{values} of {list(self.source.shape(values))} {self.source.kind(values)} asks for "
            f"{wanted}."
        )

    def _unknown(self, values: str, kind: str, why: str = "") -> CheckpointError:
        told = f" ({why})" if why else ""
        return CheckpointError(
            f"{self.path}: tensor {values} of {kind}{told} is packed in a way that is not "
            f"supported; supported are {KNOWN}."
        )


def _cut(first: int, last: int, size: int) -> slice:
    """Columns first..last; all of them as ALL, which is read without a copy."""
    return ALL if (first, last) == (0, size) else slice(first, last)
