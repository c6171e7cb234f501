"""Quantises a checkpoint file by file: NVFP4 as ModelOpt lays it out, or FP8 in blocks of 128.

Knows shapes and the names that checkpoints give their linear modules; knows no model. What is done
stays done: a run that was killed goes on with the first file that is not whole.
"""

import itertools
import json
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detour.errors import CheckpointError
from detour.loading.model_config import read_json
from detour.loading.quantization import (
    HF_QUANT_CONFIG,
    covering_globs,
    fp8_config,
    hf_quant_config,
    modelopt_config,
)
from detour.loading.safetensors import INDEX, SafetensorsSource
from detour.loading.safetensors_writer import Space, write_safetensors
from detour.loading.scaled import FP8_BLOCK, NVFP4_BLOCK, pack_fp8, pack_nvfp4, unpack_scaled
from detour.loading.scaled_source import ScaledSource
from detour.loading.tensors import ALL, CHUNK_BYTES

FORMS = ("nvfp4", "fp8")
CHOICES = ("auto", "experts", "linears")
STATE = ".quantize.json"  # in the target while it is not finished
_STATE_PART = ".quantize.part"
_CHUNK = (
    1 << 20
)  # bytes of float32 that are packed at once: they and what comes of them stay in cache
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
# wq_b and wk are an indexer's; its weights_proj and every router decide by small differences.
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.wq_b|\.wk)\.weight$")
_NEVER = re.compile(r"\.(weights_proj|eh_proj|gate)\.weight$")
_PAIRS = {"gate_proj": "up_proj", "up_proj": "gate_proj"}


@dataclass(frozen=True)
class Errors:
    """Of some matrices: the sums of squares that their relative error comes from, and the worst."""

    matrices: int = 0
    lost: float = 0.0
    total: float = 0.0
    worst: float = 0.0  # relative error
    where: str = ""  # the module that has it

    @property
    def relative(self) -> float:
        """Root mean square of what was lost, by that of the weights."""
        return math.sqrt(self.lost / self.total) if self.total else 0.0

    def and_those(self, other: "Errors") -> "Errors":
        worse = self if self.worst >= other.worst else other
        return Errors(
            self.matrices + other.matrices,
            self.lost + other.lost,
            self.total + other.total,
            worse.worst,
            worse.where,
        )


@dataclass(frozen=True)
class Job:
    """A checkpoint to quantise. Raises CheckpointError where it is not one that can be."""

    source: Path
    target: Path
    form: str
    chosen: frozenset[str]  # names of the weights that will be packed
    files: Mapping[str, tuple[str, ...]]  # file -> its tensors in order
    tensors: SafetensorsSource
    config: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.entries.values())


def open_job(
    source: Path, target: Path, form: str, choice: str = "auto", ignored: Sequence[str] = ()
) -> Job:
    """choice: which weights: "experts" of routed mixtures, all "linears" of the layers, or "auto":
    experts for nvfp4 where there are any, else linears. ignored: globs of modules to leave out."""
    if source.suffix == ".gguf":
        raise CheckpointError(f"{source} is a GGUF file: only safetensors can be quantised.")
    config = read_json(source / "config.json")
    tensors = SafetensorsSource(source)
    beside = ScaledSource(tensors, source).beside
    if beside or config.get("quantization_config"):
        found = f" ({next(iter(beside))} has scales)" if beside else ""
        raise CheckpointError(f"{source} is quantised already{found}: give the plain checkpoint.")
    shapes = {name: tensors.shape(name) for name in tensors.names}
    layers = int(config.get("num_hidden_layers") or 0)
    chosen = choose(shapes, layers, form, choice, ignored)
    if not chosen:
        what = {"experts": "routed experts"}.get(choice, "linear layers")
        raise CheckpointError(f"{source} has no {what} that {form} can hold: nothing is to do.")
    by_file = itertools.groupby(tensors.names, key=lambda name: tensors.entries[name].path.name)
    files = {file: tuple(names) for file, names in by_file}
    return Job(source, target, form, frozenset(chosen), files, tensors, config)


def choose(
    shapes: Mapping[str, tuple[int, ...]],
    layers: int,
    form: str,
    choice: str,
    ignored: Sequence[str],
) -> list[str]:
    """Names of the weights to pack: matrices of the first `layers` layers, by the modules' names."""

    def can(name: str) -> bool:
        layer = _LAYER.search(name)
        if not layer or int(layer[1]) >= layers or len(shapes[name]) != 2 or _NEVER.search(name):
            return False
        module = name.removesuffix(".weight")
        if any(fnmatchcase(module, pattern) for pattern in ignored):
            return False
        return form != "nvfp4" or shapes[name][1] % NVFP4_BLOCK == 0

    experts = [name for name in shapes if _EXPERT.search(name) and can(name)]
    if choice == "experts" or (choice == "auto" and form == "nvfp4" and experts):
        return experts
    return [name for name in shapes if _LINEAR.search(name) and can(name)]


