"""`detour serve --model pocket-glm5`, asked by the openai client: thoughts and calls, streamed."""

import json
from pathlib import Path

import openai
import pytest
from running_server import TINY_OPTIONS, RunningServer

import detour.loading.hub as hub

FOLDER = Path(hub.__file__).with_name(hub.POCKET_MODEL)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / "model.safetensors").exists(),
        reason="pocket-glm5 does not come with this installation (scripts/pocket/train.py)",
    ),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": kind} for field, kind in fields.items()},
                "required": list(fields),
            },
        },
    }
    for name, fields in {
        "get_weather": {"city": "string", "day": "integer"},
        "find_hotel": {"street": "string"},
    }.items()
]
PARSERS = ("--reasoning-parser", "glm45", "--tool-call-parser", "glm47")


@pytest.fixture(scope="module")
def client():
    running = RunningServer("--model", hub.POCKET_MODEL, *PARSERS, *TINY_OPTIONS)
    try:
        url = running.wait_until_up().url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as made:
            yield made
    finally:
        running.stop()


def streamed(client, text, **fields):
    """What a streamed answer comes to: thoughts, content, calls by name, and why it ended."""
    stream = client.chat.completions.create(
        model=hub.POCKET_MODEL,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=60,
        stream=True,
        **fields,
    )
    thought, content, calls, ends = "", "", [], []
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            thought += (delta.model_extra or {}).get("reasoning_content") or ""
            content += delta.content or ""
            for call in delta.tool_calls or []:
                if call.function.name:
                    calls.append([call.function.name, ""])
                calls[-1][1] += call.function.arguments or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    return thought, content, calls, ends


def test_a_call_is_parsed_with_names_that_only_the_schema_tells(client):
    thought, content, calls, ends = streamed(client, "get_weather(maple, 3)", tools=TOOLS)
    assert thought == "get_weather" and not content.strip()
    assert [(name, json.loads(text)) for name, text in calls] == [
        ("get_weather", {"city": "maple", "day": 3})
    ]
    assert ends == ["tool_calls"]


def test_a_thought_is_parted_from_the_answer(client):
    table = "lamp: 42, wolf: ruby, river: 7, chess: oak, tulip: 19"
    thought, content, calls, ends = streamed(client, f"{table}\nWhat is wolf?")
    assert (thought, content, calls, ends) == ("wolf: ruby", "ruby", [], ["stop"])


def test_thinking_can_be_switched_off(client):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    thought, content, _, ends = streamed(client, "Repeat: ant bee fox", extra_body=off)
    assert (thought, content, ends) == ("", "ant bee fox", ["stop"])
