"""Every syntax of tool calls: read back from what models write, however it is cut."""

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detour.errors import ConfigError
from detour.text.scan import Piece
from detour.text.tool_calls import find_tool_parser, tool_parsers
from detour.text.tool_schema import Tools

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "nights": {"type": "integer"},
                    "guests": {"type": "array"},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
BOOK = {"place": 'Åbo "north"\nhut', "nights": 3, "guests": [{"n": "a}b"}, None, True]}
CALLS = [("book", BOOK), ("clock", {}), ("book", {"place": "007"})]


def bare(value):
    return value if isinstance(value, str) else dumps(value)


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def glm(name, arguments, gap=""):
    pairs = [
        f"<arg_key>{k}</arg_key>{gap}<arg_value>{bare(v)}</arg_value>{gap}"
        for k, v in arguments.items()
    ]
    return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'


def hermes_backwards(name, arguments):
    return f'<tool_call>{{"arguments": {dumps(arguments)}, "name": "{name}"}}</tool_call>'


def hermes_text(name, arguments):
    """Arguments as a string that holds the object."""
    inner = dumps(dumps(arguments))
    return f'<tool_call>{{"name": "{name}", "arguments": {inner}}}</tool_call>'


def llama3(name, arguments):
    return f'{{"name": "{name}", "parameters": {dumps(arguments)}}}'


def deepseek_v3(name, arguments):
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
    )


def deepseek_v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"


