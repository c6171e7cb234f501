"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form, dense or sparse.

What is cached of a token is one latent and one rotated key for all heads. Queries and results are
taken into the latent space and out of it, so prompts, chunks, cached prefixes and decodes are one
computation over cached rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from detour.layers.indexer import Indexer, ScoredPart, Selection
from detour.layers.linear import Linear, Part
from detour.layers.norm import RMSNorm
from detour.layers.weight import Piece, Site
from detour.ops.batch import Batch
from detour.ops.kv_layout import KVLayout, latent, latent_fp8_packed
from detour.ops.latent_query import latent_query
from detour.ops.latent_value import latent_value
from detour.ops.latent_write import latent_write
from detour.ops.mla import LatentShape, dense_mla, sparse_mla


@dataclass(frozen=True)
class LatentSizes:
    """The shape of a model's latent attention; heads of the whole model."""

    heads: int
    plain: int  # numbers of a query or key head that are not rotated
    rope: int  # and that are
    value: int  # numbers of a value head
    rank: int  # of the latents
    query_rank: int  # of what queries are made of; 0 = of hidden states
    scale: float  # of query times key
    interleaved: bool  # rope turns pairs (2i, 2i + 1), else (i, i + rope / 2)
    norm_eps: float
    bias: bool  # of the projections from and to hidden states


@dataclass(frozen=True)
class LatentPlan:
    """How a step attends."""

    parts: tuple[ScoredPart, ...]  # none: tokens attend to all they see
    dense: Any  # dense_mla's plan where there are no parts
    selection: Selection  # where there are: of the last layer that selected


def latent_layout(kv_dtype: torch.dtype, rank: int, rope: int) -> KVLayout:
    if kv_dtype is torch.float8_e4m3fn:
        return latent_fp8_packed(rank, rope)
    return latent(kv_dtype, rank, rope)


class LatentAttention:
    """indexers: the layer's own indexer if it has one; without, it takes over the selection of the
    layer before, or in a model of none attends to everything."""

    def __init__(
        self,
        site: Site,
        name: str,
        hidden: int,
        sizes: LatentSizes,
        kv_dtype: torch.dtype,
        indexers: tuple[Indexer, ...],
    ) -> None:
        heads, rank, rope = sizes.heads, sizes.rank, sizes.rope
        share = site.group.share(heads, "heads")
        self.sizes = sizes
        self.indexers = indexers
        layout = latent_layout(kv_dtype, rank, rope)
        self.layouts = (layout, *(indexer.layout for indexer in indexers))
        self.whole_until = max((indexer.sizes.top_k for indexer in indexers), default=0)
        self.shape = LatentShape(heads // share.parts, rank, rope, sizes.scale, layout)
        self._make_projections(site, name, hidden)
        # Heads below one another, each the rows that make its keys, then those of its values.
        rows = heads * (sizes.plain + sizes.value)
        piece = Piece(f"{name}.kv_b_proj.weight", (rows, rank), rows=share)
        self.expand = site.tensor((rows // share.parts, rank), piece, spread=rank**-0.5)
        norm = Piece(f"{name}.kv_a_layernorm.weight", (rank,))
        self.latent_norm = site.tensor((rank,), norm)
        need = {"dtype": site.dtype, "rank": rank, "rope": rope}
        own = {**need, "heads": self.shape.heads}
        self.absorb = site.routes.route(latent_query, {**own, "plain": sizes.plain})
        values = {"dtype": site.dtype, "heads": own["heads"], "rank": rank, "width": sizes.value}
        self.expand_values = site.routes.route(latent_value, values)
        self.write = site.routes.route(latent_write, {**need, "layout": layout})
        self.dense = site.routes.route(dense_mla, {**own, "layout": layout})
        self.sparse = site.routes.route(sparse_mla, {**own, "layout": layout})

    def _make_projections(self, site: Site, name: str, hidden: int) -> None:
        sizes = self.sizes
        width = sizes.heads * (sizes.plain + sizes.rope)
        latents = Part(f"{name}.kv_a_proj_with_mqa", sizes.rank + sizes.rope, 1)
        down, self.norms, queries, low = (latents,), (), f"{name}.q_proj", hidden
        if sizes.query_rank:
            low = sizes.query_rank
            down = (Part(f"{name}.q_a_proj", low, 1), latents)
            self.norms = (RMSNorm(site, f"{name}.q_a_layernorm", low, sizes.norm_eps),)
            queries = f"{name}.q_b_proj"
        self.down = Linear(site, down, hidden, bias=sizes.bias)
        self.queries = Linear(site, (Part(queries, width, sizes.heads),), low, split="outputs")
        out = Part(f"{name}.o_proj", hidden, hidden)
        values = sizes.heads * sizes.value
        self.out = Linear(site, (out,), values, bias=sizes.bias, split="inputs")

    def plan(self, batch: Batch) -> LatentPlan:
        """Of a model's first layer, for them all."""
        none = torch.empty(0, dtype=torch.int32, device=batch.positions.device)
        parts = tuple(part for indexer in self.indexers for part in indexer.plan(batch))
        dense = () if parts else self.dense.plan(batch, self.shape)
        return LatentPlan(parts, dense, Selection(none.view(0, 0), none))

    def transient_bytes(self, tokens: int, context: int) -> int:
        """What selecting takes at a time."""
        return sum(indexer.transient_bytes(tokens, context) for indexer in self.indexers)

    def __call__(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: Batch,
        plan: LatentPlan,
        kv: Sequence[Tensor],
    ) -> tuple[Tensor, LatentPlan]:
        """([T, hidden], plan); writes this step's latents, and index keys if it has an indexer."""
        sizes = self.sizes
        down = self.down(x)
        low = self.norms[0](down[:, : sizes.query_rank]) if self.norms else x
        places = (kv[0], batch.write_slots, self.shape)
        latents = (down[:, sizes.query_rank :], self.latent_norm.value, sizes.norm_eps)
        self.write(*latents, *angles, sizes.interleaved, *places)
        for indexer, cache in zip(self.indexers, kv[1:], strict=True):
            indexer.remember(x, angles, batch, cache)
            if plan.parts:
                plan = replace(plan, selection=indexer(x, low, angles, plan.parts, cache))
        return self.out(self._attend(self.queries(low), angles, plan, kv[0])), plan

    def _attend(
        self, queries: Tensor, angles: tuple[Tensor, Tensor], plan: LatentPlan, cache: Tensor
    ) -> Tensor:
        """[T, heads * (plain + rope)] -> [T, heads * value]."""
        sizes, heads = self.sizes, self.shape.heads
        expand = self.expand.value.view(heads, sizes.plain + sizes.value, sizes.rank)
        keys, values = expand[:, : sizes.plain], expand[:, sizes.plain :]
        q = self.absorb(queries.view(len(queries), heads, -1), keys, *angles, sizes.interleaved)
        if plan.parts:
            chosen = plan.selection
            latents = self.sparse(q, cache, chosen.slots, chosen.counts, self.shape)
        else:
            latents = self.dense(plan.dense, q, cache)
        made: Tensor = self.expand_values(latents, values)
        return made
