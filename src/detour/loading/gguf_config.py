"""GGUF metadata in Hugging Face's words: which architecture, and each field's other name.

Torch-free. Tensor names are `gguf_names`'s part.
"""

import math
import mmap
import struct
from typing import Any

from detour.errors import CheckpointError
from detour.gguf_header import GgufHeader

# GGUF architecture -> checkpoint model_type
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

# our field -> GGUF key inside the architecture's section
_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_F32 = 0


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """The Hugging Face style configuration that this GGUF's metadata amounts to.

    Raises CheckpointError for an architecture or a value that would change the computation and has
    no counterpart.
    """
    if header.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: the GGUF architecture {header.architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}."
        )
    config: dict[str, Any] = {"model_type": ARCHITECTURES[header.architecture]}
    for ours, key in _FIELDS.items():
        value = header.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{header.path}: {key} differs between layers: not supported."
                )
            value = value[0]
        if value is not None:
            config[ours] = value
    if "rms_norm_eps" in config:  # written as float32: 9.999999747378752e-06 stands for 1e-05
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    config["hidden_act"] = "silu"
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["vocab_size"] = _vocab_size(header)
    _refuse_unequal_heads(header, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if header.architecture == "llama" and config.get("num_experts"):
        config["model_type"] = "mixtral"
    if header.architecture == "qwen3moe":
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    config["rope_parameters"] = _rope(header, config)
    for ours, key in (
        ("bos_token_id", "bos"),
        ("eos_token_id", "eos"),
        ("pad_token_id", "padding"),
    ):
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[ours] = token
    return config


def _vocab_size(header: GgufHeader) -> int:
    if "token_embd.weight" in header.tensors:
        return header.tensors["token_embd.weight"].shape[0]
    tokens = header.metadata.get("tokenizer.ggml.tokens", ())
    return int(header.get("vocab_size", len(tokens)))


def _refuse_unequal_heads(header: GgufHeader, config: dict[str, Any]) -> None:
    key, value = header.get("attention.key_length"), header.get("attention.value_length")
    if key != value and None not in (key, value):
        raise CheckpointError(
            f"{header.path}: keys of {key} and values of {value} dimensions a head are not "
            "supported."
        )


def _rope(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(header.get("rope.freq_base", 10000.0)),
    }
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    rotated = header.get("rope.dimension_count", head_dim)
    if head_dim and rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor", header.get("rope.scale_linear"))
    if kind == "none" and header.get("rope.scale_linear"):
        kind = "linear"
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = header.get(
            "rope.scaling.original_context_length"
        )
        for ours, key in (
            ("attention_factor", "rope.scaling.yarn_attn_factor"),
            ("beta_fast", "rope.scaling.yarn_beta_fast"),
            ("beta_slow", "rope.scaling.yarn_beta_slow"),
        ):
            if header.get(key) is not None:
                rope[ours] = header.get(key)
    elif kind != "none":
        raise CheckpointError(f"{header.path}: rope scaling {kind!r} is not supported.")
    if "rope_freqs.weight" in header.tensors:
        rope |= _llama3_scaling(header, rope["rope_theta"], rotated)
    return rope


def _llama3_scaling(header: GgufHeader, theta: float, dim: int) -> dict[str, Any]:
    """The llama3 rope parameters behind `rope_freqs.weight`.

    GGUF keeps what the scaling does (a divisor per frequency) instead of its parameters. All
    published models share the two frequency factors and the original context, so the largest
    divisor is the factor; that the rest then agrees is checked, so a different recipe is an error
    and not a guess.
    """
    factors = read_float32(header, "rope_freqs.weight")
    found = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(found, theta, dim)
    if len(expected) != len(factors) or any(
        not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(expected, factors, strict=True)
    ):
        raise CheckpointError(
            f"{header.path}: rope_freqs.weight follows no known rope scaling (llama3 was tried)."
        )
    return found


def _llama3_divisors(rope: dict[str, Any], theta: float, dim: int) -> list[float]:
    """What llama3 scaling divides each of the dim/2 frequencies by."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for pair in range(0, dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * theta ** (pair / dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def read_float32(header: GgufHeader, name: str) -> list[float]:
    """A small float32 tensor as numbers."""
    tensor = header.tensors[name]
    count = math.prod(tensor.shape)
    if tensor.kind != _F32:
        raise CheckpointError(f"{header.path}: {name} must be F32.")
    if tensor.offset + 4 * count > header.file_size:
        raise CheckpointError(f"{header.path} is truncated: {name} lies beyond its end.")
    with (
        header.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return list(struct.unpack_from(f"<{count}f", data, tensor.offset))
