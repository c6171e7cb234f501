"""A tiny random checkpoint in a folder: the model of the test suite and of the examples.

Knows files, not models: the configuration and the tensors' names and shapes come from the caller.
Weights depend on the seed, the tensor's name and its shape alone, so two ways of sharding the same
model hold the same numbers.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from detour.loading.safetensors import INDEX
from detour.loading.tiny_tokenizer import (
    BOS,
    EOS,
    TURN_END,
    vocabulary,
    write_json,
    write_tokenizer,
)

Shapes = Mapping[str, tuple[int, ...]]

# Endings of names that published checkpoints keep in float32 whatever the rest is in.
_FLOAT32 = ("e_score_correction_bias",)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Shapes,
    seed: int = 0,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes config.json, generation_config.json, random safetensors and a tokenizer to `folder`.

    config: Hugging Face style, without special tokens; its `vocab_size` must hold the tokenizer's
        300. What was written (with special tokens and dtype) is in the folder's config.json.
    shapes: every tensor of the model. shards: how many files they are spread over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = vocabulary()
    if config["vocab_size"] < len(tokens):
        raise ValueError(f"vocab_size must be at least {len(tokens)}, got {config['vocab_size']}")
    ends = {"bos_token_id": tokens[BOS], "eos_token_id": [tokens[EOS], tokens[TURN_END]]}
    name = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**config, **ends, "dtype": name})
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(folder)
    _write_weights(folder, shapes, seed, shards, dtype)
    return folder


def random_weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Float32 values that keep activations near size 1: norm weights near 1, small biases."""
    digest = hashlib.blake2b(f"{seed}:{name}:{shape}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    return 1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.1 * noise


def _write_weights(
    folder: Path, shapes: Shapes, seed: int, shards: int, dtype: torch.dtype
) -> None:
    names = list(shapes)
    files = ["model.safetensors"]
    if shards > 1:
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map: dict[str, str] = {}
    for i, file in enumerate(files):
        part = names[i::shards]
        tensors = {
            name: random_weight(name, shapes[name], seed).to(
                torch.float32 if name.endswith(_FLOAT32) else dtype
            )
            for name in part
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
