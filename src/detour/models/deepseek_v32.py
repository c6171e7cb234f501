"""DeepSeek-V3.2 (2025, arXiv 2512.02556): DeepSeek-V3 whose layers each select what they attend to.

The published code turns index queries and keys by a Hadamard matrix before it rounds them to e4m3.
That leaves every product as it is, and is left out, as in transformers.
"""

from collections.abc import Mapping
from typing import Any

from detour.models.deepseek_v3 import Config, Indexing, read_index_sizes, read_latent
from detour.models.deepseek_v3 import build as build
from detour.models.fields import Fields

SPARSE = {"indexed_attention", "deepseek_sparse_attention"}  # names of what every layer does


def sparse_layers(fields: Fields) -> int:
    """How many there are. Refuses layers of another kind."""
    fields.seen.add("layer_types")
    others = sorted(map(str, set(fields.config.get("layer_types") or ()) - SPARSE))
    if others:
        raise fields.refused("layer_types", others, "every layer selects what it attends to")
    return fields.integer("num_hidden_layers")


def read(config: Mapping[str, Any]) -> Config:
    fields = Fields(config)
    layers = sparse_layers(fields)
    sizes = read_index_sizes(fields, interleaved=False)
    decoder = read_latent(fields, indexing=(Indexing(sizes, (True,) * layers),))
    fields.done()
    return decoder
