"""Quantised checkpoints under the names of plain ones: what is read, cut and refused."""

import logging

import pytest
import torch
from scaled_files import PACKS, pack_folder, plain_of, rewrite
from tiny import write_tiny

from detour.errors import CheckpointError
from detour.loading.checkpoint import open_checkpoint
from detour.loading.scaled import unpack_scaled

# Wide enough for a matrix of several blocks, the last of them not full.
SIZES = {"hidden_size": 160, "intermediate_size": 272, "head_dim": 40}
UP = "model.layers.0.mlp.up_proj"
KIND = {
    "nvfp4-modelopt": "NVFP4",
    "nvfp4-compressed": "NVFP4",
    "fp8-block": "FP8_BLOCK",
    "fp8-tensor": "FP8_TENSOR",
    "fp8-channel": "FP8_CHANNEL",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.fixture(params=PACKS)
def packed(request, plain, tmp_path):
    folder = pack_folder(plain, tmp_path / "packed", PACKS[request.param])
    return request.param, folder


def test_a_packed_checkpoint_reads_as_what_it_means(packed):
    form, folder = packed
    checkpoint, meaning = open_checkpoint(folder), open_checkpoint(plain_of(folder))
    assert sorted(checkpoint.names) == sorted(meaning.names)
    for name in meaning.names:
        expected = meaning.read(name)
        assert checkpoint.shape(name) == meaning.shape(name)
        assert torch.equal(checkpoint.read(name), expected), name
        assert torch.equal(checkpoint.read(name, dtype=torch.bfloat16), expected.bfloat16())
        linear = expected.dim() == 2 and ".layers." in name
        assert checkpoint.packed(name) == (KIND[form] if linear else "")
    sizes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.9 * sizes < checkpoint.nbytes < sizes


@pytest.mark.parametrize("name", [f"{UP}.weight", "model.layers.1.mlp.down_proj.weight"])
def test_any_rows_and_whole_blocks_of_columns_can_be_cut(packed, name):
    form, folder = packed
    checkpoint = open_checkpoint(folder)
    whole = checkpoint.read(name)
    parts = [slice(None), slice(0, 128), slice(128, None), slice(128, 128)]
    for rows in (slice(None), slice(0, 1), slice(127, 131), slice(77, None), slice(5, 5)):
        for columns in parts:
            part = checkpoint.read_scaled(name, rows=rows, columns=columns)
            expected = whole[rows, columns]
            assert part.shape == expected.shape
            assert torch.equal(unpack_scaled(part), expected), (rows, columns)
            assert torch.equal(checkpoint.read(name, rows=rows, columns=columns), expected)
    odd = checkpoint.read(name, columns=slice(3, 77))  # unpacked, anything can be cut
    assert torch.equal(odd, whole[:, 3:77])


def test_a_cut_through_a_block_is_refused(packed):
    form, folder = packed
    checkpoint = open_checkpoint(folder)
    cut = slice(72, 144)
    if form in ("fp8-tensor", "fp8-channel"):
        part = checkpoint.read_scaled(f"{UP}.weight", columns=cut)
        assert torch.equal(unpack_scaled(part), checkpoint.read(f"{UP}.weight", columns=cut))
        return
    with pytest.raises(CheckpointError, match=f"{UP}.weight.*columns 72 to 144.*fewer ranks"):
        checkpoint.read_scaled(f"{UP}.weight", columns=cut)


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("fp8-block", lambda scale: scale.bfloat16()),
        ("fp8-block", lambda scale: scale.log2().round().exp2().to(torch.float8_e8m0fnu)),
        ("fp8-tensor", lambda scale: scale.view(1)),
        ("fp8-tensor", lambda scale: scale.view(1, 1).half()),
        ("fp8-channel", lambda scale: scale.view(-1)),
        ("fp8-channel", lambda scale: scale.float()),
    ],
)
def test_scales_in_the_types_and_shapes_that_are_about(plain, tmp_path, form, change):
    """ue8m0 is how DeepSeek's kernels want them; flat ones are older exports'."""
    folder = pack_folder(plain, tmp_path / "x", PACKS[form])
    name = f"{UP}.weight_scale_inv" if form == "fp8-block" else f"{UP}.weight_scale"
    tensors = {}

    def alter(all_tensors):
        all_tensors[name] = change(all_tensors[name]).contiguous()
        tensors.update(all_tensors)

    rewrite(folder, alter)
    scale = tensors[name].float()
    if form == "fp8-block":
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:272, :160]
    elif form == "fp8-channel":
        scale = scale.view(-1, 1)
    expected = tensors[f"{UP}.weight"].float() * scale
    assert torch.equal(open_checkpoint(folder).read(f"{UP}.weight"), expected)


