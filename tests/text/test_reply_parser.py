"""Thoughts, answers and calls parted, however the text is cut; blanks around them are nobody's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detour.errors import ConfigError
from detour.text.reasoning import Thinking, find_thinking
from detour.text.reply_parser import reply_syntax

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = "<tool_call>f</tool_call>"


def parser(prompt="<think>", tools=TOOLS, opening="", reasoning="glm45"):
    syntax = reply_syntax(reasoning, "glm47", "").less(thinking=not reasoning, calls=not tools)
    return syntax.parser(prompt, tools, opening)


def read(made, parts, cut=False):
    """[kind, text] of what is said, neighbours joined."""
    said = []
    for kind, text in [p for part in parts for p in made.push(part)] + made.finish(cut):
        if said and said[-1][0] == kind and kind not in ("call", "end"):
            said[-1][1] += text
        else:
            said.append([kind, text])
    return said


def thought(text):
    return ["reasoning", text]


def content(text):
    return ["content", text]


CALLED = [["call", "f"], ["arguments", "{}"], ["end", ""]]


@pytest.mark.parametrize(
    ("prompt", "text", "said"),
    [
        ("<think>\n", "\nhm </think>\n\n yes ", [thought("hm"), content("yes ")]),
        ("<think>", "<think>hm</think>yes", [thought("hm"), content("yes")]),
        ("", " <think>hm", [thought("hm")]),
        ("", "yes <think>", [content("yes <think>")]),
        ("", "\n yes \n", [content("\n yes \n")]),
        ("", "</think>\nyes", [content("yes")]),
        ("", "\n", [content("\n")]),
        ("<think>", "hm</think>\n", [thought("hm")]),
        ("<think>", f"hm {CALL}", [thought("hm"), *CALLED]),
        ("<think>", f"hm </think>\n{CALL}\n", [thought("hm"), *CALLED]),
        ("<think>", f"hm{CALL}\n</think>ok", [thought("hm"), *CALLED, content("ok")]),
        ("<think>", f"a</think>b\n{CALL}\n{CALL}\nc\n", None),
        ("<think>", "use <tool_call> here</think>", [thought("use <tool_call> here")]),
        ("", f"see </think> {CALL}", [content("see </think>"), *CALLED]),
    ],
)
def test_said(prompt, text, said):
    if said is None:
        said = [thought("a"), content("b"), *CALLED, *CALLED, content("c")]
    assert read(parser(prompt), [text]) == said
    assert read(parser(prompt), list(text)) == said


WORDS = ["<think>", "</think>", CALL, "<tool_call>", "f", " ", "\n", "word", "<", "</th", "é"]


@given(
    st.sampled_from(["", "<think>"]),
    st.lists(st.sampled_from(WORDS), max_size=20),
    st.booleans(),
    st.data(),
)
def test_no_cut_changes_what_is_said(prompt, words, cut, data):
    text = "".join(words)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    edges = [0, *places, len(text)]
    parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    whole = read(parser(prompt), [text], cut)
    assert read(parser(prompt), parts, cut) == whole
    assert read(parser(prompt), list(text), cut) == whole
    # Nothing but marks and blanks is lost.
    kept = "".join(text for _, text in whole)
    assert kept.count("word") == text.count("word") and kept.count("é") == text.count("é")


def test_a_call_begun_by_the_prompt():
    made = parser("<think></think><tool_call>", opening="<tool_call>f<arg_key>")
    assert read(made, ["a</arg_key><arg_value>1</arg_value></tool_call>"]) == [
        ["call", "f"],
        ["arguments", '{"a": 1}'],
        ["end", ""],
    ]


def test_without_tools_marks_of_calls_are_text():
    assert read(parser("<think>", ()), [f"a</think>{CALL}"]) == [thought("a"), content(CALL)]


def test_nothing_to_part_is_no_parser():
    assert parser(tools=(), reasoning="") is None


def test_a_model_that_always_thinks():
    always = find_thinking("deepseek-r1")
    assert always.opened_by("<|Assistant|>") and not always.opened_by("<think>\n\n</think>\n\n")
    assert find_thinking("qwen3") == Thinking()
    said = read(parser("hello", (), reasoning="deepseek_r1"), ["hm</think>yes"])
    assert said == [thought("hm"), content("yes")]


def test_other_marks():
    made = reply_syntax("kimi", "", "").parser("", ())
    assert read(made, list("◁think▷hm◁/think▷yes")) == [thought("hm"), content("yes")]


def test_names():
    assert find_thinking("") is None
    assert find_thinking("auto", "{{ '</think>' }}") == Thinking()
    assert find_thinking("auto", "{{ messages }}") is None
    with pytest.raises(ConfigError, match="no reasoning parser 'mistral'; there are: auto, glm45"):
        find_thinking("mistral")
