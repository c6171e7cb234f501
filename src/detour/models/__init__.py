"""A checkpoint's model_type to the module of that name.

Adding a model is adding a file; this module only finds it.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from detour.errors import CheckpointError
from detour.layers.weight import Site
from detour.loading.model_config import normalise
from detour.ops.device import probe
from detour.ops.route import Routes

_NOT_MODELS = {"decoder", "fields", "model"}


def supported() -> list[str]:
    """Every model_type that can be served."""
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(names - _NOT_MODELS)


def find(config: Mapping[str, Any]) -> ModuleType:
    """The module (a model.Architecture) for a configuration's model_type."""
    name = config.get("model_type")
    if name not in supported():
        raise CheckpointError(
            f"model_type {name!r} is not supported (supported: {', '.join(supported())})."
        )
    return importlib.import_module(f"{__name__}.{name}")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this configuration (as in config.json) holds, by shape."""
    architecture = find(config)
    config = normalise(config, "configuration")
    device = probe("cpu")
    site = Site(device, torch.float32, Routes(device, {}, strict=False))
    architecture.build(architecture.read(config), site, torch.float32)
    return {piece.name: piece.shape for piece in site.pieces()}
