"""GGUF files for tests, written by the `gguf` package: an independent hand at the format."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, LAYERS, VOCAB = 4, 2, 16, 64, 96, 2, 40


def write_gguf(path: Path, arch: str, metadata: Mapping = {}, tensors: Mapping = {}) -> Path:
    """metadata: key -> value, keys that start with "." are the architecture's own.

    tensors: name -> float array, or (array, type name) to quantise it, or (bytes array, type name)
    for rows that are packed already.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add(writer, arch + key if key.startswith(".") else key, value)
    for name, given in tensors.items():
        array, kind = given if isinstance(given, tuple) else (given, "")
        if not kind:
            writer.add_tensor(name, array)
            continue
        kind = gguf.GGMLQuantizationType[kind]
        packed = array if array.dtype == np.uint8 else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def model_metadata(**changes: object) -> dict:
    """A small model's metadata; `changes` use "__" for "." and replace or add."""
    found = {
        ".block_count": LAYERS,
        ".context_length": 256,
        ".embedding_length": HIDDEN,
        ".feed_forward_length": FFN,
        ".attention.head_count": HEADS,
        ".attention.head_count_kv": KV_HEADS,
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".rope.freq_base": 50000.0,
        ".rope.dimension_count": HEAD_DIM,
        ".vocab_size": VOCAB,
    }
    return found | {"." + name.replace("__", "."): value for name, value in changes.items()}


def converter_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters to GGUF do to the rows of llama's queries and keys, as they state it."""
    rows = weight.shape[0]
    paired = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(weight.shape))


def llama_tensors(seed: int = 0, kind: str = "") -> tuple[dict, dict]:
    """A llama's GGUF tensors and the same by Hugging Face name, float32 before quantisation."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    ours = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": random(HIDDEN)}
    ours["lm_head.weight"] = random(VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", FFN, HIDDEN),
            ("mlp.up_proj", FFN, HIDDEN),
            ("mlp.down_proj", HIDDEN, FFN),
        ):
            ours[f"{layer}{name}.weight"] = random(rows, columns)
        ours[layer + "input_layernorm.weight"] = random(HIDDEN)
        ours[layer + "post_attention_layernorm.weight"] = random(HIDDEN)
    theirs = {}
    for name, array in ours.items():
        if "q_proj" in name or "k_proj" in name:
            array = converter_order(array, HEADS if "q_proj" in name else KV_HEADS)
        theirs[gguf_name(name)] = (array, kind) if kind and array.ndim == 2 else array
    return theirs, ours


def gguf_name(name: str) -> str:
    for theirs, ours in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("output", "lm_head"),
        ("blk.", "model.layers."),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_", "mlp."),
    ):
        name = name.replace(ours, theirs)
    return name.replace("_proj", "")
