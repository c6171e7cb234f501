"""Grouped-query attention (Ainslie et al. 2023), rotary positions, an optional norm on q and k."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from detour.layers.linear import Linear, Part
from detour.layers.norm import RMSNorm
from detour.layers.weight import Site
from detour.ops.attention import AttentionShape, attention
from detour.ops.batch import Batch
from detour.ops.kv_layout import grouped_query
from detour.ops.kv_write import kv_write
from detour.ops.rope import rope


class GroupedQueryAttention:
    """heads: (query heads, kv heads, head_dim) of the whole model; `shape` has this rank's.

    norm_eps: 0 = q and k are not normalised, else RMSNorm over each head before the rotation.
    """

    def __init__(
        self,
        site: Site,
        name: str,
        hidden: int,
        heads: tuple[int, int, int],
        *,
        rotated: int,
        kv_dtype: torch.dtype,
        biases: tuple[bool, bool] = (False, False),
        norm_eps: float = 0.0,
    ) -> None:
        queries, kv_heads, width = heads
        parts = (
            Part(f"{name}.q_proj", queries * width, queries),
            Part(f"{name}.k_proj", kv_heads * width, kv_heads),
            Part(f"{name}.v_proj", kv_heads * width, kv_heads),
        )
        self.qkv = Linear(site, parts, hidden, bias=biases[0], split="outputs")
        out = Part(f"{name}.o_proj", hidden, hidden)
        self.out = Linear(site, (out,), queries * width, bias=biases[1], split="inputs")
        self.queries = self.qkv.sizes[0] // width
        self.turned = self.queries + self.qkv.sizes[1] // width  # heads that are rotated
        layout = grouped_query(kv_dtype, self.turned - self.queries, width)
        self.layouts = (layout,)
        self.whole_until = 0
        self.shape = AttentionShape(self.queries, layout.heads, width, width**-0.5, layout)
        self.norms = (
            (
                RMSNorm(site, f"{name}.q_norm", width, norm_eps),
                RMSNorm(site, f"{name}.k_norm", width, norm_eps),
            )
            if norm_eps
            else ()
        )
        need = {"dtype": site.dtype, "head_dim": width}
        self.rotate = site.routes.route(rope, {**need, "rotated": rotated})
        self.write = site.routes.route(kv_write, {"dtype": site.dtype, "layout": layout})
        shapes = {"heads": self.queries, "kv_heads": layout.heads, "layout": layout}
        self.attend = site.routes.route(attention, {**need, **shapes})

    def plan(self, batch: Batch) -> Any:
        """What every layer of this shape shares in a step."""
        return self.attend.plan(batch, self.shape)

    def transient_bytes(self, tokens: int, context: int) -> int:
        """Nothing grows with the context but what is cached."""
        return 0

    def __call__(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: Batch,
        plan: Any,
        kv: Sequence[Tensor],
    ) -> tuple[Tensor, Any]:
        """([T, hidden], plan); writes this step's keys and values to `kv`."""
        heads = self.qkv(x).view(len(x), -1, self.shape.head_dim)
        values = heads[:, self.turned :]
        if self.norms:
            queries = self.rotate(self.norms[0](heads[:, : self.queries]), *angles)
            keys = self.rotate(self.norms[1](heads[:, self.queries : self.turned]), *angles)
        else:
            turned = self.rotate(heads[:, : self.turned], *angles)
            queries, keys = turned[:, : self.queries], turned[:, self.queries :]
        self.write(keys, values, *kv, batch.write_slots)
        return self.out(self.attend(plan, queries, *kv).flatten(1)), plan
