"""Checkpoints that nvidia-modelopt and llm-compressor exported, against their own dequantisation.

scripts/make_quantised_fixtures.py says how they were made.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from detour.loading.checkpoint import open_checkpoint
from detour.loading.quantization import AUTO
from detour.loading.scaled import pack_nvfp4

FIXTURES = Path(__file__).parent / "fixtures"
# folder -> (what the configuration says, values of --quantization that agree, kinds of weights)
EXPORTS = {
    "modelopt-qwen3_moe": ("modelopt", ("modelopt", "modelopt_fp4"), {"NVFP4"}),
    "modelopt-glm_moe_dsa": ("modelopt", ("modelopt_fp4",), {"NVFP4"}),
    "modelopt-mixed": ("modelopt", ("modelopt_fp4", "modelopt_fp8"), {"NVFP4", "FP8_TENSOR"}),
    "compressed-nvfp4a16": ("compressed-tensors", ("compressed-tensors",), {"NVFP4"}),
    "compressed-fp8-dynamic": ("compressed-tensors", ("compressed-tensors",), {"FP8_CHANNEL"}),
    "compressed-fp8-block": ("compressed-tensors", ("compressed-tensors",), {"FP8_BLOCK"}),
}


@pytest.mark.parametrize("export", EXPORTS)
def test_weights_are_what_the_exporter_makes_of_them(export):
    """Bit for bit, in the type that the exporter dequantises to."""
    checkpoint = open_checkpoint(FIXTURES / export)
    expected = load_file(FIXTURES / export / "dequantised.safetensors")
    packed = {name for name in checkpoint.names if checkpoint.packed(name)}
    assert packed == set(expected)
    assert {checkpoint.packed(name) for name in packed} == EXPORTS[export][2]
    for name, weight in expected.items():
        assert torch.equal(checkpoint.read(name, dtype=weight.dtype), weight), name


@pytest.mark.parametrize("export", EXPORTS)
def test_the_configuration_names_the_packed_modules_and_no_others(export):
    """For sizes without weights: what is said of a linear module is what its tensors are."""
    method, wishes, _ = EXPORTS[export]
    checkpoint = open_checkpoint(FIXTURES / export)
    assert checkpoint.quantization.method == method
    for name in checkpoint.names:
        if len(checkpoint.shape(name)) == 2 and "embed_tokens" not in name:
            kind = checkpoint.quantization.kind(name.removesuffix(".weight"))
            assert kind == checkpoint.packed(name), name
    for wish in (AUTO, *wishes):
        assert open_checkpoint(FIXTURES / export, quantization=wish).quantization.method == method


def test_packing_gives_the_bytes_that_modelopt_gives():
    original = load_file(FIXTURES / "modelopt-qwen3_moe" / "original.safetensors")
    exported = load_file(FIXTURES / "modelopt-qwen3_moe" / "model.safetensors")
    names = [name for name in original if name.endswith("_proj.weight")]
    assert len(names) == 4
    for name in names:
        module = name.removesuffix(".weight")
        factor = exported[f"{module}.weight_scale_2"]
        packed = pack_nvfp4(original[name], float(factor) * 6 * 448)
        assert torch.allclose(packed.of_row, factor, rtol=1e-6), name
        assert torch.equal(packed.scales.float(), exported[f"{module}.weight_scale"].float())
        assert torch.equal(packed.values, exported[f"{module}.weight"])
