"""GLM-4.5 to GLM-4.7 (2025): grouped-query attention that turns half of each head, DeepSeek-V3's
mixture of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from detour.layers.weight import Site
from detour.models import llama
from detour.models.decoder import Decoder
from detour.models.deepseek_v3 import Feeding, feeding_from, read_feeding, skip_prediction_layers
from detour.models.fields import Fields

PARTIAL = {"partial_rotary_factor": 0.5}  # where the configuration does not say


@dataclass(frozen=True)
class Config:
    decoder: llama.Config
    feeding: Feeding


def read(config: Mapping[str, Any]) -> Config:
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        config = {**config, "rope_parameters": {**PARTIAL, **rope}}
    fields = Fields(config)
    fields.full_attention()
    fields.only("mlp_bias", False)
    decoder = llama.read_decoder(
        fields,
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm=fields.flag("use_qk_norm", default=False),
        unused=skip_prediction_layers(fields),
    )
    read = Config(decoder, read_feeding(fields, decoder.layers))
    fields.done()
    return read


def build(config: Config, site: Site, kv_dtype: torch.dtype) -> Decoder:
    feed = feeding_from(site, config.decoder.hidden, config.feeding)
    return llama.decoder(config.decoder, site, kv_dtype, feed)
