"""Configurations of GLM's and DeepSeek's models: what is read, and what is refused by name."""

import pytest
from tiny_glm import MODELS

from detour.errors import CheckpointError
from detour.loading.model_config import normalise
from detour.models import find, tensor_shapes


def read(name: str, **changes):
    config = {name: value for name, value in {**MODELS[name], **changes}.items() if value != "gone"}
    config = normalise(config, "config.json")
    return find(config).read(config)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("glm5", {"scoring_func": "softmax"}, ("scoring_func", "softmax", "sigmoid")),
        ("glm5", {"topk_method": "greedy"}, ("topk_method", "greedy")),
        ("glm5", {"moe_router_dtype": "bfloat16"}, ("moe_router_dtype", "bfloat16")),
        ("glm5", {"moe_layer_freq": 2}, ("moe_layer_freq", "2")),
        ("glm5", {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ("glm5", {"mlp_bias": True}, ("mlp_bias",)),
        ("glm5", {"num_key_value_heads": 2}, ("num_key_value_heads", "2", "4")),
        ("glm5", {"qk_head_dim": 64}, ("qk_head_dim", "64", "40")),
        ("glm5", {"kv_lora_rank": "gone"}, ("kv_lora_rank",)),
        ("glm5", {"index_topk": "gone"}, ("index_topk",)),
        ("glm5", {"index_topk": 0}, ("index_topk", "0")),
        ("glm5", {"index_head_dim": 8}, ("index_head_dim", "8", "16")),
        ("glm5", {"q_lora_rank": None}, ("q_lora_rank",)),
        ("glm5", {"layer_types": ["full_attention"] * 4}, ("layer_types",)),
        ("glm5", {"mlp_layer_types": ["dense"] * 3}, ("mlp_layer_types", "4 layers")),
        ("glm5", {"mlp_layer_types": ["dense"] * 3 + ["wide"]}, ("mlp_layer_types", "wide")),
        ("glm5", {"indexer_types": ["shared"] + ["full"] * 3}, ("indexer_types", "first layer")),
        ("glm5", {"indexer_types": ["full"] * 3}, ("indexer_types", "4 layers")),
        ("glm5", {"index_topk_pattern": "FXSF"}, ("index_topk_pattern", "FXSF")),
        ("glm5", {"num_experts_per_tok": 9}, ("num_experts_per_tok", "8")),
        ("glm5", {"n_group": 3}, ("n_group", "3")),
        ("glm5", {"n_group": 8}, ("n_group", "8", "two")),
        ("glm5", {"n_group": 4, "topk_group": 5}, ("topk_group", "5", "4")),
        ("glm5", {"n_group": 4, "topk_group": 1}, ("num_experts_per_tok", "3", "2")),
        ("deepseek_v3", {"layer_types": ["sliding_attention"] * 4}, ("layer_types",)),
        ("glm4_moe", {"sliding_window": 64}, ("sliding_window", "64")),
    ],
)
def test_refused(name, changes, words):
    with pytest.raises(CheckpointError) as caught:
        read(name, **changes)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_a_model_is_read(name, caplog):
    read(name)
    assert "not read" not in caplog.text


def selecting(**changes) -> str:
    """F or S for each of eight layers."""
    (indexing,) = read("glm5", num_hidden_layers=8, **changes).indexing
    return "".join("F" if own else "S" for own in indexing.own)


def test_which_layers_select():
    """GLM-5.2's full configuration has both ways: its list and its rule agree."""
    assert selecting() == "FFFFFFFF"
    assert selecting(index_topk_freq=4, index_skip_topk_offset=3) == "FFFSSSFS"
    assert selecting(index_topk_freq=3) == "FFSSFSSF"
    assert selecting(index_topk_pattern="FSSSFSSS") == "FSSSFSSS"
    kinds = ["full", "shared"] * 4
    assert selecting(indexer_types=kinds, index_topk_freq=4) == "FSFSFSFS"


def test_how_rope_pairs_numbers():
    assert read("glm5", indexer_rope_interleave="gone").indexing[0].sizes.interleaved
    assert not read("deepseek_v32").indexing[0].sizes.interleaved
    assert read("deepseek_v32").sizes.interleaved


def test_yarn_stretches_the_scale_where_the_angles_do_not():
    """DeepSeek-V3's own values: mscale and mscale_all_dim of 1 at a factor of 40."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    config = read("deepseek_v3", rope_parameters="gone", rope_theta=1e4, rope_scaling=yarn)
    assert config.rope.attention_factor == 1.0
    assert config.sizes.scale == pytest.approx(40**-0.5 * 1.3688879454113936**2)


def test_half_of_a_head_turns_unless_it_is_said():
    assert read("glm4_moe", partial_rotary_factor="gone").decoder.rope.rotated == 8
    assert read("glm4_moe", partial_rotary_factor=1.0).decoder.rope.rotated == 16


def test_tensors_of_a_checkpoint():
    shapes = tensor_shapes(MODELS["glm52"])
    layer = "model.layers.1."
    assert shapes[f"{layer}self_attn.q_b_proj.weight"] == (4 * 40, 48)
    assert shapes[f"{layer}self_attn.kv_a_proj_with_mqa.weight"] == (32 + 16, 64)
    assert shapes[f"{layer}self_attn.kv_b_proj.weight"] == (4 * (24 + 32), 32)
    assert shapes[f"{layer}self_attn.indexer.wq_b.weight"] == (16 * 32, 48)
    assert shapes[f"{layer}self_attn.indexer.weights_proj.weight"] == (16, 64)
    assert shapes[f"{layer}mlp.gate.e_score_correction_bias"] == (8,)
    assert shapes[f"{layer}mlp.shared_experts.up_proj.weight"] == (32, 64)
    assert "model.layers.0.mlp.gate.weight" not in shapes
    assert "model.layers.2.self_attn.indexer.wk.weight" not in shapes
