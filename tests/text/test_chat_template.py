"""Templates: what transformers renders, and one sentence where a template refuses or fails."""

import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from detour.errors import BadRequest, CheckpointError
from detour.text.chat_template import ChatTemplate

NOW = datetime.datetime(2025, 3, 4, 5, 6, 7)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
# The constructions that published templates are made of, each in one place.
RICH = """\
{%- macro shown(value) -%}
    {%- if value is mapping -%}{{ value | tojson(indent=2) }}{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{{- bos_token }}
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- generation %}
[{{ m['role'] | upper }}]{{ shown(m.content) }}
    {%- endgeneration %}
    {%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {%- if m.role == 'stop' %}{% break %}{% endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{{ messages[1:] | length }} {{ messages | map(attribute='role') | join(',') }} {{ ns.last }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{ 'a' in 'abc' }} {{ messages[-1].content.split('o') }} {{ eos_token }}
{%- if add_generation_prompt %}go{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>ü</b>"}}]
CHATS = [
    [{"role": "user", "content": "Hello ü <b>"}],
    [
        {"role": "system", "content": "  s "},
        {"role": "user", "content": "oho"},
        {"role": "tool", "content": "ignored"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None, "ü"]}}}],
        },
        {"role": "stop", "content": "no"},
        {"role": "user", "content": "unseen"},
    ],
]


@pytest.mark.parametrize("source", [CHATML, TRIMMED, RICH], ids=["chatml", "trimmed", "rich"])
@pytest.mark.parametrize("chat", CHATS, ids=["one", "many"])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=["", "kwargs"])
@pytest.mark.parametrize("prompt", [True, False])
def test_it_renders_what_transformers_renders(source, chat, tools, kwargs, prompt):
    oracle, _ = render_jinja_template(
        [chat],
        tools=tools or None,
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
        **kwargs,
    )
    assert (
        ChatTemplate(source, "<s>", "</s>").render(chat, tools, prompt, False, kwargs) == oracle[0]
    )


@pytest.mark.parametrize("source", [CHATML, TRIMMED], ids=["chatml", "trimmed"])
@pytest.mark.parametrize("content", ["The answer", "The answer  ", "", "a\n\n", [{"text": "x "}]])
def test_the_last_message_is_left_open(source, content):
    if isinstance(content, list):
        source = source.replace("m.content", "m.content[0].text")
    chat = [{"role": "assistant", "content": content}]
    oracle, _ = render_jinja_template([chat], chat_template=source, continue_final_message=True)
    assert ChatTemplate(source).render(chat, [], False, True) == oracle[0]
    assert chat == [{"role": "assistant", "content": content}]


def test_a_template_may_ask_the_time():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: NOW)
    assert template.render([]) == "04 Mar 2025"


def test_what_a_template_refuses_is_said_in_its_words():
    template = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
    with pytest.raises(BadRequest, match="refuses this: Roles must alternate!") as caught:
        template.render(CHATS[0])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[7].content.x }}", "messages"),
        ("{{ messages | nosuch }}", "No filter named 'nosuch'"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "attribute 'append' of .* is unsafe"),
    ],
)
def test_a_template_that_fails_is_one_sentence(source, sentence):
    with pytest.raises((BadRequest, CheckpointError), match=sentence) as caught:
        ChatTemplate(source).render(CHATS[0])
    assert "Traceback" not in caught.value.message and "\n" not in caught.value.message


def test_a_template_that_is_no_jinja_says_the_line():
    with pytest.raises(CheckpointError, match="no valid Jinja: .* in line 2"):
        ChatTemplate("a\n{% if %}")


def test_a_model_without_a_template_says_what_to_do():
    with pytest.raises(BadRequest, match="has no chat template: send a prompt to /v1/completions"):
        ChatTemplate("").render(CHATS[0])


@pytest.mark.parametrize(
    ("chat", "source", "prompt", "sentence"),
    [
        (CHATS[0], CHATML, True, "exclude each other"),
        ([], CHATML, False, "ends in text"),
        ([{"role": "user", "content": None}], CHATML, False, "ends in text"),
        ([{"role": "user", "content": [{"type": "image"}]}], CHATML, False, "ends in text"),
        (CHATS[0], "{{ messages | length }}", False, "does not show the last message"),
    ],
)
def test_what_cannot_be_continued_is_told(chat, source, prompt, sentence):
    with pytest.raises(BadRequest, match=sentence):
        ChatTemplate(source).render(chat, [], prompt, True)
