"""Safetensors folders: what is read, in what memory, and what damaged folders are told."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from detour.errors import CheckpointError
from detour.loading.checkpoint import open_checkpoint
from detour.loading.safetensors import INDEX, SafetensorsSource
from detour.loading.synthetic import write_checkpoint
from detour.loading.tensors import expect_shape

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
}
SHAPES = {
    "model.embed_tokens.weight": (320, 32),
    "model.norm.weight": (32,),
    "model.layers.0.mlp.up_proj.weight": (48, 32),
    "model.layers.0.mlp.experts": (2, 3, 4),
    "scale": (),
}


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model", CONFIG, SHAPES, seed=3, shards=3)


def test_shards_hold_what_one_file_holds(folder, tmp_path):
    whole = write_checkpoint(tmp_path / "whole", CONFIG, SHAPES, seed=3)
    oracle = load_file(whole / "model.safetensors")
    assert len(list(folder.glob("*.safetensors"))) == 3
    for path in (folder, whole):
        checkpoint = open_checkpoint(path)
        assert sorted(checkpoint.names) == sorted(SHAPES)
        for name, shape in SHAPES.items():
            assert checkpoint.shape(name) == shape
            assert torch.equal(checkpoint.read(name), oracle[name])
    assert checkpoint.config["model_type"] == "llama" and not checkpoint.quantization.method


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_stored_type_comes_back_or_is_converted(tmp_path, dtype):
    tensor = torch.randn(40, 24).to(dtype)
    save_file({"x": tensor, "i": torch.arange(5)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert torch.equal(source.read("x"), tensor) and source.read("x").dtype == dtype
    assert torch.equal(source.read("x", dtype=torch.float32), tensor.float())
    assert source.read("i").tolist() == [0, 1, 2, 3, 4]


def test_fp8_weights_come_back(tmp_path):
    tensor = torch.randn(8, 8).to(torch.float8_e4m3fn)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    assert torch.equal(SafetensorsSource(tmp_path).read("x").float(), tensor.float())


def test_a_part_is_the_same_part_of_the_whole(folder):
    checkpoint = open_checkpoint(folder)
    whole = checkpoint.read("model.embed_tokens.weight")
    part = checkpoint.read(
        "model.embed_tokens.weight", rows=slice(9, 77), columns=slice(4, 20), dtype=torch.bfloat16
    )
    assert torch.equal(part, whole[9:77, 4:20].bfloat16())
    vector = checkpoint.read("model.norm.weight")
    assert torch.equal(checkpoint.read("model.norm.weight", rows=slice(3, 9)), vector[3:9])
    empty = checkpoint.read("model.embed_tokens.weight", rows=slice(320, 320))
    assert empty.shape == (0, 32)
    with pytest.raises(ValueError, match="contiguous"):
        checkpoint.read("model.norm.weight", rows=slice(0, 9, 2))


def test_reading_is_in_the_files_order(folder):
    names = SafetensorsSource(folder).names
    assert [SafetensorsSource(folder).entries[n].path.name for n in names] == sorted(
        SafetensorsSource(folder).entries[n].path.name for n in names
    )


def peak_memory(*, reset: bool) -> int:
    """The most megabytes that this process has held in RAM, since it was last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_holds_one_tensor_and_not_the_file(tmp_path):
    """12 tensors of 8 MB, read one by one: the peak grows by far less than the 96 MB."""
    tensor = torch.zeros(2 << 20)
    save_file({f"t{i}": tensor.clone() for i in range(12)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    before = peak_memory(reset=True)
    for name in source.names:
        source.read(name)
        source.read(name, dtype=torch.bfloat16)
    assert peak_memory(reset=False) - before < 48


# --- damage ---------------------------------------------------------------------------------------


def shard(folder, number=2):
    return folder / f"model-{number:05d}-of-00003.safetensors"


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.message.endswith(".") and "\n" not in caught.value.message
    return caught.value.message


def test_a_truncated_shard_names_file_and_tensor(folder):
    data = shard(folder).read_bytes()
    shard(folder).write_bytes(data[:-4])
    said = refusal(folder)
    assert "model-00002-of-00003.safetensors is truncated: tensor scale ends at" in said


@pytest.mark.parametrize("size", [0, 3, 8, 20])
def test_a_header_cut_short_names_the_file(folder, size):
    shard(folder).write_bytes(shard(folder).read_bytes()[:size])
    assert "model-00002-of-00003.safetensors is truncated or no safetensors" in refusal(folder)


def test_a_header_that_is_no_json(folder):
    text = b"{not json}"
    shard(folder).write_bytes(len(text).to_bytes(8, "little") + text)
    assert "its header is not JSON" in refusal(folder)


def write_header(path, header, data=b""):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "takes 8 bytes"),
        ({"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}, "element type 'Q9'"),
        ({"dtype": "F32", "data_offsets": [0, 8]}, "entry of tensor x is damaged"),
        ({"dtype": "F32", "shape": ["a"], "data_offsets": [0, 8]}, "entry of tensor x is damaged"),
        ("nonsense", "entry of tensor x is damaged"),
    ],
)
def test_a_wrong_header_entry_names_the_tensor(tmp_path, entry, sentence):
    write_header(tmp_path / "model.safetensors", {"x": entry}, bytes(8))
    with pytest.raises(CheckpointError, match=sentence):
        SafetensorsSource(tmp_path)


def test_a_missing_shard_says_what_it_held(folder):
    shard(folder).unlink()
    said = refusal(folder)
    assert "lacks the shard model-00002-of-00003.safetensors, which holds 2 of its 5" in said


def test_an_index_that_names_a_tensor_no_shard_has(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost"] = shard(folder, 1).name
    (folder / INDEX).write_text(json.dumps(index))
    said = refusal(folder)
    assert "model-00001-of-00003.safetensors holds the tensor model.ghost, but it does" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(folder, text):
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


def test_an_index_may_not_lead_out_of_the_folder(folder):
    (folder / INDEX).write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    assert "outside its folder" in refusal(folder)


def test_two_shards_without_an_index_may_not_hold_the_same(folder):
    (folder / INDEX).unlink()
    shard(folder, 3).write_bytes(shard(folder, 1).read_bytes())
    assert "both hold the tensor" in refusal(folder)


def test_a_folder_without_weights(folder):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / INDEX).unlink()
    assert "holds no safetensors weights" in refusal(folder)


def test_a_file_cut_after_opening_is_an_error_and_no_crash(folder):
    checkpoint = open_checkpoint(folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"ends inside tensor model\.embed_tokens"):
        checkpoint.read("model.embed_tokens.weight")


def test_a_wrong_shape_names_both(tmp_path):
    tensor = torch.zeros(2, 3)
    assert expect_shape(tensor, (2, 3), "x", tmp_path) is tensor
    with pytest.raises(CheckpointError, match=r"x has shape \[2, 3\], but .* \[3, 2\]"):
        expect_shape(tensor, (3, 2), "x", tmp_path)
