"""A tiny random checkpoint in a folder: the model of the test suite and of the examples.

Knows files, not models: the configuration and the tensors' names and shapes come from the caller.
Weights depend on the seed, the tensor's name and its shape alone, so two ways of sharding the same
model hold the same numbers.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from detour.loading.safetensors import INDEX

Shapes = Mapping[str, tuple[int, ...]]

# Chat markup in ChatML, as many small models have it.
BOS, EOS, TURN, TURN_END = "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (EOS, BOS, TURN, TURN_END, "<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Endings of names that published checkpoints keep in float32 whatever the rest is in.
_FLOAT32 = ("e_score_correction_bias",)
# Letters first, then a few merges, so that text becomes tokens of several lengths.
_MERGES = ("t h", "th e", "i n", "e r", "a n", "Ġ the", "Ġ a", "o n", "in g", "Ċ Ċ", "Ã ¤", "ð Ł")


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
    _write_json(folder / "config.json", {**config, **ends, "dtype": name})
    _write_json(folder / "generation_config.json", ends)
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
        _write_json(folder / INDEX, index)


def vocabulary() -> dict[str, int]:
    """The tiny tokenizer's tokens: special ones, then 256 bytes, then a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair.split(" ")) for pair in _MERGES]
    fill = [f"<|extra_{i}|>" for i in range(300 - len(SPECIAL_TOKENS) - len(letters) - len(merged))]
    return {text: i for i, text in enumerate((*SPECIAL_TOKENS, *letters, *merged, *fill))}


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of 300 tokens, in which any text can be written."""
    vocab = vocabulary()
    merges = [(left, right) for left, right in (pair.split(" ") for pair in _MERGES)]
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    markup = [text for text in vocab if text.startswith("<|")]
    tokenizer.add_special_tokens(_added(markup, special=True))
    tokenizer.add_tokens(_added(SPECIAL_TOKENS[4:], special=False))
    return tokenizer


def _added(texts: Iterable[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(text, special=special, normalized=False) for text in texts]


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": TURN_END,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
