"""Qwen2 and Qwen2.5 (2024): Llama with a bias on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from detour.models.fields import Fields
from detour.models.llama import Config, read_decoder
from detour.models.llama import build as build


def read(config: Mapping[str, Any]) -> Config:
    fields = Fields(config)
    fields.full_attention()
    fields.only("attention_bias", True)
    fields.only("mlp_bias", False)
    decoder = read_decoder(fields, qkv_bias=True)
    fields.done()
    return decoder
