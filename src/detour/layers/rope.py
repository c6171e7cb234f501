"""Rotary position embedding: how fast each pair of dimensions turns, and the angles of a step.

The rotation itself is the op `rope`. Angles are computed once a step, so no table grows with the
context length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detour.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of a checkpoint. Fields that a type does not use hold what changes nothing."""

    kind: str  # one of ROPE_TYPES
    theta: float
    rotated: int  # dimensions of a head that turn; even
    factor: float = 1.0
    original_length: int = 0  # tokens the model was first trained on (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp's ends are whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin


def read_rope(parameters: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    """From a configuration's `rope_parameters` (as loading.model_config normalises them).

    "dynamic" turns as "default" does up to `max_position`, beyond which it would turn cached keys
    anew: a model of that type serves no longer context (`longest_context`).

    Raises CheckpointError naming a type, field or value that is not supported.
    """
    known = dict(parameters)
    kind = known.pop("rope_type")
    theta = known.pop("rope_theta")
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"rope_type {kind!r} is not supported (supported: {', '.join(ROPE_TYPES)})."
        )
    rotated = int(head_dim * _number(known, "partial_rotary_factor", 1.0))
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise CheckpointError(f"rope: {rotated} of {head_dim} dimensions cannot turn in pairs.")
    fields: dict[str, Any] = {}
    if kind != "default":
        fields["factor"] = _number(known, "factor")
        if fields["factor"] < 1:
            raise CheckpointError(f"rope factor must be at least 1, got {fields['factor']}.")
    if kind in ("llama3", "yarn"):
        default = max_position if kind == "yarn" else None
        fields["original_length"] = int(_number(known, "original_max_position_embeddings", default))
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            fields[name] = _number(known, name)
    if kind == "yarn":
        fields |= _read_yarn(known, fields["factor"])
    known.pop("original_max_position_embeddings", None)
    if known := {name: value for name, value in known.items() if value is not None}:
        name, value = next(iter(known.items()))
        raise CheckpointError(
            f"rope parameter {name} = {value!r} is not supported with rope_type {kind!r}."
        )
    return RopeConfig(kind, theta, rotated, **fields)


def _read_yarn(known: dict[str, Any], factor: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "beta_fast": _number(known, "beta_fast", 32.0),
        "beta_slow": _number(known, "beta_slow", 1.0),
    }
    truncate = known.pop("truncate", None)
    fields["truncate"] = truncate is not False
    mscale = _number(known, "mscale", 0.0)
    mscale_all_dim = _number(known, "mscale_all_dim", 0.0)
    given = known.pop("attention_factor", None)
    if given is not None:
        known["attention_factor"] = given
        fields["attention_factor"] = _number(known, "attention_factor")
    elif mscale and mscale_all_dim:
        fields["attention_factor"] = yarn_mscale(factor, mscale) / yarn_mscale(
            factor, mscale_all_dim
        )
    else:
        fields["attention_factor"] = yarn_mscale(factor, 1.0)
    return fields


def _number(known: dict[str, Any], name: str, default: float | None = None) -> float:
    """Take a number out of `known`; a None default means it must be there."""
    value = known.pop(name, None)
    if value is None:
        value = default
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"rope parameter {name} must be a number, got {value!r}.")
    if not math.isfinite(value) or value < 0:
        raise CheckpointError(f"rope parameter {name} must be a positive number, got {value!r}.")
    return float(value)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN (Peng et al. 2023), equation 22 with a weight on the logarithm."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longest_context(rope: RopeConfig, max_position: int) -> int:
    """Tokens the rotation is made for, given the configuration's max_position_embeddings."""
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_length * rope.factor))
    return int(max_position * rope.factor) if rope.kind == "linear" else max_position


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """[rotated / 2] float32: radians each pair of dimensions turns per token."""
    exponents = torch.arange(0, rope.rotated, 2, dtype=torch.float32) / rope.rotated
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: slow pairs are interpolated, fast ones kept, those between blended."""
    turns = rope.original_length * plain / (2 * math.pi)  # over the original length
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """YaRN, section 3.2: the blend runs linearly over dimensions between two numbers of turns."""

    def dimension_with(turns: float) -> float:
        ratio = rope.original_length / (turns * 2 * math.pi)
        return rope.rotated * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotated - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


class Angles:
    """cos and sin of a step's positions."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(rope).to(device)
        self.factor = rope.attention_factor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin: [T, rotated / 2] float32."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1 else (cos * self.factor, sin * self.factor)
