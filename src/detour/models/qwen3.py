"""Qwen3 (2025): Llama with RMSNorm on every query and key head."""

from collections.abc import Mapping
from typing import Any

from detour.models.fields import Fields
from detour.models.llama import Config, read_decoder
from detour.models.llama import build as build


def read(config: Mapping[str, Any]) -> Config:
    fields = Fields(config)
    fields.full_attention()
    bias = fields.flag("attention_bias", default=False)
    fields.only("mlp_bias", False)
    decoder = read_decoder(fields, qkv_bias=bias, out_bias=bias, qk_norm=True)
    fields.done()
    return decoder
