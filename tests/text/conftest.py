"""Two tiny vocabularies, one of each way of writing bytes."""

import pytest
from gguf_files import write_gguf
from vocabularies import sentencepiece_metadata

from detour.loading.tiny_tokenizer import write_tokenizer
from detour.text.tokenizer import Tokenizer, open_tokenizer


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
