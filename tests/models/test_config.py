"""Configurations: what changes the computation and is not computed is refused by name."""

import logging

import pytest
from tiny import CONFIG

from detour.errors import CheckpointError
from detour.loading.model_config import normalise
from detour.models import find, supported, tensor_shapes

MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 16}


def read(**changes):
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value != "absent"}
    config = normalise(config, "config.json")
    return find(config).read(config)


def rope(**parameters) -> dict:
    return {"rope_parameters": {"rope_theta": 1e4, **parameters}}


def test_supported_models():
    assert {"llama", "qwen2", "qwen3", "qwen3_moe"} <= set(supported())
    assert not {"fields", "model"} & set(supported())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt9"}, ("gpt9", "llama")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"model_type": "qwen2", "sliding_window": 64}, ("sliding_window", "64")),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True},
            ("sliding_window", "64"),
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types",)),
        ({"model_type": "qwen2", "attention_bias": False}, ("attention_bias", "False")),
        ({"model_type": "qwen3", "mlp_bias": True}, ("mlp_bias", "True")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3")),
        ({"intermediate_size": "absent"}, ("intermediate_size",)),
        ({"intermediate_size": "many"}, ("intermediate_size", "many")),
        ({"rms_norm_eps": True}, ("rms_norm_eps", "True")),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings",)),
        (rope(rope_type="longrope"), ("longrope", "yarn")),
        (rope(rope_type="linear"), ("factor",)),
        (rope(rope_type="linear", factor=0.5), ("factor", "0.5")),
        (rope(rope_type="linear", factor="2"), ("factor", "2")),
        (rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0), ("original_max_position",)),
        (rope(rope_type="default", mscale=0.3), ("mscale", "0.3")),
        (rope(rope_type="default", partial_rotary_factor=0.4), ("pairs",)),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1.0}}},
            ("rope_parameters",),
        ),
        ({**MOE, "num_experts_per_tok": 9}, ("num_experts_per_tok", "9")),
        ({**MOE, "num_experts": None}, ("num_local_experts",)),
        ({**MOE, "mlp_only_layers": ["one"]}, ("mlp_only_layers",)),
    ],
)
def test_refused(changes, words):
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_window_that_is_switched_off_is_none():
    read(model_type="qwen2", sliding_window=4096, use_sliding_window=False)


def test_old_rope_spelling_and_lengths():
    old = {"rope_parameters": "absent", "rope_theta": 5e5}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = read(**old, rope_scaling=yarn)
    assert (config.rope.kind, config.rope.theta, config.longest_context) == ("yarn", 5e5, 1024)
    assert read(**old, rope_scaling={"type": "linear", "factor": 2.0}).longest_context == 512
    assert read(**old, rope_scaling={"type": "dynamic", "factor": 2.0}).longest_context == 256


def test_sparse_layers():
    config = read(**MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.sparse == (False, True, False, False, False, True)


def test_fields_nobody_reads_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        read(clip_qkv=8.0, architectures=["LlamaForCausalLM"])
    assert "clip_qkv" in caplog.text
    assert "architectures" not in caplog.text


def test_tensor_shapes():
    shapes = tensor_shapes({**CONFIG, **MOE})
    assert shapes["model.layers.1.mlp.experts.7.down_proj.weight"] == (32, 16)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (8,)
    assert "lm_head.weight" not in tensor_shapes({**CONFIG, "tie_word_embeddings": True})
