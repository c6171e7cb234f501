"""`detour quantize`: what is written, that it loads, that it goes on after a kill, what it refuses."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scaled_files import rewrite, set_config
from step_driver import Driver, make_runner
from tiny import CONFIG
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from detour.cli import main
from detour.errors import CheckpointError
from detour.loading.checkpoint import open_checkpoint
from detour.loading.quantize import STATE, Errors, open_job, run
from detour.loading.scaled import pack_fp8, pack_nvfp4, unpack_scaled
from detour.loading.synthetic import write_checkpoint
from detour.models import tensor_shapes

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 128, "mlp_only_layers": [0]}


def write(folder: Path, *, shards: int = 3, **changes) -> Path:
    config = {**CONFIG, **SIZES, **changes}
    shapes = tensor_shapes(config)
    return write_checkpoint(folder, config, shapes, shards=shards, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models") / "moe", **MOE)


def quantise(source: Path, target: Path, form: str, choice: str = "auto", ignored=()):
    return run(open_job(source, target, form, choice, ignored), lambda amount: None)


def packed_names(folder: Path) -> set[str]:
    checkpoint = open_checkpoint(folder)
    return {name for name in checkpoint.names if checkpoint.packed(name)}


def test_nvfp4_packs_the_routed_experts_and_leaves_the_rest(moe, tmp_path):
    target = tmp_path / "out"
    errors = quantise(moe, target, "nvfp4")
    plain, got = open_checkpoint(moe), open_checkpoint(target)
    assert sorted(got.names) == sorted(plain.names)
    assert packed_names(target) == {name for name in plain.names if ".experts." in name}
    for name in plain.names:
        weight = plain.read(name)
        if not got.packed(name):
            assert torch.equal(got.read(name), weight) and got.read(name).dtype == weight.dtype
            continue
        largest = float(weight.abs().max())
        if "down_proj" not in name:  # gate and up have one float32 scale
            other = name.replace("gate", "?").replace("up", "gate").replace("?", "up")
            largest = max(largest, float(plain.read(other).abs().max()))
        assert torch.equal(got.read(name), unpack_scaled(pack_nvfp4(weight, largest)))
    assert list(errors) == [1] and errors[1].matrices == 12
    assert 0.07 < errors[1].relative <= errors[1].worst < 0.12


def test_fp8_packs_the_linears_in_blocks(moe, tmp_path):
    target = tmp_path / "out"
    errors = quantise(moe, target, "fp8")
    plain, got = open_checkpoint(moe), open_checkpoint(target)
    linears = {name for name in plain.names if name.endswith("_proj.weight")}
    assert packed_names(target) == linears and len(linears) == 2 * 4 + 3 + 12
    for name in linears:
        assert torch.equal(got.read(name), unpack_scaled(pack_fp8(plain.read(name).float())))
    assert list(errors) == [0, 1] and errors[0].matrices == 7
    assert 0.01 < errors[0].relative < 0.04


@pytest.mark.parametrize("form", ["nvfp4", "fp8"])
@pytest.mark.parametrize("choice", ["experts", "linears"])
def test_what_the_configuration_says_is_so(moe, tmp_path, form, choice):
    target = tmp_path / "out"
    quantise(moe, target, form, choice, ["*.v_proj"])
    got = open_checkpoint(target, quantization="modelopt_fp4" if form == "nvfp4" else "fp8")
    for name in got.names:
        if len(got.shape(name)) == 2 and "embed_tokens" not in name:
            assert got.quantization.kind(name.removesuffix(".weight")) == got.packed(name), name
    assert not any("v_proj" in name for name in packed_names(target))
    beside = target / "hf_quant_config.json"
    assert beside.is_file() == (form == "nvfp4")
    if form == "nvfp4":
        inner = json.loads(beside.read_text())["quantization"]
        config = json.loads((target / "config.json").read_text())["quantization_config"]
        assert inner["exclude_modules"] == config["ignore"]
        assert "lm_head" in config["ignore"] and "model.layers.1.mlp.gate" in config["ignore"]
        if choice == "experts":
            assert "model.layers.0.*" in config["ignore"]


def test_other_files_come_along_and_the_index_is_whole(moe, tmp_path):
    target = tmp_path / "out"
    quantise(moe, target, "nvfp4")
    there = {file.name for file in target.iterdir()}
    assert there == {file.name for file in moe.iterdir()} | {"hf_quant_config.json"}
    assert (target / "tokenizer.json").read_bytes() == (moe / "tokenizer.json").read_bytes()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors |= dict.fromkeys(load_file(target / file), file)
    assert tensors == index["weight_map"]


def test_names_and_types_are_those_of_modelopts_export(tmp_path):
    """Of the same architecture, experts alone; we calibrate no activations."""
    exported = FIXTURES / "modelopt-glm_moe_dsa"
    config = json.loads((exported / "config.json").read_text())
    del config["quantization_config"]
    plain = write_checkpoint(
        tmp_path / "plain", config, tensor_shapes(config), dtype=torch.bfloat16
    )
    quantise(plain, tmp_path / "out", "nvfp4")
    ours, theirs = (
        {
            name: (tensor.dtype, tensor.shape)
            for name, tensor in load_file(folder / "model.safetensors").items()
            # transformers keeps a router in float32
            if "weight" in name and not name.endswith("mlp.gate.weight")
        }
        for folder in (tmp_path / "out", exported)
    )
    assert ours == theirs


def test_transformers_dequantises_fp8_alike(llama, tmp_path):
    """Its loader for such checkpoints, on the tensors as they were written."""
    quantise(llama, tmp_path / "out", "fp8")
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    got, names = open_checkpoint(tmp_path / "out"), packed_names(tmp_path / "out")
    assert len(names) == 14
    for name in names:
        scales = tensors[f"{name}_scale_inv"]
        weight = Fp8Dequantize(None)._dequantize_one(tensors[name], scales, torch.float32)
        assert torch.equal(weight, got.read(name)), name


@pytest.mark.parametrize(("form", "bound"), [("nvfp4", 0.35), ("fp8", 0.2)])
def test_the_result_is_served(moe, tmp_path, form, bound):
    quantise(moe, tmp_path / "out", form)
    outputs = []
    for folder in (moe, tmp_path / "out"):
        driver = Driver(make_runner(folder))
        driver.admit(0, list(range(20, 60)))
        outputs.append(driver.logits([(0, 40)])[0])
    change = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0.001 < change < bound


# --- going on -------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from detour.loading.quantize import open_job, run
seen = 0
def advance(amount):
    global seen
    seen += 1
    if seen > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
run(open_job(Path(sys.argv[1]), Path(sys.argv[2]), "nvfp4"), advance)
"""


