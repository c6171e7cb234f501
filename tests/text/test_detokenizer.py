"""Streaming text: whatever the tokens and the stop strings, the pieces are those of the whole."""

import codecs

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detour.text.detokenizer import Detokenizer

many = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# Text that shares beginnings with the stop strings, and characters of one to four bytes.
texts = st.text(alphabet="ab<s/>.\n é漢🦙", max_size=30)
stops = st.lists(st.text(alphabet="ab<s/>\n🦙", min_size=1, max_size=5), max_size=4)


def tokens_of(tokenizer, data):
    """Tokens of a text, with stray ones (parts of characters, special ones, padding) among them."""
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False)
    stray = st.integers(0, tokenizer.vocab_size + 3)
    for at, token in data.draw(st.lists(st.tuples(st.integers(0, 40), stray), max_size=6)):
        ids.insert(min(at, len(ids)), token)
    return ids


def cut(text: str, stop: list[str], include: bool) -> tuple[str, str]:
    """The naive rule: look at every beginning of the text, shortest first, for one that ends so."""
    for end in range(1, len(text) + 1):
        for found in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(found):
                return (text[:end] if include else text[: end - len(found)]), found
    return text, ""


def may_still_stop(text: str, stop: list[str]) -> int:
    """How many of the last characters could be the beginning of a stop string."""
    ends = (n for n in range(len(text), 0, -1) if any(s.startswith(text[-n:]) for s in stop))
    return next(ends, 0)


def whole_characters(tokenizer, ids, skip=True, at_start=False):
    """The tokens' text, less the part of a character that it may end with."""
    hidden = tokenizer.special_ids if skip else ()
    data = b"".join(tokenizer.token_bytes(token) for token in ids if token not in hidden)
    _, used = codecs.utf_8_decode(data, "replace", False)
    text = tokenizer.decode(ids, skip, at_start=at_start)
    return text.removesuffix("\ufffd") if data[used:] else text


@many
@given(data=st.data(), skip=st.booleans(), at_start=st.booleans())
def test_the_pieces_add_up_to_the_whole(tokenizer, data, skip, at_start):
    ids = tokens_of(tokenizer, data)
    stream = Detokenizer(tokenizer, skip, at_start=at_start)
    pieces = [stream.push(token) for token in ids]
    whole = whole_characters(tokenizer, ids, skip, at_start)
    assert "".join(pieces) + stream.finish() == whole
    assert stream.stopped == ""


@many
@given(data=st.data(), stop=stops, include=st.booleans())
def test_stop_strings_cut_where_the_naive_rule_cuts(tokenizer, data, stop, include):
    ids = tokens_of(tokenizer, data)
    stream = Detokenizer(tokenizer, stop=stop, include_stop=include)
    shown = "".join(stream.push(token) for token in ids) + stream.finish()
    whole = whole_characters(tokenizer, ids)
    assert (shown, stream.stopped) == cut(whole, stop, include)


@many
@given(data=st.data(), stop=stops)
def test_only_what_could_become_a_stop_string_is_held_back(tokenizer, data, stop):
    """After every token: shown = all text so far, less a part of a character, less a beginning."""
    stream = Detokenizer(tokenizer, stop=stop)
    plain = Detokenizer(tokenizer)
    shown = text = ""
    for token in tokens_of(tokenizer, data):
        shown += stream.push(token)
        text += plain.push(token)
        if stream.stopped:
            break
        assert shown == text[: len(text) - may_still_stop(text, stop)]


def test_an_emoji_never_arrives_in_parts(byte_level):
    stream = Detokenizer(byte_level)
    ids = byte_level.encode("a🦙b", add_special_tokens=False)
    assert len(ids) > 3
    pieces = [stream.push(token) for token in ids]
    assert [piece for piece in pieces if piece] == ["a", "🦙", "b"]
    assert stream.finish() == ""


def test_a_part_of_a_character_at_the_end_is_not_shown(byte_level):
    stream = Detokenizer(byte_level)
    ids = byte_level.encode("é🦙", add_special_tokens=False)[:-1]
    assert stream.push_all(ids) == "é"
    assert stream.finish() == ""


def test_bytes_that_can_become_nothing_are_shown_at_once(byte_level):
    lead = next(i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == b"\xf0")
    stream = Detokenizer(byte_level)
    assert stream.push(lead) == ""
    assert stream.push_all(byte_level.encode("x", add_special_tokens=False)) == "\ufffdx"


def test_special_tokens_are_shown_if_asked(byte_level):
    ids = byte_level.encode("<|im_start|>hi<|im_end|><think>", add_special_tokens=False)
    assert Detokenizer(byte_level).push_all(ids) == "hi<think>"
    assert Detokenizer(byte_level, False).push_all(ids) == "<|im_start|>hi<|im_end|><think>"


def test_a_special_token_can_be_a_stop_string(byte_level):
    ids = byte_level.encode("hi<|im_end|>more", add_special_tokens=False)
    stream = Detokenizer(byte_level, skip_special_tokens=False, stop=["<|im_end|>"])
    assert stream.push_all(ids) == "hi" and stream.stopped == "<|im_end|>"


def test_after_a_stop_string_nothing_more_is_shown(byte_level):
    stream = Detokenizer(byte_level, stop=["b"], include_stop=True)
    assert stream.push_all(byte_level.encode("aab", add_special_tokens=False)) == "aab"
    assert stream.push_all(byte_level.encode("bcd", add_special_tokens=False)) == ""
    assert stream.finish() == "" and stream.stopped == "b"


def test_held_text_is_shown_when_it_turns_out_harmless(byte_level):
    stream = Detokenizer(byte_level, stop=["###"])
    pieces = [stream.push(t) for t in byte_level.encode("a##b#", add_special_tokens=False)]
    assert pieces == ["a", "", "", "##b", ""]
    assert stream.finish() == "#"


@pytest.mark.parametrize(("at_start", "text"), [(True, "the a"), (False, " the a")])
def test_a_first_space_belongs_to_what_continues(sentencepiece, at_start, text):
    ids = sentencepiece.encode("the a", add_special_tokens=False)
    stream = Detokenizer(sentencepiece, at_start=at_start)
    assert stream.push_all(ids) + stream.finish() == text
