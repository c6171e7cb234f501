"""GGUF weights: names, row order, numbers, packed bytes, and files that are not whole."""

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from gguf_files import HEADS, HIDDEN, KV_HEADS, llama_tensors, model_metadata, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from detour.errors import CheckpointError
from detour.loading.checkpoint import open_checkpoint
from detour.loading.gguf import QUANTISED
from detour.loading.packing import INTEGER_KINDS, to_float, unpack

Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def llama(tmp_path):
    theirs, ours = llama_tensors()
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), theirs)), ours


def test_every_tensor_comes_back_under_its_hugging_face_name(llama):
    checkpoint, ours = llama
    assert set(checkpoint.names) == set(ours)
    for name, array in ours.items():
        assert checkpoint.shape(name) == array.shape
        assert torch.equal(checkpoint.read(name), torch.from_numpy(array)), name
        assert checkpoint.packed(name) == ""
    assert checkpoint.nbytes == sum(array.nbytes for array in ours.values())


@pytest.mark.slow
def test_it_reads_what_transformers_reads(tmp_path):
    theirs, _ = llama_tensors(kind="Q8_0")
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), theirs)
    oracle = load_gguf_checkpoint(str(path))["config"]
    model = LlamaForCausalLM(LlamaConfig(**oracle))
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor.float()), name
    for name in ("hidden_size", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert checkpoint.config[name] == oracle[name]


@pytest.mark.parametrize("name", [Q, K, "model.layers.0.mlp.up_proj.weight"])
def test_a_part_is_the_same_part_of_the_whole(llama, name):
    checkpoint, ours = llama
    rows, columns = slice(5, 23), slice(7, 40)
    part = checkpoint.read(name, rows=rows, columns=columns)
    assert torch.equal(part, torch.from_numpy(ours[name][rows, columns]))
    half = checkpoint.read(name, rows=rows, dtype=torch.bfloat16)
    assert torch.equal(half, torch.from_numpy(ours[name][rows]).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_rows_give_the_numbers_that_reading_gives(tmp_path, kind):
    theirs, _ = llama_tensors(kind=kind)
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), theirs)
    checkpoint = open_checkpoint(path)
    for name in (Q, K, "model.layers.1.mlp.down_proj.weight"):
        assert checkpoint.packed(name) == kind
        packed = checkpoint.read_packed(name)
        assert packed.shape == checkpoint.shape(name)
        assert np.array_equal(to_float(unpack(packed)), checkpoint.read(name).numpy())
        some = checkpoint.read_packed(name, rows=slice(3, 19))
        assert np.array_equal(some.data, packed.data[3:19])


def test_quantised_queries_are_put_back_in_order(tmp_path):
    theirs, ours = llama_tensors(kind="Q8_0")
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), theirs)
    error = open_checkpoint(path).read(Q).numpy() - ours[Q]
    assert np.abs(error).max() < 0.02  # half a step of 8 bits; another row would differ by ~1


