"""The GGUF header reader against the gguf package's writer, and on damaged files."""

import gguf_files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detour.errors import CheckpointError
from detour.gguf_header import end_of_text_ids, read_gguf_header

METADATA = {
    "general.name": "Größe 🦙",
    ".block_count": 7,
    ".rope.freq_base": 0.5,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "", "ü", "<|im_end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.scores": [0.5, -1.0, 2.0, 0.0],
}
TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.ones((2, 3, 32), np.float16),
}


@pytest.fixture
def file(tmp_path):
    return gguf_files.write_gguf(tmp_path / "x.gguf", "llama", METADATA, TENSORS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "x.gguf"
    return gguf_files.write_gguf(file, "llama", METADATA, TENSORS)


def test_metadata_and_tensors_come_back(file):
    header = read_gguf_header(file)
    for key, value in METADATA.items():
        full = "llama" + key if key.startswith(".") else key
        assert header.metadata[full] == value and type(header.metadata[full]) is type(value)
    assert header.architecture == "llama" and header.get("block_count") == 7
    assert header.get("absent", 3) == 3
    assert header.tensors["a"].shape == (3, 4) and header.tensors["b"].shape == (2, 3, 32)
    data = file.read_bytes()
    for name, array in TENSORS.items():
        at = header.tensors[name].offset
        assert data[at : at + array.nbytes] == array.tobytes()
    assert header.file_size == len(data)


def test_the_end_tokens_include_the_turns_end():
    base = {"tokenizer.ggml.tokens": METADATA["tokenizer.ggml.tokens"]}
    types = {"tokenizer.ggml.token_type": [1, 1, 1, 3]}
    assert end_of_text_ids({**base, **types, "tokenizer.ggml.eos_token_id": 1}) == (1, 3)
    assert end_of_text_ids({**base, **types, "tokenizer.ggml.eot_token_id": 0}) == (0, 3)
    # as text, not as a control token, it ends nothing
    assert end_of_text_ids({**base, "tokenizer.ggml.token_type": [1] * 4}) == ()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GGML" + bytes(60), "does not start with 'GGUF'"),
        (b"", "does not start with 'GGUF'"),
        (b"GGUF", "truncated"),
        (b"GGUF\x01\0\0\0" + bytes(16), "of version 1"),
        (b"GGUF\0\0\0\x03" + bytes(16), "big-endian"),
        (b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\x01" + b"\0" * 7, "truncated"),
    ],
)
def test_what_is_no_gguf_is_told_in_a_sentence(tmp_path, data, sentence):
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=sentence):
        read_gguf_header(file)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_gguf_header(tmp_path / "x.gguf")


def test_a_header_cut_anywhere_is_an_error_and_never_a_crash(file):
    data = file.read_bytes()
    end = min(t.offset for t in read_gguf_header(file).tensors.values())
    for size in range(0, end - 32, 7):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_gguf_header(file)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(4, 400), byte=st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused(whole, at, byte):
    data = bytearray(whole.read_bytes())
    data[at] = byte
    file = whole.with_name("flipped.gguf")
    file.write_bytes(data)
    try:
        read_gguf_header(file)
    except CheckpointError as error:
        assert "flipped.gguf" in error.message
