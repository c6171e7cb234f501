"""GLM-5 to GLM-5.2 (2026): DeepSeek-V3.2's architecture, rope of the indexer in interleaved pairs.

From GLM-5.2 on only some layers select; those between attend to what the last of them selected
(IndexCache, arXiv 2603.12201), and cache no index keys. Norms of the low ranks use rms_norm_eps, as
serving engines of the model do; transformers 5.24 uses 1e-6 there.
"""

from collections.abc import Mapping
from typing import Any

from detour.models.deepseek_v3 import Config, Indexing, read_index_sizes, read_latent
from detour.models.deepseek_v3 import build as build
from detour.models.deepseek_v32 import sparse_layers
from detour.models.fields import Fields

LETTERS = {"F": "full", "S": "shared"}


def read(config: Mapping[str, Any]) -> Config:
    fields = Fields(config)
    layers = sparse_layers(fields)
    sizes = read_index_sizes(fields, interleaved=True)
    decoder = read_latent(fields, indexing=(Indexing(sizes, read_own(fields, layers)),))
    fields.done()
    return decoder


def read_own(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers select: a list, a pattern of F and S, or every so many after the first few."""
    config = fields.config
    fields.seen |= {"indexer_types", "index_topk_pattern"}
    freq = fields.integer("index_topk_freq", 1)
    offset = fields.integer("index_skip_topk_offset", 2, least=0)
    kinds: list[Any] = [
        "shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(layers)
    ]
    name = "index_topk_freq"
    for name in ("indexer_types", "index_topk_pattern"):
        if config.get(name) is not None:
            kinds = [LETTERS.get(kind, kind) for kind in config[name]]
            break
    if len(kinds) != layers or not {"full", "shared"}.issuperset(kinds):
        raise fields.refused(name, config.get(name), f"full or shared for {layers} layers")
    if kinds[0] != "full":
        raise fields.refused(name, config.get(name), "the first layer has nothing to share")
    return tuple(kind == "full" for kind in kinds)
