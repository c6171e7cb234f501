"""Llama (Touvron et al. 2023; Llama 3, 2024): the pre-norm decoder that others vary.

Each layer: x += attention(norm(x)); x += mlp(norm(x)). Residual adds ride in the following norm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detour.layers.attention import GroupedQueryAttention
from detour.layers.embedding import Embedding, Head
from detour.layers.mlp import GatedMLP
from detour.layers.norm import RMSNorm
from detour.layers.rope import Angles, RopeConfig
from detour.layers.weight import Site
from detour.models.fields import Fields
from detour.models.model import LayerKV
from detour.ops.batch import Batch
from detour.ops.kv_layout import KVLayout

Block = Callable[[Tensor], Tensor]


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


class Layer:
    """x += attention(norm(x)); x += block(norm(x)), the last add left to the next layer."""

    def __init__(
        self, site: Site, name: str, config: Config, block: Block, kv_dtype: torch.dtype
    ) -> None:
        self.before_attention = RMSNorm(
            site, f"{name}.input_layernorm", config.hidden, config.norm_eps
        )
        self.attention = GroupedQueryAttention(
            site,
            f"{name}.self_attn",
            config.hidden,
            (config.heads, config.kv_heads, config.head_dim),
            rotated=config.rope.rotated,
            kv_dtype=kv_dtype,
            biases=(config.qkv_bias, config.out_bias),
            norm_eps=config.norm_eps if config.qk_norm else 0.0,
        )
        self.before_block = RMSNorm(
            site, f"{name}.post_attention_layernorm", config.hidden, config.norm_eps
        )
        self.block = block

    def __call__(
        self, x: Tensor, residual: Tensor, step: tuple[Any, ...], kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """x: the previous layer's block output, not yet added to `residual`."""
        x, residual = self.before_attention.after_adding(x, residual)
        x = self.attention(x, *step, kv)
        x, residual = self.before_block.after_adding(x, residual)
        return self.block(x), residual


class Decoder:
    """The whole model. `make_block(name, layer)` builds a layer's feed-forward block."""

    def __init__(
        self,
        config: Config,
        site: Site,
        kv_dtype: torch.dtype,
        make_block: Callable[[str, int], Block],
    ) -> None:
        self.vocab_size = config.vocab_size
        self.longest_context = config.longest_context
        self.tied = config.tied
        shape = (config.vocab_size, config.hidden)
        self.embedding = Embedding(site, "model.embed_tokens", *shape, tied=config.tied)
        self.angles = Angles(config.rope, site.device.torch_device)
        self.layers = [
            Layer(site, name, config, make_block(f"{name}.mlp", number), kv_dtype)
            for number in range(config.layers)
            for name in (f"model.layers.{number}",)
        ]
        self.norm = RMSNorm(site, "model.norm", config.hidden, config.norm_eps)
        self.head = Head(site, "lm_head", self.embedding, shape)
        self.kv_spec: Sequence[KVLayout] = [layer.attention.shape.layout for layer in self.layers]

    def plan(self, batch: Batch) -> Any:
        """All layers attend alike, so one plan serves them."""
        attention = self.layers[0].attention
        return attention.attend.plan(batch, attention.shape)

    def forward(self, batch: Batch, plan: Any, kv: Sequence[LayerKV]) -> Tensor:
        step = (self.angles(batch.positions), batch, plan)
        x = self.embedding(batch.tokens)
        residual = torch.zeros_like(x)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, step, layer_kv)
        return self.norm.after_adding(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def ignored(self, name: str) -> bool:
        """Rotation tables that old checkpoints carry, and a head beside a tied embedding."""
        return name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight")


def build(config: Config, site: Site, kv_dtype: torch.dtype) -> Decoder:
    def mlp(name: str, layer: int) -> Block:
        return GatedMLP(site, name, config.hidden, config.mlp_width, bias=config.mlp_bias)

    return Decoder(config, site, kv_dtype, mlp)
