"""The most memory that loading takes: little more than the checkpoint, whatever it is packed in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import CONFIG, write_tiny

from detour.models import tensor_shapes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT = 1.3  # of the bytes of the checkpoint
SIZES = {"hidden_size": 1024, "dtype": "bfloat16"}
MOE = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 512}
LAYERS = {"bf16": 1, "fp8": 2, "nvfp4": 4, "dense": 11}  # about 200 MB each
DENSE = {"intermediate_size": 2816}

# VmHWM, the most that was resident, can be set back to what is resident now.
MEASURE = """
import re, sys
from pathlib import Path
from detour.worker.build import build_model
from detour.worker.settings import WorkerSettings
def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
def load(folder):
    settings = WorkerSettings(Path(folder), device="cpu", dtype=sys.argv[3], progress=False)
    return build_model(settings)
load(sys.argv[1])  # libraries and kernels are there now
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
built = load(sys.argv[2])
print(resident("VmHWM") - before, built.weight_bytes)
"""


def packed(form: str, name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors of random bytes: only their sizes matter."""
    source = torch.Generator().manual_seed(len(name))
    if form in ("bf16", "dense") or "_proj" not in name:
        draws = torch.randint(0, 64, (*shape, 2), generator=source, dtype=torch.uint8)
        return {name: draws.view(torch.bfloat16).squeeze(-1)}
    rows, columns = shape
    stem = name.removesuffix(".weight")
    draws = {"generator": source, "dtype": torch.uint8}
    if form == "fp8":
        values = torch.randint(0, 100, shape, **draws).view(torch.float8_e4m3fn)
        scales = torch.ones(-(-rows // 128), -(-columns // 128))
        return {name: values, f"{stem}.weight_scale_inv": scales}
    return {
        name: torch.randint(0, 256, (rows, columns // 2), **draws),
        f"{stem}.weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        f"{stem}.weight_scale_2": torch.tensor(0.01),
    }


def write_large(folder: Path, form: str) -> int:
    """A checkpoint in two files; gives its bytes."""
    config = {**CONFIG, **SIZES, "num_hidden_layers": LAYERS[form]}
    config |= DENSE if form == "dense" else MOE
    folder.mkdir()
    names = list(tensor_shapes(config).items())
    weight_map, size = {}, 0
    for number, half in enumerate((names[::2], names[1::2])):
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in half:
            tensors |= packed(form, name, shape)
        file = folder / f"model-0000{number + 1}-of-00002.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        size += file.stat().st_size
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return size


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, "bfloat16") for form in LAYERS), ("dense", "float32")]
)
def test_peak_memory_while_loading(tmp_path, form, dtype):
    """Dense bfloat16 weights stay so where float32 is computed in."""
    size = write_large(tmp_path / "large", form)
    assert 180e6 < size < 240e6
    small = write_tiny(tmp_path / "small")
    command = [sys.executable, "-c", MEASURE, str(small), str(tmp_path / "large"), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, held = map(int, run.stdout.split())
    assert 0.9 * size < held < 1.1 * size
    print(f"{form} in {dtype}: {peak / size:.3f} of {size / 1e6:.0f} MB")
    assert peak < LIMIT * size, f"{peak / 1e6:.0f} MB for a checkpoint of {size / 1e6:.0f} MB"
