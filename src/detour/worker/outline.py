"""A model as it would be on one rank, without its weights: what they take, and every route.

Built from the configuration and the kinds of the tensors: those of the files where they are there,
else those that the configuration announces. Allocates nothing, so the device need not be here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from detour.layers.weight import Kinds, Parameter, Site
from detour.loading.checkpoint import open_checkpoint
from detour.loading.model_config import read_model_config
from detour.loading.quantization import Quantization, read_quantization
from detour.models import find
from detour.models.model import Model
from detour.ops.device import Device
from detour.ops.route import Routes
from detour.ops.sampling import draw, greedy
from detour.parallel.group import Group
from detour.worker.build import choose_dtype, choose_kv_dtype
from detour.worker.kv_cache import bytes_per_token
from detour.worker.settings import WorkerSettings

# By what its module is called, in this order: the part of the model a weight belongs to.
PARTS = (
    ("embed_tokens", "embedding"),
    ("lm_head", "output head"),
    (".indexer.", "indexer"),
    (".self_attn.", "attention"),
    (".mlp.experts.", "routed experts"),
    (".mlp.shared_expert", "shared expert"),
    (".mlp.gate.", "router"),
    (".mlp.", "dense blocks"),
    ("", "norms"),
)
_KINDS = {"float32": "F32", "float16": "F16"}


@dataclass(frozen=True)
class Weight:
    """One parameter of the rank."""

    part: str  # of PARTS
    parameter: Parameter
    form: str  # a packing or a dtype
    nbytes: int


@dataclass(frozen=True)
class Outline:
    config: Mapping[str, Any]  # of the whole model
    ranks: int
    device: Device
    dtype: torch.dtype
    model: Model
    routes: Routes
    weights: tuple[Weight, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.model.kv_spec)


def outline(settings: WorkerSettings, device: Device, ranks: int = 1) -> Outline:
    """The first of so many ranks. Raises CheckpointError and ConfigError."""
    config = read_model_config(settings.model, settings.overrides)
    method = read_quantization(settings.model, config, settings.quantization)
    dtype = choose_dtype(settings.dtype, str(config.get("dtype") or ""), device)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
    routes = Routes(device, settings.backends, settings.strict_backends)
    nowhere = replace(device, torch_device=torch.device("meta"))
    site = Site(nowhere, dtype, routes, Group(0, ranks))
    architecture = find(config)
    model: Model = architecture.build(architecture.read(config), site, kv_dtype)
    source = _kinds(settings, config, method)
    expected = [(one, one.expect(source, site)) for one in site.parameters]
    need = {"dtype": torch.float32, "vocab_size": model.vocab_size}
    for op in (draw, greedy):
        routes.route(op, need)
    weights = (Weight(_part(one), one, form, nbytes) for one, (form, nbytes) in expected)
    return Outline(config, ranks, device, dtype, model, routes, tuple(weights))


def _part(parameter: Parameter) -> str:
    name = parameter.pieces[0].name
    return next(part for mark, part in PARTS if mark in name)


class _Announced:
    """Kinds of tensors that are not there: what the configuration says of them."""

    def __init__(self, method: Quantization, plain: str) -> None:
        self.method = method
        self.plain = plain

    def kind(self, name: str) -> str:
        return self.method.kind(name.removesuffix(".weight")) or self.plain


def _kinds(settings: WorkerSettings, config: Mapping[str, Any], method: Quantization) -> Kinds:
    if settings.load_format != "dummy" and has_weights(settings.model):
        return open_checkpoint(settings.model, settings.overrides, settings.quantization).source
    if settings.load_format == "dummy":
        return _Announced(method, "")  # each in the dtype it computes in
    return _Announced(method, _KINDS.get(str(config.get("dtype")), "BF16"))


def has_weights(path: Path) -> bool:
    return path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors")))
