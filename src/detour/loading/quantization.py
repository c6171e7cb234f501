"""What a checkpoint says of its quantisation: which method, and which modules are in it.

Torch-free. What is read never depends on it: a tensor's own type and scales decide
(scaled_source.py). It refuses methods that are not here, and tells how much weights will take
where there are none to look at.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any

from detour import __version__
from detour.errors import CheckpointError, ConfigError
from detour.loading.model_config import read_json

HF_QUANT_CONFIG = "hf_quant_config.json"
AUTO = "auto"
# ModelOpt's names -> the kind that weights are stored in
_MODELOPT = {
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "W4A8_NVFP4_FP8": "NVFP4",
    "FP8": "FP8_TENSOR",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_CHANNEL",
    "FP8_PB_WO": "FP8_BLOCK",
}
_MIXED = "MIXED_PRECISION"
# compressed-tensors' (type, bits, strategy) -> kind
_COMPRESSED = {
    ("float", 4, "tensor_group"): "NVFP4",
    ("float", 8, "tensor"): "FP8_TENSOR",
    ("float", 8, "channel"): "FP8_CHANNEL",
    ("float", 8, "block"): "FP8_BLOCK",
}
_BLOCKS = (None, [128, 128], "128x128")
_PRODUCER = {"name": "detour", "version": __version__}
METHODS = ("modelopt", "fp8", "compressed-tensors")
# A module of ours -> what engines that fuse it with its neighbours call the whole
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}


@dataclass(frozen=True)
class Rule:
    """Modules that a pattern matches are stored as `kind`."""

    pattern: str
    kind: str


@dataclass(frozen=True)
class Quantization:
    """method: "" = none. The first of `rules` that matches decides, unless one of `ignored` does."""

    method: str = ""
    algorithm: str = ""  # ModelOpt's name for it, "" elsewhere
    rules: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = ()

    def kind(self, module: str) -> str:
        """How a linear module's weight should be stored: a kind of loading.scaled, "" = plain."""
        if matches_any(self.ignored, module):
            return ""
        kinds = (rule.kind for rule in self.rules if matches(rule.pattern, module))
        return next(kinds, "")


def matches(pattern: str, module: str) -> bool:
    """Whether an ignore or target pattern means a module: "re:" and an expression, else a glob.

    A glob is tried on the whole name, on each parent of it, on each of its parts, and on the names
    that engines give to the fused matrix it becomes part of.
    """
    return matches_any((pattern,), module)


