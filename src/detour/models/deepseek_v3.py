"""DeepSeek-V3 and R1 (2024, arXiv 2412.19437): latent attention, experts chosen by corrected sigmoid
scores, a few dense layers first. What reads these parts serves the models that vary them too."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from detour.layers.indexer import Indexer, IndexSizes
from detour.layers.mla import LatentAttention, LatentSizes
from detour.layers.mlp import GatedMLP
from detour.layers.moe import Mixture, MixtureOfExperts
from detour.layers.rope import RopeConfig, yarn_mscale
from detour.layers.weight import Site
from detour.models.decoder import Block, Decoder
from detour.models.fields import Fields
from detour.ops.routing import RoutingRule

log = logging.getLogger(__name__)

# They say how a model was trained or is spread over devices.
TRAINING = ("aux_loss_alpha", "ep_size", "seq_aux", "index_share_for_mtp_iteration")


@dataclass(frozen=True)
class Feeding:
    """What follows attention in each layer: experts where `sparse`, else one dense block."""

    dense_width: int
    mixture: Mixture
    sparse: tuple[bool, ...]


@dataclass(frozen=True)
class Indexing:
    """Sparse attention: `own[layer]` = it has an indexer, else it takes over a selection."""

    sizes: IndexSizes
    own: tuple[bool, ...]


@dataclass(frozen=True)
class Config:
    """A decoder of latent attention. `indexing` has no more than one element."""

    vocab_size: int
    hidden: int
    layers: int
    norm_eps: float
    rope: RopeConfig
    longest_context: int
    tied: bool
    sizes: LatentSizes
    feeding: Feeding
    unused: tuple[str, ...]  # beginnings of names of tensors that are no part of it
    indexing: tuple[Indexing, ...] = ()


def skip_prediction_layers(fields: Fields) -> tuple[str, ...]:
    """The names that layers for multi-token prediction begin with: they lie behind the others."""
    first = fields.integer("num_hidden_layers")
    name = "num_mtp_layers" if fields.config.get("num_mtp_layers") else "num_nextn_predict_layers"
    fields.seen |= {"num_mtp_layers", "num_nextn_predict_layers"}
    more = fields.integer(name, 0, least=0)
    if more:
        log.info("multi-token prediction is not used: layers from %d on are skipped", first)
    return tuple(f"model.layers.{layer}." for layer in range(first, first + more))


def read_feeding(fields: Fields, layers: int) -> Feeding:
    fields.only("moe_layer_freq", 1)
    fields.only("mlp_bias", False)
    dense = fields.integer("first_k_dense_replace", 0, least=0)
    fields.seen.add("mlp_layer_types")
    kinds = fields.config.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    if len(kinds) != layers or not {"dense", "sparse"}.issuperset(kinds):
        raise fields.refused("mlp_layer_types", kinds, f"dense or sparse for {layers} layers")
    return Feeding(
        fields.integer("intermediate_size"),
        _read_mixture(fields),
        tuple(kind == "sparse" for kind in kinds),
    )


def _read_mixture(fields: Fields) -> Mixture:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_router_dtype", "float32", "fp32")
    count = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    rule = RoutingRule(
        fields.integer("num_experts_per_tok"),
        scoring="sigmoid",
        normalise=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
    )
    if count % rule.groups or (rule.groups > 1 and count // rule.groups < 2):
        raise fields.refused("n_group", rule.groups, f"{count} experts in groups of at least two")
    if rule.top_groups > rule.groups:
        raise fields.refused("topk_group", rule.top_groups, f"there are {rule.groups} groups")
    reach = count // rule.groups * rule.top_groups
    if rule.top_k > reach:
        raise fields.refused("num_experts_per_tok", rule.top_k, f"{reach} can be chosen from")
    shared = fields.integer("n_shared_experts", 0, least=0)
    return Mixture(count, width, rule, corrected=True, shared_width=shared * width)


def feeding_from(site: Site, hidden: int, feeding: Feeding) -> Callable[[str, int], Block]:
    """Makes the block of a layer by its name and number."""

    def feed(name: str, number: int) -> Block:
        if feeding.sparse[number]:
            return MixtureOfExperts(site, name, hidden, feeding.mixture)
        return GatedMLP(site, name, hidden, feeding.dense_width, bias=False)

    return feed


def read_latent(fields: Fields, **varied: Any) -> Config:
    """The fields that all these models share; `varied` are those that tell them apart."""
    fields.only("hidden_act", "silu")
    fields.seen |= {"head_dim", *TRAINING}  # the first is qk_rope_head_dim, or means nothing
    layers = fields.integer("num_hidden_layers")
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"))
    rope, longest = fields.rope(fields.integer("qk_rope_head_dim"))
    return Config(
        vocab_size=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=layers,
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        longest_context=longest,
        tied=fields.flag("tie_word_embeddings", default=False),
        sizes=_read_sizes(fields, rope),
        feeding=read_feeding(fields, layers),
        unused=skip_prediction_layers(fields),
        **varied,
    )


def _read_sizes(fields: Fields, rope: RopeConfig) -> LatentSizes:
    plain, turned = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    fields.only("qk_head_dim", plain + turned)
    # YaRN's temperature is in the scale alone where mscale and mscale_all_dim agree.
    temper = fields.config["rope_parameters"].get("mscale_all_dim") or 0.0
    stretch = yarn_mscale(rope.factor, temper) ** 2 if rope.kind != "default" and temper else 1.0
    return LatentSizes(
        heads=fields.integer("num_attention_heads"),
        plain=plain,
        rope=turned,
        value=fields.integer("v_head_dim"),
        rank=fields.integer("kv_lora_rank"),
        query_rank=fields.integer("q_lora_rank", 0, least=0),
        scale=(plain + turned) ** -0.5 * stretch,
        interleaved=fields.flag("rope_interleave", default=True),
        norm_eps=fields.number("rms_norm_eps"),
        bias=fields.flag("attention_bias", default=False),
    )


def read_index_sizes(fields: Fields, *, interleaved: bool) -> IndexSizes:
    """interleaved: how rope pairs numbers where the configuration does not say."""
    sizes = IndexSizes(
        heads=fields.integer("index_n_heads"),
        width=fields.integer("index_head_dim"),
        rope=fields.integer("qk_rope_head_dim"),
        top_k=fields.integer("index_topk"),
        interleaved=fields.flag("indexer_rope_interleave", default=interleaved),
    )
    if sizes.rope > sizes.width:
        raise fields.refused("index_head_dim", sizes.width, f"rope turns {sizes.rope} of a head")
    fields.integer("q_lora_rank")  # queries of the indexer are made of it
    return sizes


def read(config: Mapping[str, Any]) -> Config:
    fields = Fields(config)
    fields.full_attention()
    decoder = read_latent(fields)
    fields.done()
    return decoder


def build(config: Config, site: Site, kv_dtype: torch.dtype) -> Decoder:
    sizes, hidden = config.sizes, config.hidden

    def attend(name: str, number: int) -> LatentAttention:
        indexers = tuple(
            Indexer(site, f"{name}.indexer", (hidden, sizes.query_rank), indexing.sizes, kv_dtype)
            for indexing in config.indexing
            if indexing.own[number]
        )
        return LatentAttention(site, name, hidden, sizes, kv_dtype, indexers)

    feed = feeding_from(site, hidden, config.feeding)
    return Decoder(config, site, attend, feed, config.unused)
