"""What quantization_config and hf_quant_config.json say, and what is refused."""

import json

import pytest

from detour.errors import CheckpointError, ConfigError
from detour.loading.quantization import (
    Quantization,
    covering_globs,
    matches,
    read_quantization,
)

WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def modelopt(**more) -> dict:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", **more}


def compressed(weights=WEIGHTS, **more) -> dict:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


FP8_RELEASE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}
MIXED = modelopt(
    quant_algo="MIXED_PRECISION",
    quantized_layers={
        "model.layers.3.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp": {"quant_algo": "FP8"},
    },
    exclude_modules=["model.layers.78*"],
)


def read(tmp_path, given=None, wish="auto", beside=None) -> Quantization:
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    return read_quantization(tmp_path, {"quantization_config": given}, wish)


@pytest.mark.parametrize(
    ("pattern", "module", "meant"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("model.layers.0.*", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1*", "model.layers.11.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("*.mlp.gate", "model.layers.4.mlp.gate", True),
        ("*.mlp.gate", "model.layers.4.mlp.gate_proj", False),
        ("*self_attn*", "model.layers.4.self_attn.q_a_proj", True),
        ("*.fused_qkv_a_proj_with_mqa", "model.layers.4.self_attn.q_a_proj", True),
        ("*.fused_qkv_a_proj_with_mqa", "model.layers.4.self_attn.kv_a_proj_with_mqa", True),
        ("*.fused_qkv_a_proj_with_mqa", "model.layers.4.self_attn.kv_b_proj", False),
        ("model.layers.4.mlp.gate_up_proj", "model.layers.4.mlp.gate_proj", True),
        ("qkv_proj", "model.layers.4.self_attn.k_proj", True),
        ("re:.*self_attn.*", "model.layers.4.self_attn.k_proj", True),
        ("re:model.layers.4.mlp.gate$", "model.layers.4.mlp.gate_proj", False),
        ("Linear", "model.layers.4.mlp.gate_proj", True),
    ],
)
def test_patterns(pattern, module, meant):
    assert matches(pattern, module) == meant


@pytest.mark.parametrize(
    ("given", "module", "kind"),
    [
        (modelopt(ignore=["lm_head", "*self_attn*"]), "model.layers.3.mlp.up_proj", "NVFP4"),
        (modelopt(ignore=["lm_head", "*self_attn*"]), "model.layers.3.self_attn.q_proj", ""),
        (modelopt(quant_algo="FP8"), "model.layers.3.mlp.up_proj", "FP8_TENSOR"),
        (modelopt(quant_algo="FP8_PB_WO"), "model.layers.3.mlp.up_proj", "FP8_BLOCK"),
        (FP8_RELEASE, "model.layers.0.mlp.gate_proj", "FP8_BLOCK"),
        (FP8_RELEASE, "model.layers.0.mlp.gate", ""),
        (FP8_RELEASE, "lm_head", ""),
        ({"quant_method": "fp8"}, "model.layers.0.mlp.gate_proj", "FP8_TENSOR"),
        (MIXED, "model.layers.3.mlp.experts.17.up_proj", "NVFP4"),
        (MIXED, "model.layers.3.mlp.shared_experts.up_proj", ""),
        (MIXED, "model.layers.0.mlp.up_proj", "FP8_TENSOR"),
        (MIXED, "model.layers.78.mlp.experts.17.up_proj", ""),
        (compressed(ignore=["re:.*gate$"]), "model.layers.3.mlp.experts.1.up_proj", "NVFP4"),
        (compressed(ignore=["re:.*gate$"]), "model.layers.3.mlp.gate", ""),
        (compressed(FP8), "model.layers.3.mlp.up_proj", "FP8_CHANNEL"),
        ({}, "model.layers.3.mlp.up_proj", ""),
        (None, "model.layers.3.mlp.up_proj", ""),
    ],
)
def test_kind_of_a_module(tmp_path, given, module, kind):
    assert read(tmp_path, given).kind(module) == kind


def test_a_target_of_some_modules_goes_before_all_linears(tmp_path):
    groups = {
        "group_0": {"targets": ["Linear"], "weights": FP8},
        "group_1": {"targets": ["re:.*experts.*"], "weights": WEIGHTS},
    }
    found = read(tmp_path, {"quant_method": "compressed-tensors", "config_groups": groups})
    assert found.kind("model.layers.3.mlp.experts.1.up_proj") == "NVFP4"
    assert found.kind("model.layers.3.self_attn.o_proj") == "FP8_CHANNEL"


def test_hf_quant_config_beside_the_configuration(tmp_path):
    beside = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm*"]}}
    found = read(tmp_path, None, beside=beside)
    assert (found.method, found.algorithm, found.ignored) == ("modelopt", "NVFP4", ("lm*",))
    assert read(tmp_path, modelopt()) == found
    with pytest.raises(CheckpointError, match=r"FP8.*hf_quant_config\.json beside it says NVFP4"):
        read(tmp_path, modelopt(quant_algo="FP8"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, ("quantization_config", "'awq'", "modelopt")),
        ({"bits": 4}, ("quant_method", "None")),
        ("fp8", ("quantization_config", "'fp8'")),
        (modelopt(quant_algo="NVFP4_AWQ"), ("quant_algo", "NVFP4_AWQ", "W4A16_NVFP4")),
        (modelopt(quant_algo=None), ("quant_algo",)),
        (modelopt(group_size=32), ("group_size", "32")),
        (modelopt(quant_algo="MIXED_PRECISION"), ("quantized_layers",)),
        (modelopt(ignore="lm_head"), ("ignore", "'lm_head'")),
        ({**FP8_RELEASE, "weight_block_size": [64, 64]}, ("weight_block_size", "[64, 64]")),
        ({**FP8_RELEASE, "fmt": "e5m2"}, ("fmt", "e5m2")),
        (compressed({**WEIGHTS, "type": "int"}), ("group_0", "4-bit int by tensor_group")),
        (compressed({**WEIGHTS, "group_size": 32}), ("group_0", "4-bit float")),
        (compressed({**FP8, "strategy": "block", "block_structure": [64, 64]}), ("group_0",)),
        (compressed(transform_config={"config_groups": {"u": {}}}), ("transform_config",)),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), ("sparse-24-bitmask",)),
        ({"quant_method": "compressed-tensors"}, ("config_groups",)),
    ],
)
def test_refused(tmp_path, given, words):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, given)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("given", "wish"),
    [
        (modelopt(), "modelopt_fp4"),
        (modelopt(), "modelopt"),
        (modelopt(quant_algo="FP8"), "modelopt_fp8"),
        (MIXED, "modelopt_fp4"),
        (MIXED, "modelopt_fp8"),
        (FP8_RELEASE, "fp8"),
        (compressed(), "compressed-tensors"),
    ],
)
def test_a_flag_that_says_what_is_so(tmp_path, given, wish):
    assert read(tmp_path, given, wish) == read(tmp_path, given)


@pytest.mark.parametrize(
    ("given", "wish", "words"),
    [
        (None, "fp8", ("--quantization fp8", "detour quantize")),
        (modelopt(), "fp8", ("--quantization fp8", "modelopt NVFP4", "leave the flag out")),
        (modelopt(), "modelopt_fp8", ("modelopt NVFP4",)),
        (FP8_RELEASE, "compressed-tensors", ("quantised with fp8",)),
        (compressed(), "modelopt_fp4", ("quantised with compressed-tensors",)),
    ],
)
def test_a_flag_that_contradicts(tmp_path, given, wish, words):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, given, wish)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.param == "quantization"


def test_globs_cover_the_plain_modules_and_no_others():
    experts = [
        f"model.layers.{layer}.mlp.experts.{number}.up_proj"
        for layer in (1, 11)
        for number in (0, 3)
    ]
    plain = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj"]
    plain += ["model.layers.1.mlp.gate", "model.layers.1.mlp.shared_experts.up_proj"]
    globs = covering_globs(plain, experts)
    assert globs == [
        "lm_head",
        "model.layers.0.*",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_experts.*",
    ]
    assert all(any(matches(glob, module) for glob in globs) for module in plain)
    assert not any(matches(glob, module) for glob in globs for module in experts)
