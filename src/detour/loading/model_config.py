"""A model's configuration as one dict in Hugging Face's vocabulary, whichever format it lies in.

Normalises spellings (rope, dtype, defaults derived from other fields); does not know what any model
supports, that is each model's own to refuse. Reads no weights and needs no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detour.errors import CheckpointError
from detour.gguf_header import end_of_text_ids, read_gguf_header
from detour.loading.gguf_config import config_from_gguf

# What a generation_config.json or a GGUF may recommend to the sampler, under our names for it.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_model_config(path: Path, overrides: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The configuration of a model folder (config.json), of a `.json` file, or of a `.gguf` file.

    overrides: merged into it first, nested dicts recursively (`--json-model-override-args`).

    In the result `rope_parameters` always holds `rope_type` and `rope_theta` (and what else the
    type takes), `dtype` is a string ("" = not said), `num_key_value_heads` and `head_dim` are
    present.

    Raises CheckpointError naming the file and what is missing or invalid in it.
    """
    if path.suffix == ".gguf":
        config, source = config_from_gguf(read_gguf_header(path)), path
    else:
        source = path if path.suffix == ".json" else path / "config.json"
        config = read_json(source)
    config = merge(config, overrides)
    require(config, "model_type", str, source)
    for name in _REQUIRED:
        if require(config, name, int, source) < 1:
            raise CheckpointError(f"{source}: {name} must be at least 1, got {config[name]}.")
    return normalise(config, source)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError says where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no model folder: it has no {path.name}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text.") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}.")
    return value


def require(config: Mapping[str, Any], name: str, kind: type, source: Path | str) -> Any:
    """A field that must be there and of this type (an int serves where a float is asked for)."""
    value = config.get(name)
    if value is None:
        raise CheckpointError(f"{source} lacks the field {name}.")
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{source}: {name} must be {kind.__name__}, got {value!r}.")
    return value


def merge(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `overrides` laid over it, nested objects key by key."""
    merged = dict(config)
    for name, value in overrides.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def normalise(config: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """One spelling for what the ecosystem spells in several ways."""
    out = dict(config)
    heads = out["num_attention_heads"]
    if out.get("num_key_value_heads") is None:
        out["num_key_value_heads"] = heads
    if out.get("head_dim") is None:
        out["head_dim"] = out["hidden_size"] // heads
    dtype = out.pop("torch_dtype", None)
    out["dtype"] = str(out.get("dtype") or dtype or "").removeprefix("torch.")
    out["rope_parameters"] = rope_parameters(out, source)
    out.pop("rope_scaling", None)
    out.pop("rope_theta", None)
    return out


def rope_parameters(config: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """`rope_parameters` from its newer spelling or from rope_theta + rope_scaling.

    Parameters per layer type (a dict of dicts) pass through as they are.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, Mapping) or not isinstance(old, Mapping):
        raise CheckpointError(f"{source}: rope_parameters and rope_scaling must be JSON objects.")
    if new and all(isinstance(value, Mapping) for value in new.values()):
        return dict(new)
    # An override may come in the old spelling over a config in the new one: the old one wins then.
    rope = {**new, **old}
    kind = rope.pop("type", None)
    rope["rope_type"] = old.get("rope_type") or old.get("type") or rope.get("rope_type") or kind
    rope["rope_type"] = rope["rope_type"] or "default"
    theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise CheckpointError(f"{source}: rope_theta must be a positive number, got {theta!r}.")
    rope["rope_theta"] = float(theta)
    partial = config.get("partial_rotary_factor")
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    return rope


def read_generation_defaults(path: Path) -> dict[str, float]:
    """The sampling defaults a model comes with: those of SAMPLING_FIELDS it sets; {} = none."""
    if path.suffix == ".gguf":
        metadata = read_gguf_header(path).metadata
        return {name: metadata[key] for key, name in _GGUF_SAMPLING.items() if key in metadata}
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    given = read_json(file)
    found: dict[str, float] = {}
    for name in SAMPLING_FIELDS:
        if given.get(name) is not None:
            found[name] = require(given, name, int if name == "top_k" else float, file)
    return found


def eos_ids(path: Path) -> tuple[int, ...]:
    """The tokens that end a text, by generation_config.json, else config.json, or the GGUF."""
    if path.suffix == ".gguf":
        return end_of_text_ids(read_gguf_header(path).metadata)
    for name in ("generation_config.json", "config.json"):
        file = path / name
        given = read_json(file).get("eos_token_id") if file.is_file() else None
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(
                f"{file}: eos_token_id must be a number or a list, got {given!r}."
            )
        return tuple(ids)
    return ()
