"""Qwen3 MoE (2025): Qwen3 whose blocks are a softmax-routed mixture of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from detour.layers.mlp import GatedMLP
from detour.layers.moe import Mixture, MixtureOfExperts
from detour.layers.weight import Site
from detour.models import llama
from detour.models.decoder import Block, Decoder
from detour.models.fields import Fields
from detour.ops.routing import RoutingRule


@dataclass(frozen=True)
class Config:
    decoder: llama.Config
    mixture: Mixture
    sparse: tuple[bool, ...]  # per layer: experts, or one dense block


def read(config: Mapping[str, Any]) -> Config:
    fields = Fields(config)
    fields.full_attention()
    fields.only("mlp_bias", False)
    bias = fields.flag("attention_bias", default=False)
    decoder = llama.read_decoder(fields, qkv_bias=bias, out_bias=bias, qk_norm=True)
    # transformers 5 writes the number under another name than the checkpoints published before.
    fields.seen |= {"num_experts", "num_local_experts"}
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = fields.integer(name)
    chosen = fields.integer("num_experts_per_tok")
    if chosen > experts:
        raise fields.refused("num_experts_per_tok", chosen, f"there are {experts} experts")
    stride = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    read = Config(
        decoder=decoder,
        mixture=Mixture(
            experts,
            fields.integer("moe_intermediate_size"),
            RoutingRule(chosen, normalise=fields.flag("norm_topk_prob", default=False)),
        ),
        sparse=tuple(
            layer not in dense and (layer + 1) % stride == 0 for layer in range(decoder.layers)
        ),
    )
    fields.done()
    return read


def build(config: Config, site: Site, kv_dtype: torch.dtype) -> Decoder:
    hidden = config.decoder.hidden

    def feed(name: str, number: int) -> Block:
        if not config.sparse[number]:
            return GatedMLP(site, name, hidden, config.decoder.mlp_width, bias=False)
        return MixtureOfExperts(site, name, hidden, config.mixture)

    return llama.decoder(config.decoder, site, kv_dtype, feed)
