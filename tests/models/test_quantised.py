"""Quantised checkpoints through the whole model, against transformers on what their weights mean.

Weights are exact in float32, so what is left is the rounding of sums.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from step_driver import Driver, make_runner

from detour.errors import ConfigError
from detour.loading.checkpoint import open_checkpoint
from detour.models import supported
from detour.ops import native
from detour.ops.device import probe
from detour.worker.build import build_model
from detour.worker.settings import WorkerSettings

FIXTURES = Path(__file__).parents[1] / "loading" / "fixtures"
EXPORTS = sorted(folder.name for folder in FIXTURES.iterdir())
IDS = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(8)).tolist()


def model_type(export: str) -> str:
    return json.loads((FIXTURES / export / "config.json").read_text())["model_type"]


@pytest.fixture(params=EXPORTS)
def export(request):
    if model_type(request.param) not in supported():
        pytest.skip(f"{model_type(request.param)} is not here yet")
    return request.param


def plain_copy(export: str, folder: Path) -> Path:
    """The exported checkpoint as an unquantised one, in float32."""
    source = FIXTURES / export
    tensors = load_file(source / "model.safetensors")
    checkpoint = open_checkpoint(source)
    for name, weight in load_file(source / "dequantised.safetensors").items():
        # Some exporters dequantise to bfloat16; test_exports.py has ours equal to that.
        exact = weight.dtype == torch.float32
        tensors[name] = weight if exact else checkpoint.read(name, dtype=torch.float32)
    plain = {name: tensor.float() for name, tensor in tensors.items() if "_scale" not in name}
    plain = {name: tensor for name, tensor in plain.items() if not name.endswith("packed")}
    folder.mkdir()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def logits(folder: Path, pieces=(37, 22, 1), **settings) -> torch.Tensor:
    driver = Driver(make_runner(folder, page_size=16, **settings))
    driver.admit(0, IDS)
    return torch.cat([driver.logits([(0, count)])[0] for count in pieces])


def test_logits_are_transformers_on_the_dequantised_weights(export, tmp_path):
    plain = plain_copy(export, tmp_path / "plain")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle.eval()(torch.tensor([IDS])).logits[0]
    for checkpoint in (plain, FIXTURES / export):
        got = logits(checkpoint)
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max(), checkpoint


@pytest.mark.skipif(bool(native.reasons(probe("cpu"))), reason="needs the C++ kernels")
def test_chunks_do_not_change_a_bit(export):
    """A prompt whole, in chunks and token by token: expanded weights meet the same products."""
    whole = logits(FIXTURES / export, (60,))
    assert torch.equal(logits(FIXTURES / export), whole)
    alone = logits(FIXTURES / export, (1,) * 60)
    if model_type(export) == "glm_moe_dsa":  # its plain checkpoint differs by that much as well
        assert torch.allclose(alone, whole, rtol=0, atol=1e-6)
    else:
        assert torch.equal(alone, whole)


def test_packed_weights_take_less_memory(export, tmp_path):
    """In float32 a plain copy would take four bytes a number."""
    sizes = []
    for folder in (FIXTURES / export, plain_copy(export, tmp_path / "plain")):
        settings = WorkerSettings(folder, device="cpu", dtype="float32", progress=False)
        sizes.append(build_model(settings).weight_bytes)
    saved = sum(
        t.numel() for t in load_file(FIXTURES / export / "dequantised.safetensors").values()
    )
    bytes_each = 9 / 16 if "fp8" not in export else 1.1
    if export == "modelopt-mixed":
        bytes_each = 1.0
    assert sizes[0] < sizes[1] - saved * (4 - bytes_each) + 8192  # scales of rows


def test_a_wish_that_contradicts_ends_the_start():
    with pytest.raises(ConfigError, match="modelopt NVFP4"):
        make_runner(FIXTURES / "modelopt-qwen3_moe", quantization="fp8")


def test_dummy_weights_follow_the_configuration():
    """Without a weight file, memory is what the real checkpoint would take."""
    sizes = []
    for load_format in ("auto", "dummy"):
        settings = WorkerSettings(
            FIXTURES / "modelopt-qwen3_moe",
            device="cpu",
            dtype="bfloat16",
            load_format=load_format,
            progress=False,
        )
        sizes.append(build_model(settings).weight_bytes)
    assert sizes[0] == sizes[1]
