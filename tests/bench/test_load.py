"""The load generator: events, outcomes, closed and open loops."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import END, STREAM_HEAD, ScriptedServer, answer, chunk, event, whole

from detour.bench.datasets import Prompt
from detour.bench.endpoints import (
    BACKENDS,
    CHAT,
    COMPLETIONS,
    GENERATE,
    Ask,
    error_text,
    read_event,
)
from detour.bench.http_client import HttpClient, Target
from detour.bench.load import EventReader, Load, bodies, run_load, send, starts
from detour.errors import BadRequest

ASK = Ask("m", True, True, 0.0, -1, {})
INF = float("inf")


def message(client, endpoint=COMPLETIONS, ask=ASK, output=3):
    return bodies(client, endpoint, "", ask, [Prompt("a b", [], output)])[0]


async def outcome_of(script, stream=True, **server_options):
    async with ScriptedServer(script, **server_options) as server:
        client = HttpClient(Target(server.url), {})
        outcome = await send(client, message(client, ask=ASK._replace(stream=stream)), stream)
        await client.close()
    return outcome


# --- events


@given(st.lists(st.integers(1, 30), max_size=20))
def test_events_do_not_depend_on_how_the_bytes_arrive(cuts):
    stream = (
        b": ping\n\ndata: one\n\nevent: x\ndata: two\n\ndata:three\r\n\r\ndata: a\ndata: b\n\n"
        b"data: \xf0\x9f\x98\x80\n\n"
    )
    got = []
    reader = EventReader(lambda payload, now: got.append(payload))
    at = 0
    for cut in cuts:
        reader.feed(stream[at : at + cut], 0.0)
        at += cut
    reader.feed(stream[at:], 0.0)
    assert got == [b"one", b"two", b"three", b"a\nb", "\N{GRINNING FACE}".encode()]


@pytest.mark.parametrize(
    "said, has_text, output, prompt, cached",
    [
        ({"choices": [{"text": "x"}]}, True, -1, -1, -1),
        ({"choices": [{"text": ""}], "usage": None}, False, -1, -1, -1),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False, -1, -1, -1),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, True, -1, -1, -1),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True, -1, -1, -1),
        ({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}, False, 2, 5, -1),
        (
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}},
            False, -1, -1, 4,
        ),
        (
            {"text": "xy", "meta_info": {"prompt_tokens": 9, "completion_tokens": 2,
                                         "cached_tokens": 3, "finish_reason": None}},
            True, 2, 9, 3,
        ),
    ],
)  # fmt: skip
def test_events_of_all_forms_are_read(said, has_text, output, prompt, cached):
    assert read_event(json.dumps(said).encode()) == (has_text, output, prompt, cached, "")


def test_error_events_and_garbage_are_errors():
    assert read_event(b'{"error": {"message": "boom", "code": 500}}').error == "boom"
    assert "not the expected JSON" in read_event(b"<html>").error


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "why"}}',
        b'{"object": "error", "message": "why"}',
        b'{"detail": "why"}',
        b'{"error": "why"}',
        b"why\n",
    ],
)
def test_the_sentence_is_found_in_any_error_body(body):
    assert error_text(body) == "why"


# --- bodies


def test_bodies_ask_for_an_exact_length():
    prompt = Prompt("", [5, 6], 7)
    completions = json.loads(COMPLETIONS.body(prompt, ASK))
    assert completions["prompt"] == [5, 6] and completions["max_tokens"] == 7
    assert completions["ignore_eos"] is True
    assert completions["stream_options"] == {"include_usage": True}
    generate = json.loads(GENERATE.body(prompt, ASK._replace(seed=3)))
    assert generate["input_ids"] == [5, 6]
    assert generate["sampling_params"]["max_new_tokens"] == 7
    assert generate["sampling_params"]["sampling_seed"] == 3
    chat = json.loads(CHAT.body(Prompt("hi", [], 7), ASK._replace(extra={"top_k": 4})))
    assert chat["messages"] == [{"role": "user", "content": "hi"}] and chat["top_k"] == 4
    with pytest.raises(BadRequest, match="prompts of text"):
        CHAT.body(prompt, ASK)


# --- one request


@pytest.mark.parametrize("backend", ["sglang", "openai", "openai-chat"])
async def test_a_stream_is_noted(backend):
    endpoint = BACKENDS[backend]
    async with ScriptedServer(answer) as server:
        client = HttpClient(Target(server.url), {})
        outcome = await send(client, message(client, endpoint), True)
        await client.close()
    assert outcome.error == ""
    assert (outcome.output_tokens, outcome.cached_tokens) == (3, 1)
    assert outcome.prompt_tokens == (1 if backend == "openai-chat" else 2)
    assert len(outcome.times) == 3
    assert outcome.started < outcome.times[0] <= outcome.times[-1] <= outcome.ended
    assert list(outcome.counts) == ([1, 2, 3] if backend == "sglang" else [-1] * 3)


async def test_a_whole_reply_is_noted():
    outcome = await outcome_of(answer, stream=False)
    assert (outcome.error, outcome.output_tokens, outcome.prompt_tokens) == ("", 3, 2)


async def test_failures_are_told_by_their_reason():
    async def full(asked, write):
        await write(whole(503, {"error": {"message": "The queue is full."}}))

    async def midway(asked, write):
        await write(STREAM_HEAD + chunk(event({"choices": [{"text": "x"}]})))
        await write(chunk(event({"error": {"message": "out of memory"}})) + END)

    async def cut(asked, write):
        await write(STREAM_HEAD + chunk(event({"choices": [{"text": "x"}]})))

    async def silent(asked, write):
        await write(STREAM_HEAD + chunk(b""))

    assert (await outcome_of(full)).error == "HTTP 503: The queue is full."
    assert (await outcome_of(midway)).error == "out of memory"
    assert "closed the connection" in (await outcome_of(cut, close_after_reply=True)).error
    assert (await outcome_of(silent)).error == "the stream ended without a token"


# --- loads


async def measured(script, load, count):
    async with ScriptedServer(script) as server:
        client = HttpClient(Target(server.url), {})
        ended = []
        prompts = [Prompt("a", [], 4)] * count
        found = await run_load(
            client, bodies(client, COMPLETIONS, "", ASK, prompts), True, load, ended.append
        )
        await client.close()
        return found, ended, server


async def test_closed_loop_keeps_its_number_open():
    found, ended, server = await measured(answer, Load(INF, 5), 23)
    assert len(found.outcomes) == len(ended) == 23
    assert not any(outcome.error for outcome in found.outcomes)
    assert server.most_open == 5
    assert server.connections == 5
    assert found.client_cpu_seconds > 0


async def test_without_limit_all_are_open_at_once():
    gate = asyncio.Event()

    async def waits(asked, write):
        if server_holds() == 12:
            gate.set()
        await gate.wait()  # would never end if fewer were open
        await answer(asked, write)

    async with ScriptedServer(waits) as server:
        server_holds = lambda: server.open_now  # noqa: E731
        client = HttpClient(Target(server.url), {})
        messages = bodies(client, COMPLETIONS, "", ASK, [Prompt("a", [], 1)] * 12)
        found = await run_load(client, messages, True, Load(INF, 0), lambda _: None)
        await client.close()
    assert server.most_open == 12 and len(found.outcomes) == 12


async def test_open_loop_starts_when_due():
    load = Load(rate=400.0, concurrency=0, seed=1)
    found, _, _ = await measured(answer, load, 20)
    began = sorted(outcome.started - found.started for outcome in found.outcomes)
    for due, at in zip(starts(load, 20), began, strict=True):
        assert at >= due - 2e-3  # an event loop's timer has a resolution of a millisecond


def test_arrivals_have_the_rate_and_the_burstiness_asked_for():
    gaps = np.diff(starts(Load(10.0, 0, 1.0, seed=3), 20_001))
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() == pytest.approx(0.1, rel=0.05)
    even = np.diff(starts(Load(10.0, 0, 16.0, seed=3), 20_001))
    assert even.mean() == pytest.approx(0.1, rel=0.03)
    assert even.std() == pytest.approx(0.025, rel=0.05)
    assert starts(Load(INF, 4), 3) == [0.0, 0.0, 0.0]


async def test_a_dead_server_fails_every_request_and_raises_nothing():
    async with ScriptedServer(answer) as server:
        url = server.url
    client = HttpClient(Target(url), {})
    messages = bodies(client, COMPLETIONS, "", ASK, [Prompt("a", [], 1)] * 4)
    found = await run_load(client, messages, True, Load(INF, 2), lambda _: None)
    assert len(found.outcomes) == 4
    assert all("no server answers" in outcome.error for outcome in found.outcomes)
