"""Llama (Touvron et al. 2023; Llama 3, 2024): the decoder that others vary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from detour.layers.attention import GroupedQueryAttention
from detour.layers.mlp import GatedMLP
from detour.layers.rope import RopeConfig
from detour.layers.weight import Site
from detour.models.decoder import Block, Decoder
from detour.models.fields import Fields

Feed = Callable[[str, int], Block]


@dataclass(frozen=True)
class Config:
    """A decoder of grouped-query attention and SwiGLU blocks."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float
    rope: RopeConfig
    longest_context: int
    tied: bool  # the output head is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    unused: tuple[str, ...] = ()  # beginnings of names of tensors that are no part of it


def read_decoder(fields: Fields, **varied: Any) -> Config:
    """The fields that all these models share; `varied` are those that tell them apart."""
    fields.only("hidden_act", "silu")
    fields.only("rope_interleaved", False)
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % kv_heads:
        raise fields.refused("num_key_value_heads", kv_heads, f"it must divide {heads}")
    head_dim = fields.integer("head_dim")
    rope, longest = fields.rope(head_dim)
    return Config(
        vocab_size=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        longest_context=longest,
        tied=fields.flag("tie_word_embeddings", default=False),
        **varied,
    )


def read(config: Mapping[str, Any]) -> Config:
    fields = Fields(config)
    fields.full_attention()
    bias = fields.flag("attention_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False)
    decoder = read_decoder(fields, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    fields.done()
    return decoder


def decoder(config: Config, site: Site, kv_dtype: torch.dtype, feed: Feed) -> Decoder:
    """A decoder whose layers attend as `config` says; `feed(name, number)` makes their blocks."""

    def attend(name: str, number: int) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            site,
            name,
            config.hidden,
            (config.heads, config.kv_heads, config.head_dim),
            rotated=config.rope.rotated,
            kv_dtype=kv_dtype,
            biases=(config.qkv_bias, config.out_bias),
            norm_eps=config.norm_eps if config.qk_norm else 0.0,
        )

    return Decoder(config, site, attend, feed, config.unused)


def build(config: Config, site: Site, kv_dtype: torch.dtype) -> Decoder:
    def feed(name: str, number: int) -> Block:
        return GatedMLP(site, name, config.hidden, config.mlp_width, bias=config.mlp_bias)

    return decoder(config, site, kv_dtype, feed)