def random_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """Packed rows of any kind: random bits, with every float16 small and finite."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.random.default_rng(1).integers(0, 256, (rows * columns // block, size), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        data[:, at : at + 2] = np.frombuffer(np.float16(0.037).tobytes(), np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_kind_equals_the_gguf_package_row_by_row(tmp_path, kind):
    rows = random_rows(kind, 24, 512)
    path = write_gguf(
        tmp_path / "m.gguf",
        "qwen2",
        model_metadata(),
        {"token_embd.weight": (rows, kind)},
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.shape("model.embed_tokens.weight") == (24, 512)
    read = checkpoint.read("model.embed_tokens.weight").numpy()
    for ours, row in zip(read, rows, strict=True):
        expected = gguf.quants.dequantize(row[None], gguf.GGMLQuantizationType[kind])[0]
        assert np.isfinite(expected).all() and np.array_equal(ours, expected)
    if kind in INTEGER_KINDS:
        packed = checkpoint.read_packed("model.embed_tokens.weight")
        assert np.array_equal(packed.data, rows)


def test_plain_kinds_keep_their_type(tmp_path):
    array = np.linspace(-2, 2, HIDDEN * 40, dtype=np.float32).reshape(40, HIDDEN)
    path = write_gguf(
        tmp_path / "m.gguf",
        "qwen3",
        model_metadata(),
        {"token_embd.weight": array.astype(np.float16), "output.weight": (array, "BF16")},
    )
    checkpoint = open_checkpoint(path)
    half = checkpoint.read("model.embed_tokens.weight")
    assert half.dtype == torch.float16 and torch.equal(half, torch.from_numpy(array).half())
    head = checkpoint.read("lm_head.weight")
    assert head.dtype == torch.bfloat16 and torch.equal(head, torch.from_numpy(array).bfloat16())


def test_qwen_rows_and_biases_stay_as_they_are(tmp_path):
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((HEADS * 16, HIDDEN)).astype(np.float32)
    bias = rng.standard_normal(HEADS * 16).astype(np.float32)
    tensors = {"blk.0.attn_q.weight": weight, "blk.0.attn_q.bias": bias}
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", "qwen2", model_metadata(), tensors)
    )
    stem = "model.layers.0.self_attn.q_proj."
    assert torch.equal(checkpoint.read(stem + "weight"), torch.from_numpy(weight))
    assert torch.equal(checkpoint.read(stem + "bias", rows=slice(4, 9)), torch.tensor(bias[4:9]))


def test_a_llama_bias_is_put_back_in_order_too(tmp_path):
    bias = np.arange(KV_HEADS * 16, dtype=np.float32)
    tensors = {"blk.0.attn_k.bias": gguf_files.converter_order(bias, KV_HEADS)}
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), tensors)
    )
    read = checkpoint.read("model.layers.0.self_attn.k_proj.bias", rows=slice(3, 30))
    assert read.tolist() == bias[3:30].tolist()


def test_a_layers_experts_are_tensors_of_their_own(tmp_path):
    rng = np.random.default_rng(3)
    experts = rng.standard_normal((3, 32, HIDDEN)).astype(np.float32)
    tensors = {
        "blk.1.ffn_up_exps.weight": (experts, "Q8_0"),
        "blk.1.ffn_gate_inp.weight": rng.standard_normal((3, HIDDEN)).astype(np.float32),
    }
    metadata = model_metadata(expert_count=3, expert_used_count=2, expert_feed_forward_length=32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata, tensors))
    assert "model.layers.1.mlp.gate.weight" in checkpoint
    for e in range(3):
        name = f"model.layers.1.mlp.experts.{e}.up_proj.weight"
        assert checkpoint.shape(name) == (32, HIDDEN)
        assert np.abs(checkpoint.read(name).numpy() - experts[e]).max() < 0.02
        part = checkpoint.read_packed(name, rows=slice(8, 16))
        assert np.array_equal(to_float(unpack(part)), checkpoint.read(name)[8:16].numpy())


def test_a_split_model_is_one_model(tmp_path):
    theirs, ours = llama_tensors()
    names = list(theirs)
    for i, part in enumerate((names[:7], names[7:])):
        file = tmp_path / f"m-{i + 1:05d}-of-00002.gguf"
        write_gguf(file, "llama", model_metadata(), {name: theirs[name] for name in part})
    checkpoint = open_checkpoint(tmp_path / "m-00001-of-00002.gguf")
    assert set(checkpoint.names) == set(ours)
    assert torch.equal(checkpoint.read(Q), torch.from_numpy(ours[Q]))
    with pytest.raises(CheckpointError, match="name its first part"):
        open_checkpoint(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf is missing"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_a_truncated_file_says_which_tensor(tmp_path):
    theirs, _ = llama_tensors()
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(), theirs)
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated: tensor blk\.1\."):
        open_checkpoint(path)


def test_an_unsupported_type_names_tensor_and_type(tmp_path):
    rows = np.zeros((4, 66), np.uint8)  # IQ2_XXS: 66 bytes for 256 weights
    path = write_gguf(
        tmp_path / "m.gguf", "llama", model_metadata(), {"token_embd.weight": (rows, "IQ2_XXS")}
    )
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has the unsupported type IQ2_"):
        open_checkpoint(path)


def test_a_missing_tensor_is_named(llama):
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.9"):
        llama[0].read("model.layers.9.mlp.up_proj.weight")
    assert "model.layers.9.mlp.up_proj.weight" not in llama[0]