def run(job: Job, advance: Callable[[int], None]) -> dict[int, Errors]:
    """Quantise, or go on with it; gives the errors by layer. advance: told of bytes read."""
    done = _begin(job)
    for file, names in job.files.items():
        if file not in done:
            done[file] = _write_file(job, file, names, advance)
            _save_state(job, done)
        else:
            advance(sum(job.tensors.nbytes(name) for name in names))
    _finish(job)
    layers: dict[int, Errors] = {}
    for errors in done.values():
        for layer, one in errors.items():
            layers[layer] = layers.get(layer, Errors()).and_those(one)
    return dict(sorted(layers.items()))


# --- one file -------------------------------------------------------------------------------------


def spaces(job: Job, names: Sequence[str]) -> dict[str, Space]:
    """What a file will hold, in order."""
    out: dict[str, Space] = {}
    for name in names:
        shape = job.tensors.shape(name)
        stem = name.removesuffix(".weight")
        if name not in job.chosen:
            out[name] = Space(job.tensors.kind(name), shape)
        elif job.form == "nvfp4":
            out[name] = Space("U8", (shape[0], shape[1] // 2))
            out[f"{stem}.weight_scale"] = Space("F8_E4M3", (shape[0], shape[1] // NVFP4_BLOCK))
            out[f"{stem}.weight_scale_2"] = Space("F32", ())
        else:
            grid = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
            out[name] = Space("F8_E4M3", shape)
            out[f"{stem}.weight_scale_inv"] = Space("F32", grid)
    return out


def _write_file(
    job: Job, file: str, names: Sequence[str], advance: Callable[[int], None]
) -> dict[int, Errors]:
    errors: dict[int, Errors] = {}

    def pieces() -> Iterator[tuple[str, Tensor]]:
        for name, packed in _packed(job, names):
            if packed is None:
                for part in _chunks(job.tensors, name, CHUNK_BYTES, None):
                    yield name, part
            else:
                tensors, error = packed
                layer = _layer(name)
                errors[layer] = errors.get(layer, Errors()).and_those(error)
                yield from tensors
            advance(job.tensors.nbytes(name))

    write_safetensors(job.target / file, spaces(job, names), pieces())
    return errors


Packed = tuple[list[tuple[str, Tensor]], Errors]


def _packed(job: Job, names: Sequence[str]) -> Iterator[tuple[str, Packed | None]]:
    """Every name in order with what stands for it, None for one that stays plain.

    A thread a core works a few matrices ahead, each alone: pieces that fit a cache are too small to
    share, and waiting for each other at every operation costs more than it saves.
    """
    threads = len(os.sched_getaffinity(0))
    ahead: deque[tuple[str, Future[Packed] | None]] = deque()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for name in names:
                chosen = name in job.chosen
                ahead.append((name, pool.submit(_pack, job, name) if chosen else None))
                if len(ahead) > 2 * threads:
                    yield _result(*ahead.popleft())
            while ahead:
                yield _result(*ahead.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


def _result(name: str, future: "Future[Packed] | None") -> tuple[str, Packed | None]:
    return name, None if future is None else future.result()


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def _pack(job: Job, name: str) -> Packed:
    """The tensors that stand for one weight, and what was lost."""
    largest = _largest(job, name) if job.form == "nvfp4" else 0.0
    parts, lost, total = [], 0.0, 0.0
    for part in _chunks(job.tensors, name, _CHUNK, torch.float32):
        if not torch.isfinite(part).all():
            raise CheckpointError(f"{job.source}: tensor {name} holds numbers that are not finite.")
        packed = pack_nvfp4(part, largest) if job.form == "nvfp4" else pack_fp8(part)
        lost += float((unpack_scaled(packed) - part).square().sum(dtype=torch.float64))
        total += float(part.square().sum(dtype=torch.float64))
        parts.append(packed)
    values = torch.cat([part.values for part in parts])
    scales = torch.cat([part.scales for part in parts])
    stem = name.removesuffix(".weight")
    if job.form == "nvfp4":
        more = [(f"{stem}.weight_scale_2", parts[0].of_row[0].clone())]
        out = [(name, values), (f"{stem}.weight_scale", scales), *more]
    else:
        out = [(name, values), (f"{stem}.weight_scale_inv", scales)]
    relative = Errors(1, lost, total).relative
    return out, Errors(1, lost, total, relative, stem)


def _largest(job: Job, name: str) -> float:
    """The largest magnitude of a matrix; of gate and up together, which others fuse."""
    stem, _, last = name.removesuffix(".weight").rpartition(".")
    names = [name]
    partner = f"{stem}.{_PAIRS.get(last, '')}.weight"
    if partner in job.chosen:
        names.append(partner)
    chunks = (chunk for one in names for chunk in _chunks(job.tensors, one, _CHUNK, torch.float32))
    return max(float(chunk.abs().max()) for chunk in chunks)


def _chunks(
    tensors: SafetensorsSource, name: str, nbytes: int, dtype: torch.dtype | None
) -> Iterator[Tensor]:
    """A tensor in pieces of about so many bytes; rows in multiples of FP8_BLOCK."""
    shape = tensors.shape(name)
    if not shape or not shape[0]:
        yield tensors.read(name, dtype=dtype)
        return
    row = tensors.nbytes(name) // shape[0] * (2 if dtype else 1)
    step = max(1, nbytes // max(1, row) // FP8_BLOCK) * FP8_BLOCK
    for start in range(0, shape[0], step):
        yield tensors.read(name, rows=slice(start, start + step), columns=ALL, dtype=dtype)


# --- the folder -----------------------------------------------------------------------------------


def _begin(job: Job) -> dict[str, dict[int, Errors]]:
    """What an earlier run finished. Refuses a folder that holds anything else."""
    target = job.target
    state = target / STATE
    if state.is_file():
        found = read_json(state)
        if found.get("job") != _identity(job):
            raise CheckpointError(
                f"{target} holds the beginning of another quantisation: remove it, or repeat that "
                "one's arguments to go on with it."
            )
        return {
            file: {int(layer): Errors(*values) for layer, values in errors.items()}
            for file, errors in found["done"].items()
            if (target / file).is_file()
        }
    # The part of a state is left by a run that was killed at once.
    ours = target.is_dir() and {file.name for file in target.iterdir()} <= {_STATE_PART}
    if target.exists() and not ours:
        raise CheckpointError(f"{target} is there already: nothing is written over; name another.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target).free
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}.") from error
    need = sum(
        space.nbytes for names in job.files.values() for space in spaces(job, names).values()
    )
    if free < need:
        raise CheckpointError(
            f"{target} has {free / 1e9:.1f} GB free, but the result takes {need / 1e9:.1f} GB."
        )
    _save_state(job, {})
    return {}


def _identity(job: Job) -> dict[str, Any]:
    return {
        "source": str(job.source.resolve()),
        "bytes": job.nbytes,
        "form": job.form,
        "chosen": len(job.chosen),
        "modules": _plain_modules(job),
    }


def _save_state(job: Job, done: Mapping[str, Mapping[int, Errors]]) -> None:
    file = job.target / STATE
    part = job.target / _STATE_PART
    told = {
        name: {layer: astuple(one) for layer, one in errors.items()}
        for name, errors in done.items()
    }
    _write_json(part, {"job": _identity(job), "done": told})
    part.replace(file)


def _finish(job: Job) -> None:
    """The index, the configurations and the files that are no weights; then it is whole."""
    held = {file: spaces(job, names) for file, names in job.files.items()}
    weight_map = {name: file for file, names in held.items() for name in names}
    if len(held) > 1 or next(iter(held)) != "model.safetensors":
        size = sum(space.nbytes for names in held.values() for space in names.values())
        _write_json(
            job.target / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map}
        )
    for file in sorted(job.source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth")
        if file.is_file() and not weights and file.name not in (INDEX, "config.json"):
            shutil.copyfile(file, job.target / file.name)
    if job.form == "nvfp4":
        plain = _plain_modules(job)
        _write_json(job.target / HF_QUANT_CONFIG, hf_quant_config(plain))
        quantization = modelopt_config(plain)
    else:
        quantization = fp8_config(_plain_matrices(job))
    _write_json(job.target / "config.json", {**job.config, "quantization_config": quantization})
    (job.target / STATE).unlink()


def _plain_matrices(job: Job) -> list[str]:
    """Modules with a matrix that stays plain, in the order of the files."""
    stay = (name for name in job.tensors.names if name not in job.chosen)
    matrices = (name for name in stay if len(job.tensors.shape(name)) == 2)
    return [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]


def _plain_modules(job: Job) -> list[str]:
    packed = [name.removesuffix(".weight") for name in job.chosen]
    return covering_globs(_plain_matrices(job), packed)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    try:
        file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror}.") from error