def matches_any(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one of the patterns means a module."""
    if "Linear" in patterns and not module.endswith("embed_tokens"):
        return True  # a table is none, though a tied head multiplies by it
    names = [module]
    stem, _, last = module.rpartition(".")
    if last in _FUSED:
        names.append(f"{stem}.{_FUSED[last]}" if stem else _FUSED[last])
    expressions = [pattern[3:] for pattern in patterns if pattern.startswith("re:")]
    if any(re.match(expression, name) for expression in expressions for name in names):
        return True
    return any(_glob(patterns, name) for name in names)


@lru_cache(1 << 14)
def _glob(patterns: tuple[str, ...], name: str) -> bool:
    """Of a name, its parents, or any of their last parts. Tens of thousands of experts share
    their parents, so those are looked at once."""
    parent, _, last = name.rpartition(".")
    match = _compiled(patterns).match
    found = bool(match(last) or match(name))
    return found or (bool(parent) and _glob(patterns, parent))


@lru_cache(64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    globs = [pattern for pattern in patterns if not pattern.startswith("re:")]
    return re.compile("|".join(map(translate, globs)) or r"(?!)")


def read_quantization(path: Path, config: Mapping[str, Any], wish: str = AUTO) -> Quantization:
    """What config.json's quantization_config and hf_quant_config.json say.

    wish: `--quantization`. Raises CheckpointError for a method that is not here, ConfigError where
    the wish and the checkpoint disagree.
    """
    given = config.get("quantization_config") or config.get("compression_config") or {}
    file = path / HF_QUANT_CONFIG
    beside = read_json(file) if path.is_dir() and file.is_file() else {}
    source = f"{path / 'config.json'}: quantization_config"
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{source} must be a JSON object, got {given!r}.")
    found = _read(given, source) if given else Quantization()
    if beside:
        second = _modelopt(_flat(beside), str(file))
        if found.method and found.algorithm != second.algorithm:
            raise CheckpointError(
                f"{source} says {found.algorithm or found.method}, but {HF_QUANT_CONFIG} beside it "
                f"says {second.algorithm}: remove the one that is wrong."
            )
        found = second
    _check_wish(found, wish, path)
    return found


def _check_wish(found: Quantization, wish: str, path: Path) -> None:
    if wish == AUTO:
        return
    if wish in _answering(found):
        return
    if not found.method:
        raise ConfigError(
            f"--quantization {wish}: {path} says nothing of a quantisation; leave the flag out, or "
            "make a quantised checkpoint with detour quantize.",
            param="quantization",
        )
    told = f"{found.method} {found.algorithm}".strip()
    raise ConfigError(
        f"--quantization {wish}: {path} is quantised with {told}; leave the flag out.",
        param="quantization",
    )


def _answering(found: Quantization) -> set[str]:
    """The values of `--quantization` that mean this."""
    if found.method != "modelopt":
        return {found.method}
    kinds = {rule.kind for rule in found.rules}
    fp4 = {"modelopt_fp4"} if "NVFP4" in kinds else set()
    return {"modelopt"} | fp4 | ({"modelopt_fp8"} if kinds - {"NVFP4"} else set())


def _read(given: Mapping[str, Any], source: str) -> Quantization:
    flat = _flat(given)
    method = str(flat.get("quant_method") or "").lower()
    if method.startswith("modelopt") or (not method and "quant_algo" in flat):
        return _modelopt(flat, source)
    if method == "fp8":
        return _fp8(flat, source)
    if method == "compressed-tensors":
        return _compressed(flat, source)
    raise CheckpointError(
        f"{source} has quant_method = {flat.get('quant_method')!r}, which is not supported "
        f"(supported: {', '.join(METHODS)})."
    )


def _flat(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """hf_quant_config.json keeps everything one level down, and so do some config.json."""
    inner = given.get("quantization")
    return {**given, **inner} if isinstance(inner, Mapping) else given


def _modelopt(flat: Mapping[str, Any], source: str) -> Quantization:
    algorithm = str(flat.get("quant_algo") or "")
    ignored = _strings(flat, ("ignore", "exclude_modules"), source)
    rules: tuple[Rule, ...] = ()
    if algorithm == _MIXED:
        layers = flat.get("quantized_layers")
        if not isinstance(layers, Mapping) or not layers:
            raise CheckpointError(f"{source} says {_MIXED}, but lacks quantized_layers.")
        rules = tuple(
            Rule(str(name), _modelopt_kind((layer or {}).get("quant_algo"), source))
            for name, layer in layers.items()
        )
    elif algorithm or not flat.get("kv_cache_quant_algo"):  # else only the KV cache is meant
        rules = (Rule("Linear", _modelopt_kind(algorithm, source)),)
    size = flat.get("group_size", 16)
    if size not in (0, 16, None) and any(rule.kind == "NVFP4" for rule in rules):
        raise CheckpointError(f"{source} has group_size = {size!r}, but NVFP4's is 16.")
    return Quantization("modelopt", algorithm, rules, ignored)


def _modelopt_kind(algorithm: Any, source: str) -> str:
    if algorithm not in _MODELOPT:
        raise CheckpointError(
            f"{source} has quant_algo = {algorithm!r}, which is not supported (supported: "
            f"{', '.join(_MODELOPT)}, {_MIXED})."
        )
    return _MODELOPT[algorithm]


def _fp8(flat: Mapping[str, Any], source: str) -> Quantization:
    form = flat.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"{source} has fmt = {form!r}, which is not supported (only e4m3).")
    block = flat.get("weight_block_size")
    if block is not None and list(block) != [128, 128]:
        raise CheckpointError(
            f"{source} has weight_block_size = {block!r}, which is not supported (only [128, 128])."
        )
    ignored = _strings(flat, ("modules_to_not_convert", "ignored_layers", "ignore"), source)
    rule = Rule("Linear", "FP8_BLOCK" if block is not None else "FP8_TENSOR")
    # Tables and the head are plain in every such release, whether they are listed or not.
    return Quantization("fp8", "", (rule,), (*ignored, "lm_head"))


def _compressed(flat: Mapping[str, Any], source: str) -> Quantization:
    transforms = flat.get("transform_config") or {}
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise CheckpointError(
            f"{source} has a transform_config: weights that were rotated are not supported."
        )
    sparsity = flat.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise CheckpointError(
            f"{source} has sparsity_config.format = {sparsity['format']!r}, which is not supported."
        )
    groups = flat.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{source} lacks config_groups.")
    rules = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not weights:
            continue
        form = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
        whole = (weights.get("group_size"), weights.get("block_structure"))
        if form not in _COMPRESSED or whole[0] not in (None, 16) or whole[1] not in _BLOCKS:
            raise CheckpointError(
                f"{source}: config_groups.{name} packs weights as {form[1]}-bit {form[0]} by "
                f"{form[2]}, which is not supported (supported: 4-bit float by tensor_group of 16; "
                "8-bit float by tensor, channel or block of 128)."
            )
        targets = _strings(group, ("targets",), f"{source}: config_groups.{name}")
        rules += [Rule(target, _COMPRESSED[form]) for target in targets or ("Linear",)]
    # A target that names modules says more than one that names all of a class.
    rules.sort(key=lambda rule: rule.pattern == "Linear")
    ignored = _strings(flat, ("ignore",), source)
    return Quantization("compressed-tensors", "", tuple(rules), ignored)


def _strings(given: Mapping[str, Any], names: Sequence[str], source: str) -> tuple[str, ...]:
    for name in names:
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise CheckpointError(f"{source}: {name} must be a list of texts, got {value!r}.")
        return tuple(value)
    return ()


# --- writing --------------------------------------------------------------------------------------


def modelopt_config(plain: Sequence[str]) -> dict[str, Any]:
    """quantization_config of NVFP4 weights without calibrated activations; plain: ignored globs."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": list(plain),
        "producer": _PRODUCER,
    }


def hf_quant_config(plain: Sequence[str]) -> dict[str, Any]:
    """The same in the file that ModelOpt puts beside the configuration."""
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": list(plain),
        },
    }


def fp8_config(plain: Sequence[str]) -> dict[str, Any]:
    """quantization_config as the FP8 releases have it; plain: whole names, as others match them."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(plain),
    }


def covering_globs(plain: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Globs that match every plain module and no packed one, each as short as can be."""
    above = {prefix for name in packed for prefix in _prefixes(name)}
    found: dict[str, None] = {}
    for module in plain:
        prefix = next(prefix for prefix in _prefixes(module) if prefix not in above)
        found[prefix if prefix == module else f"{prefix}.*"] = None
    return list(found)


def _prefixes(module: str) -> Iterator[str]:
    """ "a", "a.b", "a.b.c" of "a.b.c"."""
    return itertools.accumulate(module.split("."), lambda left, right: f"{left}.{right}")
