"""Shares of a rank: what all ranks compute adds up to what one computes alone."""

from dataclasses import dataclass

import pytest
import torch
from tiny import write_tiny
from tiny_glm import write_tiny_glm

from detour.errors import ConfigError
from detour.layers.attention import GroupedQueryAttention
from detour.layers.embedding import Embedding
from detour.layers.indexer import Indexer, IndexSizes
from detour.layers.mla import LatentAttention, LatentSizes
from detour.layers.mlp import GatedMLP
from detour.layers.moe import Mixture, MixtureOfExperts
from detour.layers.weight import Site
from detour.loading.checkpoint import open_checkpoint
from detour.ops.attention import make_batch
from detour.ops.device import probe
from detour.ops.route import Routes
from detour.ops.routing import RoutingRule
from detour.parallel.group import Group, Share
from detour.worker.kv_cache import KVCache

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PartialGroup(Group):
    """Leaves every rank its own part of a sum."""

    def all_reduce(self, x):
        return x


def site(rank: int, size: int) -> Site:
    device = probe("cpu")
    routes = Routes(device, {}, strict=False)
    return Site(device, torch.float32, routes, PartialGroup(rank, size))


def sum_over_ranks(folder, size: int, build, *arguments) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    total = torch.zeros(())
    with torch.inference_mode():
        for rank in range(size):
            one = site(rank, size)
            layer = build(one)
            one.load(checkpoint, lambda name: True, lambda amount: None)
            total = total + run(layer, *arguments)
    return total


def run(layer, x):
    if not isinstance(layer, GroupedQueryAttention | LatentAttention):
        return layer(x)
    batch = make_batch([(0, len(x))], 4, CPU, torch.Generator().manual_seed(1))
    turned = 16 if isinstance(layer, LatentAttention) else 8
    angles = torch.ones(len(x), turned // 2).cumsum(0) / torch.arange(1, turned // 2 + 1)
    kv = KVCache([layer.layouts], int(batch.page_table.max()) + 1, 4, CPU).layers[0]
    return layer(x, (angles.cos(), angles.sin()), batch, layer.plan(batch), kv)[0]


def attention(one: Site) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        one,
        "model.layers.1.self_attn",
        32,
        (4, 2, 8),
        rotated=8,
        kv_dtype=torch.float32,
        biases=(True, True),
        norm_eps=0.0,
    )


def mlp(one: Site) -> GatedMLP:
    return GatedMLP(one, "model.layers.0.mlp", 32, 48, bias=True)


def experts(one: Site) -> MixtureOfExperts:
    return MixtureOfExperts(one, "model.layers.0.mlp", 32, Mixture(8, 16, RoutingRule(2)))


def latent_attention(one: Site) -> LatentAttention:
    """Heads are shared; latents, index keys and what is selected are the same on every rank."""
    name = "model.layers.1.self_attn"
    index = IndexSizes(heads=16, width=32, rope=16, top_k=16, interleaved=True)
    sizes = LatentSizes(4, 24, 16, 32, 32, 48, 40**-0.5, True, 1e-5, False)
    indexer = Indexer(one, f"{name}.indexer", (64, 48), index, torch.float32)
    return LatentAttention(one, name, 64, sizes, torch.float32, (indexer,))


def corrected_experts(one: Site) -> MixtureOfExperts:
    mixture = Mixture(8, 32, RoutingRule(3, "sigmoid", scale=2.5), corrected=True, shared_width=32)
    return MixtureOfExperts(one, "model.layers.1.mlp", 64, mixture)


BIASED = {"attention_bias": True, "mlp_bias": True}
MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("build", "changes"), [(mlp, BIASED), (attention, BIASED), (experts, MOE)], ids=lambda one: ""
)
def test_ranks_add_up_to_the_whole(tmp_path, build, changes):
    """Four ranks share two kv heads as well: each is repeated on two of them."""
    folder = write_tiny(tmp_path, **changes)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    whole = sum_over_ranks(folder, 1, build, x)
    for size in (2, 4):
        assert torch.allclose(sum_over_ranks(folder, size, build, x), whole, atol=1e-5)


@pytest.mark.parametrize("build", [latent_attention, corrected_experts])
def test_ranks_add_up_to_the_whole_of_a_sparse_model(tmp_path, build):
    folder = write_tiny_glm(tmp_path)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    whole = sum_over_ranks(folder, 1, build, x)
    for size in (2, 4):
        assert torch.allclose(sum_over_ranks(folder, size, build, x), whole, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_ranks_add_up_to_the_whole(tmp_path, tied):
    folder = write_tiny(tmp_path, tie_word_embeddings=tied)
    tokens = torch.tensor([0, 319, 160, 159, 5])

    def build(one: Site) -> Embedding:
        return Embedding(one, "model.embed_tokens", 320, 32, tied=tied)

    whole = sum_over_ranks(folder, 1, build, tokens)
    assert torch.equal(whole, open_checkpoint(folder).read("model.embed_tokens.weight")[tokens])
    assert torch.equal(sum_over_ranks(folder, 4, build, tokens), whole)


def test_shares():
    assert Group(2, 4).share(8, "heads") == Share(2, 4)
    assert Group(3, 4).share(2, "heads") == Share(1, 2)
    assert Share(1, 2).of(10) == slice(5, 10)
    with pytest.raises(ConfigError, match="6 heads"):
        Group(0, 4).share(6, "heads")
