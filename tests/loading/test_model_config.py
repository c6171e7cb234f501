"""One configuration whichever way it was written, and one sentence where it cannot be read."""

import json
import math

import gguf_files
import numpy as np
import pytest
from gguf_files import HEAD_DIM, model_metadata, write_gguf

from detour.errors import CheckpointError
from detour.loading.model_config import (
    eos_ids,
    merge,
    read_generation_defaults,
    read_model_config,
)

PLAIN = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


def folder(tmp_path, config=PLAIN, generation=None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_what_was_left_out_is_filled_in(tmp_path):
    config = read_model_config(folder(tmp_path))
    assert config["num_key_value_heads"] == 4 and config["head_dim"] == 16
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["dtype"] == ""


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_the_type_has_one_spelling(tmp_path, spelling, value):
    assert read_model_config(folder(tmp_path, {**PLAIN, spelling: value}))["dtype"] == "bfloat16"


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "yarn", **YARN}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
    ],
)
def test_rope_has_one_spelling(tmp_path, written):
    config = read_model_config(folder(tmp_path, {**PLAIN, **written}))
    assert config["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 5e5, **YARN}
    assert "rope_scaling" not in config and "rope_theta" not in config


def test_rope_by_layer_type_passes_through(tmp_path):
    rope = {"full": {"rope_type": "default"}, "sliding": {"rope_type": "default"}}
    config = read_model_config(folder(tmp_path, {**PLAIN, "rope_parameters": rope}))
    assert config["rope_parameters"] == rope


def test_overrides_merge_into_nested_objects(tmp_path):
    path = folder(tmp_path, {**PLAIN, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    config = read_model_config(path, {"rope_scaling": {"factor": 8.0}, "vocab_size": 400})
    assert config["rope_parameters"]["factor"] == 8.0
    assert config["rope_parameters"]["rope_type"] == "yarn" and config["vocab_size"] == 400
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    assert merge({"a": {"b": 1}}, {"a": 2}) == {"a": 2}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": None}, r"config\.json lacks the field hidden_size"),
        ({"model_type": None}, "lacks the field model_type"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be int, got '4'"),
        ({"vocab_size": True}, "vocab_size must be int, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number"),
        ({"rope_scaling": [1]}, "must be JSON objects"),
    ],
)
def test_a_missing_or_wrong_field_is_named(tmp_path, change, sentence):
    config = {k: v for k, v in {**PLAIN, **change}.items() if v is not None}
    with pytest.raises(CheckpointError, match=sentence):
        read_model_config(folder(tmp_path, config))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"a": 1,}', r"config\.json is not valid JSON: .* at line 1"),
        (b"[1]", "must hold a JSON object, found list"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_config_that_is_no_json_object(tmp_path, text, sentence):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=sentence):
        read_model_config(tmp_path)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no model folder: it has no config\.json"):
        read_model_config(tmp_path)


def test_generation_defaults_are_the_samplers_fields(tmp_path):
    given = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_length": 9}
    path = folder(tmp_path, generation=given)
    assert read_generation_defaults(path) == {"temperature": 0.6, "top_k": 20}
    assert read_generation_defaults(tmp_path / "nowhere") == {}
    with pytest.raises(CheckpointError, match="top_p must be float, got 'high'"):
        read_generation_defaults(folder(tmp_path, generation={"top_p": "high"}))


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (5, [7, 8], (7, 8)),
        (5, None, (5,)),
        ([5, 6], {}, (5, 6)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(tmp_path, config, generation, ids):
    given = {"eos_token_id": generation} if isinstance(generation, list) else generation
    assert eos_ids(folder(tmp_path, {**PLAIN, "eos_token_id": config}, given)) == ids


def test_a_wrong_end_token_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id must be"):
        eos_ids(folder(tmp_path, {**PLAIN, "eos_token_id": "</s>"}))


# --- GGUF -----------------------------------------------------------------------------------------


def test_a_ggufs_metadata_in_the_same_words(tmp_path):
    theirs, _ = gguf_files.llama_tensors()
    vocab = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata() | vocab, theirs)
    config = read_model_config(path)
    assert config == {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 40,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "",
    }
    assert eos_ids(path) == (2,) and read_generation_defaults(path) == {}


def test_a_gguf_without_an_output_tensor_is_tied(tmp_path):
    theirs, _ = gguf_files.llama_tensors()
    del theirs["output.weight"]
    config = read_model_config(write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), theirs))
    assert config["tie_word_embeddings"] is True


def test_a_mixture_of_experts(tmp_path):
    metadata = model_metadata(
        expert_count=8,
        expert_used_count=2,
        expert_feed_forward_length=32,
        attention__key_length=32,
        attention__value_length=32,
        rope__dimension_count=32,
    )
    config = read_model_config(write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata))
    assert config["model_type"] == "qwen3_moe" and config["head_dim"] == 32
    assert config["num_experts"] == 8 and config["num_experts_per_tok"] == 2
    assert config["moe_intermediate_size"] == 32 and config["norm_topk_prob"] is True
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}


def test_yarn_in_a_gguf(tmp_path):
    metadata = model_metadata(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    rope = read_model_config(write_gguf(tmp_path / "m.gguf", "qwen2", metadata))["rope_parameters"]
    assert rope == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def test_linear_scaling_in_a_gguf(tmp_path):
    metadata = model_metadata(rope__scaling__type="linear", rope__scaling__factor=2.0)
    rope = read_model_config(write_gguf(tmp_path / "m.gguf", "llama", metadata))["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0}


def llama3_frequencies(factor: float, theta: float, dim: int) -> np.ndarray:
    """The divisors as the scaling's authors state it: by wavelength, in three ranges."""
    low, high, old = 1.0, 4.0, 8192
    found = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < old / high:
            found.append(1.0)
        elif wavelength > old / low:
            found.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_behind_its_frequencies(tmp_path, factor):
    metadata = model_metadata(rope__freq_base=500000.0)
    tensors = {"rope_freqs.weight": llama3_frequencies(factor, 500000.0, HEAD_DIM)}
    config = read_model_config(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors))
    assert config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_frequencies_of_another_recipe_are_no_guess(tmp_path):
    tensors = {"rope_freqs.weight": np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), tensors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight follows no known"):
        read_model_config(path)


@pytest.mark.parametrize(
    ("arch", "changes", "sentence"),
    [
        ("mamba", {}, "architecture 'mamba' is not supported; supported are llama, qwen2"),
        ("llama", {"rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
        (
            "llama",
            {"attention__key_length": 16, "attention__value_length": 8},
            "keys of 16 and values of 8",
        ),
        ("llama", {"attention__head_count": [4, 2]}, "head_count differs between layers"),
    ],
)
def test_what_would_change_the_computation_is_refused(tmp_path, arch, changes, sentence):
    path = write_gguf(tmp_path / "m.gguf", arch, model_metadata(**changes))
    with pytest.raises(CheckpointError, match=sentence):
        read_model_config(path)


def test_a_field_missing_from_a_gguf_is_named(tmp_path):
    metadata = model_metadata()
    del metadata[".block_count"]
    with pytest.raises(CheckpointError, match=r"m\.gguf lacks the field num_hidden_layers"):
        read_model_config(write_gguf(tmp_path / "m.gguf", "llama", metadata))


def test_a_ggufs_recommended_sampling(tmp_path):
    given = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata() | given)
    assert read_generation_defaults(path) == {"temperature": 0.5, "top_k": 20}
