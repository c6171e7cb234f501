"""Encoding and decoding: exact bytes, special tokens, a folder's files, the kinds of a GGUF."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from gguf_files import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import AutoTokenizer
from vocabularies import WORDS, sentencepiece_metadata

from detour.errors import BadRequest, CheckpointError
from detour.loading.tiny_tokenizer import CHAT_TEMPLATE, TURN_END, write_tokenizer
from detour.text.pre_tokenizers import FAMILIES, pre_tokenizer
from detour.text.tokenizer import open_tokenizer

CACHE = Path(__file__).parents[2] / ".cache/smollm2-135m-instruct"
EMBEDDED = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_embedded = pytest.mark.skipif(not EMBEDDED.exists(), reason="the model was not fetched")

many = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@many
@given(text=any_text)
def test_any_text_survives_the_way_there_and_back(byte_level, text):
    ids = byte_level.encode(text, add_special_tokens=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


@many
@given(text=any_text)
def test_sentencepiece_text_survives_but_for_its_own_space(sentencepiece, text):
    text = text.replace("▁", "")
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert sentencepiece.decode(ids, skip_special_tokens=False) == text


def test_bytes_are_exact(byte_level, sentencepiece):
    singles = {byte_level.token_bytes(i) for i in range(byte_level.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles
    assert [sentencepiece.token_bytes(3 + byte) for byte in (0, 65, 240)] == [b"\0", b"A", b"\xf0"]
    words = [sentencepiece.token_bytes(259 + i) for i in range(len(WORDS))]
    assert words == [word.replace("▁", " ").encode() for word in WORDS]
    assert byte_level.token_bytes(10**6) == b"" == byte_level.token_bytes(-1)


def test_a_lone_token_that_is_part_of_a_character_shows_as_such(byte_level):
    first = byte_level.encode("漢", add_special_tokens=False)[0]
    assert byte_level.token_text(first) == "\ufffd"


def test_text_that_is_no_unicode_is_refused(byte_level):
    with pytest.raises(BadRequest, match="lone surrogate"):
        byte_level.encode("a\ud800b")


def test_other_threads_run_while_a_long_text_is_encoded(byte_level):
    """The longest that a counting thread stands still is far less than the encoding takes."""
    text, gaps, done = "the long text goes on " * 20_000, [], threading.Event()

    def count() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=count)
    thread.start()
    start = time.perf_counter()
    byte_level.encode(text)
    took = time.perf_counter() - start
    done.set()
    thread.join()
    assert len(gaps) > 1000 and sum(gap for gap in gaps if gap > took / 2) == 0


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def change(folder, file, **fields):
    path = folder / file
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **fields}))
    return folder


STRINGS = [
    "",
    "the thing in the end",
    "<|im_start|>user\nhi<|im_end|>",
    "<think>a</think> b",
    "🦙 漢字\n\n\ttabs  ",
    "<|im_end|><|im_end|>",
]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}], ids=str)
def test_it_does_what_transformers_does(folder, config):
    change(folder, "tokenizer_config.json", **config)
    oracle, ours = AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    assert (ours.bos_id, ours.eos_ids) == (oracle.bos_token_id, (oracle.eos_token_id,))
    assert ours.vocab_size == len(oracle) and ours.chat_template == oracle.chat_template
    for text in STRINGS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == oracle.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"add_bos_token": True}, [1, 3]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 3, 3]),
        ({"add_bos_token": False}, [3]),
        ({}, [3]),
    ],
)
def test_a_llama_class_obeys_its_flags(folder, config, ids):
    change(folder, "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast", **config)
    assert open_tokenizer(folder).encode(TURN_END) == ids
    assert open_tokenizer(folder).encode(TURN_END, False) == [3]


def test_specials_and_ends_are_found(folder):
    change(folder, "generation_config.json", eos_token_id=[0, 3, 9])
    tokenizer = open_tokenizer(folder)
    assert tokenizer.eos_ids == (3, 0, 9) and tokenizer.token_id(TURN_END) == 3
    assert {0, 1, 2, 3} <= tokenizer.special_ids
    assert tokenizer.token_id("<think>") not in tokenizer.special_ids
    assert tokenizer.token_id("nothing") == -1


def test_a_token_only_the_configuration_knows_is_added(folder):
    change(folder, "tokenizer_config.json", pad_token={"content": "<|pad|>"})
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode("<|pad|>") == [300] and 300 in tokenizer.special_ids


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, ""),
        ({"tokenizer_config.json": {"chat_template": "A"}}, "A"),
        ({"chat_template.json": {"chat_template": "B"}}, "B"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "rag", "template": "R"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
    ],
)
def test_the_chat_template_is_where_it_may_be(folder, files, template):
    (folder / "chat_template.jinja").unlink()
    for file, fields in files.items():
        change(folder, file, **fields)
    assert open_tokenizer(folder).chat_template == template


def test_a_template_file_goes_first(folder):
    change(folder, "tokenizer_config.json", chat_template="other")
    assert open_tokenizer(folder).chat_template == CHAT_TEMPLATE


def test_a_missing_tokenizer_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_named(folder, file, text):
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=file):
        open_tokenizer(folder)


def test_a_kind_without_bytes_is_refused(tmp_path):
    inner = Inner(WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="the decoder WordPiece is not supported"):
        open_tokenizer(tmp_path)


# --- GGUF -----------------------------------------------------------------------------------------


def test_sentencepiece_joins_the_best_scored_neighbours(sentencepiece):
    def words(text: str) -> list[str]:
        ids = sentencepiece.encode(text, add_special_tokens=False)
        return [sentencepiece.token_bytes(i).decode("latin-1") for i in ids]

    assert words("the") == [" the"]
    assert words("thth") == [" ", "th", "th"]
    assert words("tab") == [" ", "t", "ab"]
    assert words("z") == [" ", "z"]  # a byte token


def test_a_file_says_what_stands_around_a_text(tmp_path):
    assert open_spm(tmp_path).encode("a")[0] == 1
    assert open_spm(tmp_path, add_bos_token=False, add_eos_token=True).encode("a")[-1] == 2
    assert open_spm(tmp_path).encode("a", add_special_tokens=False)[0] != 1


def open_spm(tmp_path, **changes):
    return open_tokenizer(
        write_gguf(tmp_path / "m.gguf", "llama", sentencepiece_metadata(**changes))
    )


def test_a_file_may_want_no_first_space(tmp_path):
    tokenizer = open_spm(tmp_path, add_space_prefix=False)
    ids = tokenizer.encode("a", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"a"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_control_tokens_are_special_and_user_defined_ones_are_not(sentencepiece):
    ids = sentencepiece.encode("<|turn|>a<note>b", add_special_tokens=False)
    turn, note = sentencepiece.token_id("<|turn|>"), sentencepiece.token_id("<note>")
    assert turn in ids and note in ids
    assert turn in sentencepiece.special_ids and note not in sentencepiece.special_ids
    assert sentencepiece.decode(ids) == "a<note> b"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"model": "gpt2", "pre": "novel", "merges": []}, "pre-tokenizer 'novel'"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["a zz"]}, "does not fit together"),
        ({"token_type": [1, 1]}, "tokens but 2 token types"),
        ({"tokens": "none"}, "holds no vocabulary"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_told(tmp_path, changes, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        open_spm(tmp_path, **changes)


def cuts(family: str, text: str) -> list[str]:
    """The words a family cuts, as text."""
    found = pre_tokenizer(FAMILIES[family]).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_familys_cuts_lose_nothing(family):
    text = "Hello  world's\n\n  12345 ½ café漢字かな🦙\t{x: 1}, DON'T camelCaseWord \r\n end "
    assert "".join(cuts(family, text)) == text


@pytest.mark.parametrize(
    ("family", "text", "words"),
    [
        ("gpt-2", "I'll go 1234", ["I", "'ll", " go", " 1234"]),
        ("smollm", "go 12", ["go", " ", "1", "2"]),
        ("llama-bpe", "I'LL 12345", ["I", "'LL", " ", "123", "45"]),
        ("qwen2", "x=12\n\n y", ["x", "=", "1", "2", "\n\n", " y"]),
        ("gpt-4o", "camelCase", ["camel", "Case"]),
        ("deepseek-v3", "漢字abc", ["漢字", "abc"]),
        ("deepseek-llm", "a 12", ["a", " ", "12"]),
        ("tekken", "12", ["1", "2"]),
    ],
)
def test_families_cut_as_published(family, text, words):
    assert cuts(family, text) == words


# --- the embedded model ---------------------------------------------------------------------------

# From transformers' conversion of the file, with the published cutting, which that lacks.
GOLDEN = {
    "Hello world": [19556, 905],
    "½ café 🦙": [16738, 37366, 15107, 116, 243],
    "  12 def f(x):": [256, 33, 34, 753, 275, 24, 104, 727],
}


@pytest.fixture(scope="module")
def smollm():
    return open_tokenizer(EMBEDDED)


@needs_embedded
def test_the_embedded_models_text_is_cut_right(smollm):
    assert smollm.chat_template and smollm.bos_id == 1 and smollm.eos_ids[0] == 2
    for text, ids in GOLDEN.items():
        assert smollm.encode(text) == ids
        assert smollm.decode(ids) == text


@needs_embedded
@pytest.mark.slow
def test_the_embedded_model_agrees_with_transformers(smollm):
    """transformers' conversion knows the vocabulary but not how this family cuts digits."""
    oracle = AutoTokenizer.from_pretrained(CACHE, gguf_file=EMBEDDED.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for text in [*STRINGS, *readme.split("\n\n"), "½ ⅓ ²", "مرحبا 1٢3", "\r\n \u00a0x", "👩‍👩‍👧"]:
        for special in (True, False):
            ids = smollm.encode(text, special)
            assert ids == oracle.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert smollm.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_opening_reads_no_more_than_it_needs(folder, tmp_path_factory):
    """A folder without the optional files opens too."""
    bare = tmp_path_factory.mktemp("bare")
    shutil.copy(folder / "tokenizer.json", bare)
    tokenizer = open_tokenizer(bare)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (-1, (), "")
