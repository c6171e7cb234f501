"""A tokenizer of 300 tokens in which any text can be written: that of tiny checkpoints, and of dummy
weights whose vocabulary holds no real one. Needs no torch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SIZE = 300  # tokens
# Chat markup in ChatML, as many small models have it.
BOS, EOS, TURN, TURN_END = "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (EOS, BOS, TURN, TURN_END, "<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Letters first, then a few merges, so that text becomes tokens of several lengths.
_MERGES = ("t h", "th e", "i n", "e r", "a n", "Ġ the", "Ġ a", "o n", "in g", "Ċ Ċ", "Ã ¤", "ð Ł")


def vocabulary() -> dict[str, int]:
    """The tiny tokenizer's tokens: special ones, then 256 bytes, then a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair.split(" ")) for pair in _MERGES]
    fill = [
        f"<|extra_{i}|>" for i in range(SIZE - len(SPECIAL_TOKENS) - len(letters) - len(merged))
    ]
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
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
