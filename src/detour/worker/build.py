"""Settings to a model with its weights: choose device and dtype, read or make up the parameters."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from detour.errors import ConfigError
from detour.layers.weight import Site
from detour.loading.checkpoint import open_checkpoint
from detour.loading.model_config import read_model_config
from detour.loading.quantization import read_quantization
from detour.models import find
from detour.models.model import Model
from detour.ops.device import Device, probe
from detour.ops.route import Routes
from detour.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to run, and where it was built."""

    model: Model
    site: Site

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.site.parameters)


def build_model(settings: WorkerSettings) -> BuiltModel:
    """Raises CheckpointError (files, configuration) and ConfigError (settings)."""
    device = choose_device(settings.device)
    dummy = settings.load_format == "dummy"
    if dummy:
        config: Mapping[str, Any] = read_model_config(settings.model, settings.overrides)
        method = read_quantization(settings.model, config, settings.quantization)
    else:
        checkpoint = open_checkpoint(settings.model, settings.overrides, settings.quantization)
        config, method = checkpoint.config, checkpoint.quantization
    dtype = choose_dtype(settings.dtype, str(config.get("dtype") or ""), device)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
    routes = Routes(device, settings.backends, settings.strict_backends)
    even = settings.even_routing
    site = Site(device, dtype, routes, expected=method.kind, even_routing=even)
    architecture = find(config)
    model: Model = architecture.build(architecture.read(config), site, kv_dtype)
    total = sum(parameter.numel for parameter in site.parameters)
    with torch.inference_mode(), _Loading(total, settings) as advance:
        if dummy:
            site.fill(settings.seed, advance)
        else:
            site.load(checkpoint, model.ignored, advance)
    return BuiltModel(model, site)


def choose_device(name: str) -> Device:
    """ "auto": the first GPU if there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"There is no device called {name!r}.", param="device") from error
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {name!r}.", param="device")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not there: this machine has {torch.cuda.device_count()} GPUs that "
            "torch can use.",
            param="device",
        )
    return probe(name)


def choose_dtype(wish: str, checkpoint: str, device: Device) -> torch.dtype:
    """The dtype of activations, and of weights that are plain numbers.

    auto: a GPU computes in the checkpoint's dtype (bfloat16 where it does not say). A CPU computes
    in bfloat16 only where it has instructions for it; elsewhere that would be slower than float32.
    """
    if wish != "auto":
        return named_dtype(wish)
    if device.is_cuda:
        return DTYPES.get(checkpoint, torch.bfloat16)
    fast = {"avx512_bf16", "amx"} & device.instructions
    return torch.bfloat16 if fast and checkpoint != "float32" else torch.float32


def choose_kv_dtype(wish: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values, or latents, are cached in. fp8_e4m3 of latents is packed rows."""
    if wish == "fp8_e4m3":
        return torch.float8_e4m3fn
    return dtype if wish == "auto" else named_dtype(wish)


def named_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}.", param="dtype")
    return DTYPES[name]


class _Loading:
    """A bar on a terminal, else one line in the log. Entered, it gives what advances it."""

    def __init__(self, total: int, settings: WorkerSettings) -> None:
        self.total = total
        self.what = f"weights of {settings.model.name}"
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            disable=not (settings.progress and sys.stderr.isatty()),
            transient=True,
        )

    def __enter__(self) -> Callable[[int], None]:
        self.bar.start()
        task = self.bar.add_task(self.what, total=self.total)
        return lambda amount: self.bar.advance(task, amount)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.bar.stop()
        if kind is None:
            log.info("%s loaded: %s million parameters", self.what, f"{self.total / 1e6:,.1f}")
