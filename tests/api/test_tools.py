"""Tool calls and thoughts through the real openai client, streamed and whole, GLM's syntax."""

import json

import pytest
from fake_engine import EOS, FakeEngine, says
from loopback import serve

from detour.api.answer import Thoughts
from detour.engine.request import unpack_ids
from detour.text.reasoning import Thinking
from detour.text.reply_parser import ReplySyntax, reply_syntax

TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>
{{- v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- if reasoning_effort is defined %}[{{ reasoning_effort }}]<think>{% endif %}
{%- endif %}"""
HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "forecast",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
OSLO = (
    "<tool_call>forecast<arg_key>place</arg_key><arg_value>Oslo é</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
ANSWER = f"Let me look.</think>One moment.\n{OSLO}\n<tool_call>clock</tool_call>"


@pytest.fixture(scope="module")
def glm_server():
    syntax = reply_syntax("glm45", "auto", TEMPLATE)
    yield from serve(FakeEngine(), TEMPLATE, syntax=syntax)


@pytest.fixture
def server(glm_server):
    glm_server.engine.script = says(ANSWER)
    glm_server.engine.requests = []
    return glm_server


def ask(server, messages=HELLO, **fields):
    return server.openai.chat.completions.create(model="small", messages=messages, **fields)


def prompt_of(server, request=-1):
    return bytes(unpack_ids(server.engine.requests[request].prompt_ids).tolist()).decode()


def gathered(stream, index=0):
    """A stream as a client puts it together; checks the protocol on the way."""
    text = {"content": "", "reasoning_content": "", "reasoning": ""}
    calls, end = [], None
    for chunk in stream:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            assert end is None, "a chunk after the finish reason"
            for kind in text:
                text[kind] += getattr(choice.delta, kind, None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    assert call.id and call.type == "function" and call.function.arguments == ""
                    calls.append([call.function.name, ""])
                else:
                    assert call.index == len(calls) - 1 and not call.id and not call.function.name
                    calls[-1][1] += call.function.arguments
            end = choice.finish_reason
    return text, calls, end


def test_a_whole_reply_is_parted(server):
    choice = ask(server, tools=TOOLS).choices[0]
    message = choice.message
    assert message.content == "One moment." and choice.finish_reason == "tool_calls"
    assert message.reasoning_content == message.reasoning == "Let me look."
    first, second = message.tool_calls
    assert (first.type, first.function.name) == ("function", "forecast")
    assert json.loads(first.function.arguments) == {"place": "Oslo é", "days": 3}
    assert (second.function.name, second.function.arguments) == ("clock", "{}")
    assert first.id != second.id and first.id.startswith("call_")


def test_a_stream_is_parted_alike(server):
    stream = list(ask(server, tools=TOOLS, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    text, calls, end = gathered(stream)
    assert text["content"] == "One moment." and end == "tool_calls"
    assert text["reasoning_content"] == text["reasoning"] == "Let me look."
    assert [(name, json.loads(raw)) for name, raw in calls] == [
        ("forecast", {"place": "Oslo é", "days": 3}),
        ("clock", {}),
    ]
    arguments = [c for c in stream if c.choices and c.choices[0].delta.tool_calls]
    assert len(arguments) > 6, "arguments are streamed"


def test_the_openai_helper_reads_the_stream(server):
    with server.openai.chat.completions.stream(
        model="small", messages=HELLO, tools=TOOLS
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert [call.function.name for call in final.message.tool_calls] == ["forecast", "clock"]
    assert final.message.content == "One moment."


def test_the_conversation_goes_back_through_the_template(server):
    first = ask(server, tools=TOOLS).choices[0].message
    messages = [
        *HELLO,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"},
        {
            "role": "tool",
            "tool_call_id": first.tool_calls[1].id,
            "content": [{"type": "text", "text": "noon"}],
        },
    ]
    server.engine.script = says("Rain.</think>Take a coat.")
    reply = ask(server, messages, tools=TOOLS).choices[0]
    assert reply.message.content == "Take a coat." and reply.finish_reason == "stop"
    assert reply.message.tool_calls is None
    prompt = prompt_of(server)
    assert prompt.startswith('<tools>{"type": "function", "function": {"name": "forecast"')
    assert prompt.endswith(
        f"<|assistant|><think>Let me look.</think>One moment.{OSLO}<tool_call>clock</tool_call>"
        "<|tool|>rain<|tool|>noon<|assistant|><think>"
    )


def test_reasoning_under_its_other_name_goes_back_too(server):
    ask(server, [{"role": "assistant", "content": "a", "reasoning": "why"}, *HELLO])
    assert "<think>why</think>a" in prompt_of(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_off_by_length(server, stream):
    fields = {"tools": TOOLS, "max_tokens": ANSWER.index("Oslo") + 2, "stream": stream}
    if stream:
        text, calls, end = gathered(ask(server, **fields))
        assert end == "length" and calls == [["forecast", '{"place": "Os']]
        return
    choice = ask(server, **fields).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content == "One moment."


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_cut_off_by_length(server, stream):
    if stream:
        text, _, end = gathered(ask(server, max_tokens=6, stream=True))
        assert (text["reasoning_content"], text["content"], end) == ("Let me", "", "length")
        return
    message = ask(server, max_tokens=6).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me", None)


def test_thoughts_stay_in_the_text_where_they_are_asked_to(server):
    server.engine.script = says("Hm.</think>Yes.")
    message = ask(server, extra_body={"separate_reasoning": False}).choices[0].message
    assert message.content == "Hm.</think>Yes."
    assert getattr(message, "reasoning_content", None) is None


def test_thoughts_may_come_at_once(server):
    stream = list(ask(server, stream=True, extra_body={"stream_reasoning": False}))
    thoughts = [getattr(c.choices[0].delta, "reasoning_content", None) for c in stream if c.choices]
    assert [one for one in thoughts if one] == ["Let me look."]
    server.engine.script = says("Only th")
    stream = ask(server, stream=True, extra_body={"stream_reasoning": False})
    assert gathered(stream)[0]["reasoning_content"] == "Only th"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<think>"),
        ({"enable_thinking": False}, "</think>"),
        ({"enable_thinking": True}, "<think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "<think>"),
        ({"reasoning": {"enabled": False}}, "</think>"),
        ({"reasoning_effort": "none"}, "</think>[none]<think>"),
        ({"reasoning": {"effort": "high"}}, "<think>[high]<think>"),
    ],
)
def test_how_to_think_reaches_the_template(server, fields, end):
    ask(server, extra_body=fields)
    assert prompt_of(server).endswith(f"<|assistant|>{end}")


def test_without_thinking_the_answer_is_content_from_its_first_token(server):
    server.engine.script = says("Yes.")
    message = ask(server, extra_body={"enable_thinking": False}).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", None)


def test_tool_choice_none_shows_no_tools(server):
    server.engine.script = says(f"</think>{OSLO}")
    message = ask(server, tools=TOOLS, tool_choice="none").choices[0].message
    assert message.content == OSLO and message.tool_calls is None
    assert "<tools>" not in prompt_of(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "opening"),
    [
        ("required", "<tool_call>"),
        ({"type": "function", "function": {"name": "forecast"}}, "<tool_call>forecast<arg_key>"),
    ],
)
def test_a_call_is_begun_for_the_model(server, choice, opening, stream):
    """Without thinking, and by the prompt's end; the rest is the model's."""
    server.engine.script = says(OSLO.removeprefix(opening))
    reply = ask(server, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        text, calls, end = gathered(reply)
        assert text == {"content": "", "reasoning_content": "", "reasoning": ""}
    else:
        end = reply.choices[0].finish_reason
        calls = [
            (c.function.name, c.function.arguments) for c in reply.choices[0].message.tool_calls
        ]
    assert end == "tool_calls"
    assert [(name, json.loads(raw)) for name, raw in calls] == [
        ("forecast", {"place": "Oslo é", "days": 3})
    ]
    assert prompt_of(server).endswith(f"<|assistant|></think>{opening}")


def test_a_begun_call_closes_the_thought_that_the_template_opens(server):
    server.engine.script = says("clock</tool_call>")
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    reply = ask(server, tools=TOOLS, tool_choice="required", extra_body=kwargs)
    assert reply.choices[0].message.tool_calls[0].function.name == "clock"
    assert prompt_of(server).endswith("<think></think><tool_call>")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_more_are_not_wanted(server, stream):
    reply = ask(server, tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        assert [name for name, _ in gathered(reply)[1]] == ["forecast"]
    else:
        assert len(reply.choices[0].message.tool_calls) == 1


def test_choices_are_parted_each_for_itself(server):
    def script(request, generated):
        own = ANSWER.encode() if request.sid == request.group else b"</think>No."
        return own[generated] if generated < len(own) else EOS

    server.engine.script = script
    reply = ask(server, tools=TOOLS, n=2)
    assert [choice.finish_reason for choice in reply.choices] == ["tool_calls", "stop"]
    assert reply.choices[1].message.content == "No."
    stream = list(ask(server, tools=TOOLS, n=2, stream=True))
    assert gathered(stream, 0)[2] == "tool_calls" and gathered(stream, 1)[0]["content"] == "No."


@pytest.mark.parametrize(
    ("ids", "inside", "count"),
    [
        ([5, 6, 2, 7], True, 3),
        ([5, 6], True, 2),
        ([1, 5, 2, 7], False, 3),
        ([5, 2], False, 0),
        ([], False, 0),
        ([], True, 0),
    ],
)
def test_tokens_of_thoughts(ids, inside, count):
    assert Thoughts(opens=1, closes=2, inside=inside).count(ids) == count


def test_usage_tells_the_tokens_of_thoughts_where_a_mark_is_a_token():
    thinking = Thinking("<bos>", "<eos>")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<bos>"
    engine = FakeEngine(lambda request, generated: [*b"hm", EOS, *b"ok!", EOS][generated])
    for server in serve(engine, template, syntax=ReplySyntax(thinking)):
        fields = {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
        reply = ask(server, **fields)
        assert reply.choices[0].message.reasoning_content == "hm"
        assert reply.usage.completion_tokens_details.reasoning_tokens == 3
        options = {"include_usage": True}
        stream = list(ask(server, stream=True, stream_options=options, **fields))
        assert stream[-1].usage.completion_tokens_details.reasoning_tokens == 3


def test_no_token_is_lost_where_some_say_nothing(server):
    """Token ids and logprobs ride on the chunks there are: a mark's own say nothing."""
    fields = {"extra_body": {"return_token_ids": True}, "logprobs": True}
    stream = list(ask(server, tools=TOOLS, stream=True, **fields))
    ids = [one for c in stream for one in getattr(c.choices[0], "token_ids", None) or []]
    assert bytes(ids[:-1]).decode() == ANSWER and ids[-1] == EOS
    scored = [entry for c in stream for entry in (c.choices[0].logprobs or _EMPTY).content]
    assert len(scored) == len(ids)


class _EMPTY:
    content = ()


def test_marks_that_are_special_tokens_stay_in_the_text():
    """Else the parser would never see them; a client's own word counts more."""
    thinking = Thinking("<bos>", "<eos>")  # the tokenizer's special tokens
    for server in serve(FakeEngine(), syntax=ReplySyntax(thinking)):
        ask(server)
        ask(server, extra_body={"skip_special_tokens": True})
        shown = [request.params.skip_special_tokens for request in server.engine.requests]
        assert shown == [False, True]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required' or name a function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "names 'g', which is not among the tools: forecast, clock",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function"}},
            "tool_choice",
            "function.name is missing",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
            "'allowed_tools' is not supported yet",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]", "'custom'; only functions"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "must hold a function with a name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0]",
            "must hold a function with a name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]},
            "tools[0]",
            "JSON schema",
        ),
    ],
)
def test_what_means_nothing_is_refused_with_a_sentence(server, fields, param, words):
    body = {"model": "small", "messages": HELLO, **fields}
    reply = server.http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"]
    assert server.engine.requests == []


@pytest.mark.parametrize("call", ["x", {"function": 5}, {"function": {"arguments": "{}"}}])
def test_calls_in_history_need_a_function_with_a_name(server, call):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    refused = server.http.post("/v1/chat/completions", json={"messages": turns})
    assert refused.status_code == 400
    assert "messages[1].tool_calls[0] needs a function with a name" in refused.text
