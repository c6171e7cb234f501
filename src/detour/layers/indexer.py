"""The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556): which cached tokens each token attends to.

A small attention of its own, keys cached beside the latents, scores every earlier token; the best
are selected. Every rank computes it whole, so all select alike.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from detour.layers.linear import Linear, Part
from detour.layers.weight import Piece, Site
from detour.ops.batch import Batch, cut
from detour.ops.index_key import index_key, index_query
from detour.ops.index_scores import index_scores
from detour.ops.index_topk import index_topk
from detour.ops.kv_layout import KVLayout, index_keys, index_keys_fp8

KEY_EPS = 1e-6  # of the keys' LayerNorm; configurations do not name it
SCORE_BYTES = 256 << 20  # scores held at a time
SELECTING = 2  # times that, which selecting from them may take beside them


@dataclass(frozen=True)
class IndexSizes:
    """An indexer's shape. `interleaved` says how rope pairs the first `rope` numbers of a head."""

    heads: int
    width: int
    rope: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True)
class Selection:
    """The cache slots that tokens attend to, as sparse_mla takes them."""

    slots: Tensor  # [T, top_k] int32
    counts: Tensor  # [T] int32


@dataclass(frozen=True)
class ScoredPart:
    """Tokens whose scores are held at one time, and index_scores' plan for them."""

    first: int
    last: int
    batch: Batch
    plan: Any


def index_layout(kv_dtype: torch.dtype, width: int) -> KVLayout:
    """Keys lie as e4m3, as the models were trained for, unless the cache is float32: exact."""
    if kv_dtype is torch.float32:
        return index_keys(kv_dtype, width)
    return index_keys_fp8(width)


def scored_together(context: int) -> int:
    """Tokens whose scores of so many positions are held at a time."""
    return max(1, SCORE_BYTES // (4 * context))


class Indexer:
    """Selects for all layers up to the next one that has an indexer."""

    def __init__(
        self,
        site: Site,
        name: str,
        inputs: tuple[int, int],
        sizes: IndexSizes,
        kv_dtype: torch.dtype,
    ) -> None:
        """inputs: widths of what keys (hidden states) and queries (their low rank) are made of."""
        hidden, low = inputs
        heads, width = sizes.heads, sizes.width
        self.sizes = sizes
        self.layout = index_layout(kv_dtype, width)
        self.query = Linear(site, (Part(f"{name}.wq_b", heads * width, heads),), low)
        self.key = Linear(site, (Part(f"{name}.wk", width, width),), hidden)
        # Rounded to bfloat16, the weights of heads would change what is selected.
        wide = replace(site, dtype=torch.float32)
        self.gate = Linear(wide, (Part(f"{name}.weights_proj", heads, heads),), hidden)
        self.key_weight = site.tensor((width,), Piece(f"{name}.k_norm.weight", (width,)))
        bias = Piece(f"{name}.k_norm.bias", (width,))
        self.key_bias = site.tensor((width,), bias, spread=0.02)
        need = {"dtype": site.dtype, "width": width, "layout": self.layout}
        queries = {**need, "heads": heads}
        self.write = site.routes.route(index_key, need)
        self.ask = site.routes.route(index_query, queries)
        self.score = site.routes.route(index_scores, queries)
        select = {"dtype": torch.float32, "top_k": sizes.top_k}
        self.select = site.routes.route(index_topk, select)

    def plan(self, batch: Batch) -> tuple[ScoredPart, ...]:
        """The step's tokens in parts; none where all that tokens see is selected anyway."""
        if int(batch.lengths.max(initial=0)) <= self.sizes.top_k:
            return ()
        tokens = len(batch.positions)
        step = scored_together(batch.page_table.shape[1] * batch.page_size)
        parts = []
        for first in range(0, tokens, step):
            last = min(first + step, tokens)
            own = batch if step >= tokens else cut(batch, first, last)
            parts.append(ScoredPart(first, last, own, self.score.plan(own, self.layout)))
        return tuple(parts)

    def transient_bytes(self, tokens: int, context: int) -> int:
        """Most bytes of scores, and of selecting from them, for so many tokens of long sequences."""
        return (1 + SELECTING) * 4 * context * min(tokens, scored_together(context))

    def remember(
        self, x: Tensor, angles: tuple[Tensor, Tensor], batch: Batch, cache: Tensor
    ) -> None:
        """Write the keys of x [T, hidden]."""
        weight, bias = self.key_weight.value, self.key_bias.value
        places = (cache, batch.write_slots, self.layout)
        self.write(self.key(x), weight, bias, KEY_EPS, *angles, self.sizes.interleaved, *places)

    def __call__(
        self,
        x: Tensor,
        low: Tensor,
        angles: tuple[Tensor, Tensor],
        parts: tuple[ScoredPart, ...],
        cache: Tensor,
    ) -> Selection:
        """x [T, hidden], low [T, low]; this step's keys are already remembered."""
        sizes = self.sizes
        queries = self.query(low).view(len(x), sizes.heads, sizes.width)
        gate = self.gate(x.float())
        queries, weights = self.ask(queries, gate, *angles, sizes.interleaved, self.layout)
        chosen = [self._choose(part, queries, weights, cache) for part in parts]
        if len(chosen) == 1:
            return Selection(*chosen[0])
        slots, counts = zip(*chosen, strict=True)
        return Selection(torch.cat(slots), torch.cat(counts))

    def _choose(
        self, part: ScoredPart, queries: Tensor, weights: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        some, batch = slice(part.first, part.last), part.batch
        scores = self.score(part.plan, queries[some], weights[some], cache)
        lengths = (batch.positions + 1).int()
        table = (batch.row_of_token, batch.page_table, batch.page_size)
        chosen: tuple[Tensor, Tensor] = self.select(scores, lengths, *table, self.sizes.top_k)
        return chosen
