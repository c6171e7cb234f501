"""Two tiny vocabularies, one of each way of writing bytes."""

import pytest
from gguf_files import write_gguf

from detour.loading.synthetic import write_tokenizer
from detour.text.tokenizer import Tokenizer, open_tokenizer

WORDS = ["▁the", "▁", "the", "th", "he", "t", "h", "e", "a", "b", "▁a", "ab", "ü", ".", "<", "s"]


def sentencepiece_metadata(**changes: object) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokens += ["<|turn|>", "<note>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 3, 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(WORDS))] + [0.0, 0.0]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(folder)
    return open_tokenizer(folder)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    file = tmp_path_factory.mktemp("spm") / "spm.gguf"
    return open_tokenizer(write_gguf(file, "llama", sentencepiece_metadata()))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)
