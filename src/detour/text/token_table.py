"""The raw bytes of every token of a vocabulary: what decoding is made of.

A vocabulary writes bytes in one of two ways. Byte-level ones write each byte as a printable
character (GPT-2's alphabet); SentencePiece ones write text, U+2581 for a space and <0xNN> for a
lone byte.
"""

import json
import re
from typing import Any, NamedTuple

import tokenizers

from detour.errors import CheckpointError


class DecodingRule(NamedTuple):
    byte_level: bool  # else SentencePiece
    strips_first_space: bool


def decoding_rule(tokenizer: tokenizers.Tokenizer, name: str) -> DecodingRule:
    """Which way this vocabulary writes bytes, read off its decoder.

    Raises CheckpointError for a decoder whose text is more than its tokens' bytes in a row.
    """
    decoder = tokenizer.decoder  # its state is what tokenizer.json says of it
    state: dict[str, Any] = {"type": "none"}
    if decoder is not None:
        state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return DecodingRule(byte_level=True, strips_first_space=False)
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
    if metaspace:
        return DecodingRule(False, metaspace.get("prepend_scheme", "always") != "never")
    if kinds & {"ByteFallback", "Replace"} and kinds <= {
        "ByteFallback",
        "Replace",
        "Fuse",
        "Strip",
    }:
        strips = any(step["type"] == "Strip" and step["start"] for step in steps)
        return DecodingRule(byte_level=False, strips_first_space=strips)
    raise CheckpointError(
        f"{name}: the decoder {'+'.join(sorted(kinds))} is not supported; byte-level and "
        "SentencePiece ones are."
    )


def token_bytes_table(tokenizer: tokenizers.Tokenizer, rule: DecodingRule) -> list[bytes]:
    """By token: its bytes; empty where the vocabulary has a gap."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    to_bytes = _byte_level_bytes if rule.byte_level else _sentencepiece_bytes
    for text, token in vocabulary.items():
        table[token] = to_bytes(text)
    for token, added in tokenizer.get_added_tokens_decoder().items():
        table[token] = added.content.encode()  # written as it is meant
    return table


def byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet, character code -> byte.

    Printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
# What is no letter of the alphabet must not pass for one after translation.
_TO_LATIN = dict.fromkeys(range(256), 65535) | _ALPHABET


def _byte_level_bytes(text: str) -> bytes:
    try:
        return text.translate(_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="replace")  # not in the alphabet: stands for itself


def _sentencepiece_bytes(text: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if byte:
        return bytes([int(byte[1], 16)])
    return text.replace("\u2581", " ").encode("utf-8", errors="replace")
