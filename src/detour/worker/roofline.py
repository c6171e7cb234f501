"""The least time a decode step can take: bytes that must move and products that must be made.

Each kernel takes as long as the slower of its two; a rank's kernels run one after the other, and
so do its all-reduces. What is measured above it is the gap to close.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from detour.layers.experts import ExpertWeights
from detour.layers.weight import Matrix
from detour.ops.kv_layout import KVLayout
from detour.worker.chips import Chip
from detour.worker.outline import Outline, Weight


@dataclass(frozen=True)
class Work:
    """One kernel's, of one step on one rank."""

    part: str
    nbytes: float
    flops: float
    math: str  # what is multiplied: bf16, fp8, nvfp4

    def seconds(self, chip: Chip) -> float:
        return max(self.nbytes / chip.bandwidth, self.flops / chip.flops[self.math])


@dataclass(frozen=True)
class Bound:
    """Of one decode step."""

    seconds: float
    exchanging: float  # of these, in all-reduces
    by_part: Mapping[str, float]  # seconds in kernels, the longest first

    def tokens_per_second(self, rows: float) -> float:
        return rows / self.seconds


def decode_bound(model: Outline, chip: Chip, rows: float, context: float) -> Bound:
    """rows: sequences of a step, `context` cached tokens each."""
    by_part: dict[str, float] = {}
    for work in decode_work(model, rows, context):
        by_part[work.part] = by_part.get(work.part, 0.0) + work.seconds(chip)
    exchanging = 0.0
    if model.ranks > 1:
        # Attention's and the block's of each layer, and the embedding's; rings send 2(n-1)/n.
        count = 2 * len(model.model.kv_spec) + 1
        sent = 2 * (model.ranks - 1) / model.ranks * rows * _hidden(model) * _wide(model)
        exchanging = count * (chip.link_latency + sent / chip.link_bandwidth)
    ordered = dict(sorted(by_part.items(), key=lambda item: -item[1]))
    return Bound(sum(by_part.values()) + exchanging, exchanging, ordered)


def decode_work(model: Outline, rows: float, context: float) -> Iterator[Work]:
    tied = all(weight.part != "output head" for weight in model.weights)
    for weight in model.weights:
        if weight.part == "embedding" and not tied:
            continue  # some rows of it are looked up
        yield from _product(model, weight, rows)
    yield from _attention(model, rows, context)
    wide, hidden, layers = _wide(model), _hidden(model), len(model.model.kv_spec)
    logits = rows * model.model.vocab_size / model.ranks * 4
    yield Work("norms and sampling", layers * 4 * rows * hidden * wide + logits, 0.0, "bf16")


def coverage(rows: float, experts: int, top_k: int) -> float:
    """Experts that so many tokens are expected to hit, choosing evenly."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def _product(model: Outline, weight: Weight, rows: float) -> Iterator[Work]:
    parameter, wide = weight.parameter, _wide(model)
    if isinstance(parameter, ExpertWeights):
        count, hidden, width = parameter.sizes
        top_k = model.config["num_experts_per_tok"]
        pairs, hit = rows * top_k, coverage(rows, count, top_k)
        moved = weight.nbytes * hit / count + (2 * rows * hidden + pairs * 3 * width) * wide
        yield Work(weight.part, moved, 2.0 * pairs * 3 * hidden * width, _math(weight.form))
    elif isinstance(parameter, Matrix):
        outputs, inputs = parameter.shape
        moved = weight.nbytes + rows * (inputs + outputs) * wide
        yield Work(weight.part, moved, 2.0 * rows * inputs * outputs, _math(weight.form))
    elif parameter.pieces[0].name.endswith("kv_b_proj.weight"):
        # Taken apart by heads: queries into the latent space, results out of it.
        outputs, rank = parameter.shape
        moved = weight.nbytes + rows * (outputs + 2 * _heads(model) * rank) * wide
        yield Work(weight.part, moved, 2.0 * rows * parameter.numel, "bf16")


def _attention(model: Outline, rows: float, context: float) -> Iterator[Work]:
    config, spec = model.config, model.model.kv_spec
    sparse = any(_is_index(layout) for layer in spec for layout in layer)
    chosen = min(context, config["index_topk"]) if sparse else context
    for layer in spec:
        for layout in layer:
            yield Work("cache writes", rows * layout.bytes_per_token, 0.0, "bf16")
            if _is_index(layout):
                yield from _indexing(config, layout, rows, context)
            else:
                yield _reading(model, layout, rows, chosen)


def _indexing(
    config: Mapping[str, Any], layout: KVLayout, rows: float, context: float
) -> Iterator[Work]:
    """A float32 score for each cached token, written and read again."""
    flops = 2.0 * rows * context * config["index_n_heads"] * config["index_head_dim"]
    math = "fp8" if layout.name == "index_keys_fp8" else "bf16"
    yield Work("index scores", rows * context * (layout.bytes_per_token + 4), flops, math)
    yield Work("top-k", rows * 4 * (context + config["index_topk"]), 0.0, "bf16")


def _reading(model: Outline, layout: KVLayout, rows: float, chosen: float) -> Work:
    config, heads = model.config, _heads(model)
    if layout.name == "grouped_query":
        numbers = 2 * layout.width  # of a query and of a result
    else:
        numbers = 2 * config["kv_lora_rank"] + config["qk_rope_head_dim"]
    moved = rows * (chosen * layout.bytes_per_token + heads * numbers * _wide(model))
    return Work("attention over the cache", moved, 2.0 * rows * heads * chosen * numbers, "bf16")


def _is_index(layout: KVLayout) -> bool:
    return layout.name.startswith("index_keys")


def _math(form: str) -> str:
    return "nvfp4" if form == "NVFP4" else "fp8" if form.startswith("FP8") else "bf16"


def _wide(model: Outline) -> int:
    """Bytes of an activation."""
    return model.dtype.itemsize


def _hidden(model: Outline) -> int:
    hidden: int = model.config["hidden_size"]
    return hidden


def _heads(model: Outline) -> int:
    """Query heads of a rank."""
    heads: int = model.config["num_attention_heads"]
    return max(1, heads // model.ranks)
