"""The pre-norm decoder that the models of this folder are, whatever their attention and blocks.

Each layer: x += attention(norm(x)); x += block(norm(x)). Residual adds ride in the following norm.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from detour.layers.embedding import Embedding, Head
from detour.layers.norm import RMSNorm
from detour.layers.rope import Angles, RopeConfig
from detour.layers.weight import Site
from detour.models.model import LayerKV
from detour.ops.batch import Batch
from detour.ops.kv_layout import KVLayout

Block = Callable[[Tensor], Tensor]


class Attention(Protocol):
    """What a layer attends with."""

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """What the layer stores per token."""
        ...

    @property
    def whole_until(self) -> int:
        """As model.Model's."""
        ...

    def plan(self, batch: Batch) -> Any:
        """Once a step, of the first layer: what all layers share."""
        ...

    def transient_bytes(self, tokens: int, context: int) -> int:
        """Of the first layer, as model.Model's: layers run one after the other."""
        ...

    def __call__(
        self, x: Tensor, angles: tuple[Tensor, Tensor], batch: Batch, plan: Any, kv: LayerKV
    ) -> tuple[Tensor, Any]:
        """([T, hidden], the plan for the layer that follows); writes this step's KV to `kv`."""
        ...


class Frame(Protocol):
    """What a configuration says of every decoder."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def rope(self) -> RopeConfig: ...

    @property
    def longest_context(self) -> int: ...

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        ...


class Layer:
    """x += attention(norm(x)); x += block(norm(x)), the last add left to the next layer."""

    def __init__(
        self, site: Site, name: str, frame: Frame, attention: Attention, block: Block
    ) -> None:
        shape = (frame.hidden, frame.norm_eps)
        self.before_attention = RMSNorm(site, f"{name}.input_layernorm", *shape)
        self.attention = attention
        self.before_block = RMSNorm(site, f"{name}.post_attention_layernorm", *shape)
        self.block = block

    def __call__(
        self, x: Tensor, residual: Tensor, step: tuple[Any, Batch, Any], kv: LayerKV
    ) -> tuple[Tensor, Tensor, Any]:
        """x: the previous layer's block output, not yet added to `residual`."""
        x, residual = self.before_attention.after_adding(x, residual)
        x, plan = self.attention(x, *step, kv)
        x, residual = self.before_block.after_adding(x, residual)
        return self.block(x), residual, plan


class Decoder:
    """The whole model, of a layer's parts as `attend(name, number)` and `feed(name, number)` make
    them.

    unused: beginnings of the names of tensors that a checkpoint holds for other purposes.
    """

    def __init__(
        self,
        frame: Frame,
        site: Site,
        attend: Callable[[str, int], Attention],
        feed: Callable[[str, int], Block],
        unused: tuple[str, ...] = (),
    ) -> None:
        self.vocab_size = frame.vocab_size
        self.longest_context = frame.longest_context
        # A head beside a tied embedding is the embedding once more.
        self.unused = (*unused, "lm_head.weight") if frame.tied else unused
        shape = (frame.vocab_size, frame.hidden)
        self.embedding = Embedding(site, "model.embed_tokens", *shape, tied=frame.tied)
        self.angles = Angles(frame.rope, site.device.torch_device)
        self.layers = [
            Layer(
                site,
                name,
                frame,
                attend(f"{name}.self_attn", number),
                feed(f"{name}.mlp", number),
            )
            for number in range(frame.layers)
            for name in (f"model.layers.{number}",)
        ]
        self.norm = RMSNorm(site, "model.norm", frame.hidden, frame.norm_eps)
        self.head = Head(site, "lm_head", self.embedding, shape)
        self.kv_spec: Sequence[tuple[KVLayout, ...]] = [
            layer.attention.layouts for layer in self.layers
        ]

    @property
    def whole_until(self) -> int:
        return self.layers[0].attention.whole_until

    def plan(self, batch: Batch) -> Any:
        return self.layers[0].attention.plan(batch)

    def transient_bytes(self, tokens: int, context: int) -> int:
        return self.layers[0].attention.transient_bytes(tokens, context)

    def forward(self, batch: Batch, plan: Any, kv: Sequence[LayerKV]) -> Tensor:
        angles = self.angles(batch.positions)
        x = self.embedding(batch.tokens)
        residual = torch.zeros_like(x)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x, residual, plan = layer(x, residual, (angles, batch, plan), layer_kv)
        return self.norm.after_adding(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def ignored(self, name: str) -> bool:
        """Rotation tables that old checkpoints carry, and what is `unused`."""
        return name.endswith("rotary_emb.inv_freq") or name.startswith(self.unused)