def test_a_killed_run_goes_on_with_the_file_it_was_at(moe, tmp_path):
    whole, target = tmp_path / "whole", tmp_path / "out"
    expected = quantise(moe, whole, "nvfp4")
    first = len(open_job(moe, tmp_path / "x", "nvfp4").files["model-00001-of-00003.safetensors"])
    command = [sys.executable, "-c", KILLED, str(moe), str(target), str(first + 3)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    there = {file.name for file in target.iterdir()}
    done = target / "model-00001-of-00003.safetensors"
    assert done.name in there and STATE in there and "config.json" not in there
    with pytest.raises(CheckpointError, match="model folder"):
        open_checkpoint(target)
    before = done.stat().st_mtime_ns
    got = quantise(moe, target, "nvfp4")
    assert done.stat().st_mtime_ns == before
    assert got == expected
    files = {file.name: file.read_bytes() for file in whole.iterdir()}
    assert {file.name: file.read_bytes() for file in target.iterdir()} == files


def test_other_arguments_do_not_go_on(moe, llama, tmp_path):
    target = tmp_path / "out"

    def stop(amount: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(open_job(moe, target, "nvfp4"), stop)
    for job in (
        open_job(moe, target, "fp8"),
        open_job(moe, target, "nvfp4", "linears"),
        open_job(llama, target, "nvfp4"),
    ):
        with pytest.raises(CheckpointError, match="another quantisation"):
            run(job, lambda amount: None)
    quantise(moe, target, "nvfp4")


# --- refusals -------------------------------------------------------------------------------------


def test_nothing_is_written_over(moe, tmp_path):
    target = tmp_path / "out"
    quantise(moe, target, "nvfp4")
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    with pytest.raises(CheckpointError, match="is there already"):
        quantise(moe, target, "nvfp4")
    with pytest.raises(CheckpointError, match="is there already"):
        quantise(moe, moe, "nvfp4")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is there already"):
        quantise(moe, tmp_path / "file", "nvfp4")
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before


def test_what_cannot_be_quantised_is_told(moe, llama, tmp_path, monkeypatch):
    done = tmp_path / "done"
    quantise(moe, done, "nvfp4")
    for source, choice, words in (
        (done, "auto", "quantised already"),
        (FIXTURES / "compressed-fp8-block", "auto", "quantised already"),
        (llama, "experts", "no routed experts"),
        (tmp_path / "x.gguf", "auto", "GGUF"),
        (tmp_path / "none", "auto", "no config.json"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_job(source, tmp_path / "out", "nvfp4", choice)

    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")

    single = rewrite(write(tmp_path / "single", shards=1), spoil)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight.*not finite"):
        quantise(single, tmp_path / "out", "fp8")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="GB free"):
        quantise(llama, tmp_path / "small", "fp8")


def test_layers_beyond_the_model_and_odd_widths_stay_plain(tmp_path):
    """A multi-token-prediction layer lies behind the others; 24 columns are no blocks of 16."""
    source = write(tmp_path / "in", shards=1, intermediate_size=24)
    set_config(source, num_hidden_layers=1)
    quantise(source, tmp_path / "out", "nvfp4")
    names = packed_names(tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.0.mlp.down_proj.weight" not in names
    assert not any("layers.1." in name for name in names)


def test_errors_add_up():
    one, other = Errors(2, 1.0, 4.0, 0.6, "a"), Errors(1, 3.0, 12.0, 0.5, "b")
    both = one.and_those(other)
    assert both == other.and_those(one) == Errors(3, 4.0, 16.0, 0.6, "a")
    assert both.relative == 0.5 and Errors().relative == 0.0


def test_the_command_prints_what_was_lost(moe, tmp_path, capsys):
    target = tmp_path / "out"
    assert main(["quantize", str(moe), str(target), "--format", "nvfp4"]) == 0
    out = capsys.readouterr().out
    assert "relative RMS" in out and "12" in out and "instead of" in out
    assert main(["quantize", str(moe), str(target), "--format", "nvfp4"]) == 1
    assert "is there already: nothing is written over" in capsys.readouterr().err