def test_dtypes_decide_and_not_names(plain, tmp_path):
    """One expert-like matrix of a block is packed, its neighbour is not."""
    folder = pack_folder(plain, tmp_path / "x", PACKS["nvfp4-modelopt"], lambda m: m == UP)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.packed(f"{UP}.weight") == "NVFP4"
    assert checkpoint.packed("model.layers.0.mlp.gate_proj.weight") == ""


def drop(last):
    return lambda tensors: tensors.pop(f"{UP}.{last}")


def put(last, tensor):
    return lambda tensors: tensors.update({f"{UP}.{last}": tensor})


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("nvfp4-modelopt", drop("weight_scale"), (f"{UP}.weight ", "weight_scale", "missing")),
        ("nvfp4-modelopt", drop("weight_scale_2"), (f"{UP}.weight ", "weight_scale_2", "missing")),
        ("nvfp4-compressed", drop("weight_global_scale"), ("weight_global_scale", "missing")),
        ("fp8-block", drop("weight_scale_inv"), (f"{UP}.weight ", "weight_scale_inv", "missing")),
        ("fp8-tensor", drop("weight_scale"), (f"{UP}.weight ", "missing")),
        (
            "fp8-block",
            put("weight_scale_inv", torch.ones(2, 2)),
            (f"{UP}.weight_scale_inv", "[2, 2]", "[3, 2]"),
        ),
        (
            "nvfp4-modelopt",
            put("weight_scale", torch.ones(272, 9).to(torch.float8_e4m3fn)),
            (f"{UP}.weight_scale", "[272, 9]", "[272, 10]"),
        ),
        (
            "nvfp4-modelopt",
            put("weight_scale_2", torch.ones(3)),
            (f"{UP}.weight_scale_2", "[3]"),
        ),
        (
            "nvfp4-modelopt",
            put("weight_scale", torch.ones(272, 10, dtype=torch.uint8)),
            (f"{UP}.weight", "U8", "not supported"),
        ),
        (
            "nvfp4-modelopt",
            put("pre_quant_scale", torch.ones(160)),
            (f"{UP}.weight", "pre_quant_scale", "not supported"),
        ),
        (
            "fp8-block",
            put("weight", torch.ones(272, 160).to(torch.float8_e5m2)),
            (f"{UP}.weight", "F8_E5M2", "not supported"),
        ),
        (
            "nvfp4-compressed",
            put("weight_packed", torch.ones(272, 20, dtype=torch.int32)),
            (f"{UP}.weight_packed", "I32", "not supported"),
        ),
        (
            "fp8-tensor",
            put("weight", torch.ones(272, 160)),
            (f"{UP}.weight of F32", "weight_scale", "not supported"),
        ),
        (
            "fp8-tensor",
            put("weight_scale", torch.ones(272, 5, dtype=torch.uint8)),
            (f"{UP}.weight", "U8", "not supported"),
        ),
    ],
)
def test_what_cannot_be_read_is_named(plain, tmp_path, form, change, words):
    folder = rewrite(pack_folder(plain, tmp_path / "x", PACKS[form]), change)
    checkpoint = open_checkpoint(folder)
    checkpoint.shape("model.layers.1.mlp.up_proj.weight")  # the others are well
    with pytest.raises(CheckpointError) as caught:
        checkpoint.shape(f"{UP}.weight")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert str(folder) in caught.value.message


def test_scales_without_a_weight_are_surplus_and_kv_scales_are_not(plain, tmp_path, caplog):
    def change(tensors):
        tensors["model.layers.0.mlp.side_proj.weight_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)

    folder = rewrite(pack_folder(plain, tmp_path / "x", PACKS["nvfp4-modelopt"]), change)
    with caplog.at_level(logging.INFO):
        names = open_checkpoint(folder).names
    assert "model.layers.0.mlp.side_proj.weight_scale" in names
    assert not any(name.endswith("k_scale") for name in names)
    assert "1 scales for a KV cache" in caplog.text