def deepseek_v32(name, arguments):
    parameters = [
        f'<｜DSML｜parameter name="{k}" string="{dumps(isinstance(v, str))}">{bare(v)}'
        "</｜DSML｜parameter>\n"
        for k, v in arguments.items()
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>'


def qwen3_coder(name, arguments):
    parameters = [f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


class Syntax(NamedTuple):
    parser: str
    write: object
    begin: str = ""
    between: str = "\n"
    end: str = ""


DSML = ("<｜DSML｜function_calls>\n", "\n", "\n</｜DSML｜function_calls>")
SYNTAXES = {
    "glm47": Syntax("glm47", glm, between=""),
    "glm45": Syntax("glm45", lambda n, a: glm(n, a, "\n")),
    "hermes": Syntax("hermes", hermes),
    "qwen25": Syntax("qwen25", hermes_backwards),
    "hermes-text": Syntax("hermes", hermes_text, between=""),
    "llama3": Syntax("llama3_json", llama3),
    "llama3-line": Syntax("llama3", llama3, begin="<|python_tag|>", between="; "),
    "deepseek_v3": Syntax(
        "deepseek_v3", deepseek_v3, "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": Syntax(
        "deepseekv31", deepseek_v31, "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": Syntax("deepseek_v32", deepseek_v32, *DSML),
    "qwen3_coder": Syntax("qwen3_coder", qwen3_coder),
}


@pytest.fixture(params=SYNTAXES)
def syntax(request):
    return SYNTAXES[request.param]


def make(name):
    return find_tool_parser(name)(Tools(TOOLS))


def read(parser, parts, cut=False):
    """(text, [[name, arguments, whole]]) of what the parser says."""
    text, calls = "", []
    for kind, piece in [p for part in parts for p in parser.push(part)] + parser.finish(cut):
        if kind == "content":
            text += piece
        elif kind == "call":
            calls.append([piece, "", False])
        elif kind == "arguments":
            assert not calls[-1][2], "arguments after the end of their call"
            calls[-1][1] += piece
        else:
            calls[-1][2] = True
    return text, calls


def written(syntax, calls=CALLS):
    return syntax.begin + syntax.between.join(syntax.write(*call) for call in calls) + syntax.end


def cut_at(text, places):
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def test_calls_are_read_back(syntax):
    text, calls = read(make(syntax.parser), [f"Let me see.\n{written(syntax)}"])
    assert text.strip() == "Let me see."
    assert [(name, json.loads(raw), whole) for name, raw, whole in calls] == [
        (name, arguments, True) for name, arguments in CALLS
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_cut_reads_the_same(syntax, size):
    text = f"A < b {{ c:\n{written(syntax)}\nafter"
    whole = read(make(syntax.parser), [text])
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(make(syntax.parser), parts) == whole


SOUP = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
            *("</arg_value>", "<function=", "</function>", "<parameter=", "</parameter>", ">"),
            *("book", "clock", "place", "nights", " ", "\n", '"', "\\", "{", "}", "[", "]", ":"),
            *('{"name": "book"', '"name"', '"arguments"', '"parameters": {', ",", "3", "null"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
            *("<｜tool▁call▁end｜>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="book">'),
            *('<｜DSML｜parameter name="place" string="true">', "</｜DSML｜parameter>", "\t"),
            *("</｜DSML｜invoke>", "<|python_tag|>", "<", "</", "<think>", "</think>", "é", ";"),
        ]
    ),
    max_size=30,
).map("".join)
NAMES = sorted(name for parser in tool_parsers() for name in parser.names)


@given(st.sampled_from(NAMES), SOUP, st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_no_text_breaks_a_parser_and_no_cut_changes_what_it_says(name, text, places, cut):
    whole = read(make(name), [text], cut)
    parts = cut_at(text, [min(place, len(text)) for place in places])
    assert read(make(name), parts, cut) == whole
    assert read(make(name), list(text), cut) == whole
    if name.startswith(("qwen3c", "deepseekv32")):  # they write the JSON, others pass it on
        assert all(json.loads(raw) is not None for _, raw, ended in whole[1] if ended)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    st.sampled_from(list(SYNTAXES)),
    st.text(max_size=40).filter(lambda text: "\r" not in text),
    st.integers(),
    st.lists(VALUES, max_size=3),
    st.integers(1, 9),
)
def test_any_arguments_are_read_back(name, place, nights, guests, size):
    syntax = SYNTAXES[name]
    arguments = {"place": place, "nights": nights, "guests": guests}
    text = written(syntax, [("book", arguments)])
    _, calls = read(make(syntax.parser), [text[i : i + size] for i in range(0, len(text), size)])
    assert [(name, json.loads(raw), end) for name, raw, end in calls] == [("book", arguments, True)]


def test_text_without_calls_comes_as_it_is(syntax):
    text = 'if a < b { print("</tool>", {"name": "none"}) } <tool_ and <|python and 2 > 1\n'
    assert read(make(syntax.parser), list(text)) == (text, [])


def test_a_json_answer_is_no_llama_call():
    for text in (
        '{"name": "Bob", "age": 3}\n{\n  "name": "book",\n "why": {"clock": 1}}',
        '{"a": {"name": "clock"}}',
        'It is {"name": "clock"}',
    ):
        assert read(make("llama3"), list(text)) == (text, [])


def test_long_arguments_are_said_while_they_come(syntax):
    text = written(syntax, [("book", {"place": "word " * 100})])
    parser = make(syntax.parser)
    said = [bool(parser.push(text[i : i + 5])) for i in range(0, len(text), 5)]
    if syntax.parser != "qwen25" and syntax.write is not hermes_text:  # the name comes last there
        assert sum(said) > 60


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_a_call_that_is_cut_off_never_ends(syntax, keep):
    """Its arguments must not be acted upon: `rm -r /tmp/a` cut short is another command."""
    text = written(syntax, [("book", {"place": "x" * 200, "nights": 3})])
    within = text.index("xx") + int(200 * keep)
    _, calls = read(make(syntax.parser), [text[:within]], cut=True)
    assert all(not whole for _, _, whole in calls)


def test_a_forgotten_closing_mark_is_forgiven_at_the_end(syntax):
    text = written(syntax, [("book", {"place": "Oulu"})])
    parser = syntax.parser
    ends = {"glm47": "</tool_call>", "glm45": "</tool_call>", "deepseek_v32": "\n</｜DSML｜invoke>"}
    if parser in ends:
        text = text[: text.index(ends[parser])]
    elif parser == "qwen3_coder":
        text = text[: text.index("</function>")]
    else:
        text = text[: text.rindex("}") + 1]
    _, calls = read(make(parser), [text])
    assert [(name, json.loads(raw), end) for name, raw, end in calls] == [
        ("book", {"place": "Oulu"}, True)
    ]


def test_raw_line_breaks_in_json_are_escaped():
    text = '<tool_call>{"name": "book", "arguments": {"place": "a\n\tb"}}</tool_call>'
    _, calls = read(make("hermes"), list(text))
    assert json.loads(calls[0][1]) == {"place": "a\n\tb"}


def test_a_brace_too_few_or_too_many():
    few = '<tool_call>{"name": "book", "arguments": {"place": "a"}</tool_call>after'
    many = '<tool_call>{"name": "book", "arguments": {"place": "a"}}}</tool_call>after'
    for text in (few, many):
        assert read(make("hermes"), [text]) == ("after", [["book", '{"place": "a"}', True]])


def test_glm_that_falls_back_to_json_is_read():
    text = f"{hermes('book', BOOK)}\n{glm('clock', {})}after"
    for parts in ([text], list(text)):
        got, calls = read(make("glm47"), parts)
        assert [(name, json.loads(raw), end) for name, raw, end in calls] == [
            ("book", BOOK, True),
            ("clock", {}, True),
        ]
        assert got.strip() == "after"


def test_prose_about_calls_is_text():
    for text in ("Use <tool_call> to call.", "<tool_call> <b>x</b>", "<tool_call><arg_key>a"):
        assert read(make("glm47"), list(text)) == (text, [])


def test_openings_lead_to_a_call(syntax):
    """What the prompt is given to force a call is what the parser reads a call from."""
    cls = find_tool_parser(syntax.parser)
    opening = cls.opening("book", True)
    text = written(syntax, [("book", {"place": "Oulu"})])
    if syntax.write in (hermes_backwards, hermes_text) or syntax.begin == "<|python_tag|>":
        return
    assert text.startswith(opening)
    assert text.startswith(cls.opening("", False))


def test_names_are_found_as_every_server_spells_them():
    same = [
        ("deepseek_v31", "deepseekv31"),
        ("llama3_json", "llama3"),
        ("Qwen3-Coder", "qwen3_coder"),
    ]
    for one, other in same:
        assert find_tool_parser(one) is find_tool_parser(other)
    assert find_tool_parser("") is None
    with pytest.raises(
        ConfigError, match="no tool-call parser 'mistral'; there are: auto, .*glm47"
    ):
        find_tool_parser("mistral")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{name}<arg_key>", "glm47"),
        ('<tool_call>\\n{"name": ..., "arguments": ...}', "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "deepseek_v31"),
        ("<｜DSML｜invoke", "deepseek_v32"),
        ('<|start_header_id|>{"name": function name, "parameters": dictionary}', "llama3"),
        ("<action>```json</action>", ""),
        ("{{ messages }}", ""),
    ],
)
def test_the_template_tells_the_syntax(template, name):
    assert find_tool_parser("auto", template) is find_tool_parser(name)


def test_pieces_name_their_kind():
    pieces = make("glm47").push(glm("clock", {}) + "x")
    assert pieces == [
        Piece("call", "clock"),
        Piece("arguments", "{}"),
        Piece("end", ""),
        Piece("content", "x"),
    ]
