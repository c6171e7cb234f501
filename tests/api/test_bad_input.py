"""All that a client can get wrong: one sentence, the right status, the field, a live server."""

import json
import socket

import openai
import pytest
from fake_engine import says

from detour.engine.request import Finish

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def alive_afterwards(server):
    yield
    server.engine.state = "ready"
    server.engine.capacity, server.engine.finish = 4096, None
    reply = server.http.post(COMPLETIONS, json={"prompt": "a"})
    assert reply.status_code == 200, reply.text


def refused(reply, status=400, param=None):
    """The error's sentence, after checking that it is OpenAI's JSON."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert body["object"] == "error" and body["message"] == error["message"]
    assert error["message"].endswith((".", "'", ")")) and "Traceback" not in error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


def chat(server, **fields):
    return server.http.post(CHAT, json={"messages": HELLO} | fields)


def complete(server, **fields):
    return server.http.post(COMPLETIONS, json={"prompt": "a"} | fields)


def raw(server, content, path=CHAT, **headers):
    headers = {"content-type": "application/json"} | headers
    return server.http.post(path, content=content, headers=headers)


def test_empty_messages(server):
    assert "at least one" in refused(chat(server, messages=[]), param="messages")


def test_missing_messages(server):
    sentence = refused(server.http.post(CHAT, json={"model": "small"}), param="messages")
    assert sentence == "messages is missing."


def test_unknown_role(server):
    sentence = refused(chat(server, messages=[{"role": "wizard", "content": "Hi"}]))
    assert "messages[0].role" in sentence and "assistant" in sentence


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"n": "2"}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages"),
        ({"model": 5}, "model"),
        ({"user": {}}, "user"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_wrong_types_name_the_field(server, fields, param):
    sentence = refused(chat(server, **fields))
    assert sentence.startswith(param), sentence


@pytest.mark.parametrize("prompt", [5, {"a": 1}, [1.5], [["a"]], [1, "a"], [[1], 2], [None]])
def test_wrong_prompts(server, prompt):
    assert refused(complete(server, prompt=prompt)).startswith("prompt")


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_empty_prompts_are_told_apart_from_short_ones(server, prompt):
    reply = complete(server, prompt=prompt, add_special_tokens=False)
    assert "prompt" in refused(reply, param="prompt")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "1e9"])
def test_temperatures_out_of_range(server, number):
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "temperature": {number}}}'
    assert "temperature must be between" in refused(raw(server, body), param="temperature")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": -7}, "seed"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 4097}, "stop"),
        ({"stop": [f"stop {i}" for i in range(10_000)]}, "stop"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"timeout": -1}, "timeout"),
        ({"rid": ""}, "rid"),
        ({"rid": "x" * 200}, "rid"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"regex": "a+"}, "regex"),
        ({"lora_path": "mine"}, "lora_path"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_values_out_of_range_name_the_field(server, fields, param):
    refused(chat(server, **fields), param=param)


def test_images_are_refused(server):
    part = {"type": "image_url", "image_url": {"url": "http://nowhere/a.png"}}
    sentence = refused(chat(server, messages=[{"role": "user", "content": [part]}]))
    assert "image_url" in sentence


def test_best_of_and_suffix(server):
    assert "best_of" in refused(complete(server, best_of=3), param="best_of")
    assert complete(server, best_of=2, n=2).status_code == 200
    refused(complete(server, suffix="end"), param="suffix")


def test_prompt_over_context_says_both_numbers(server):
    sentence = refused(complete(server, prompt="a" * 3000))
    assert "3001" in sentence and "2048" in sentence
    sentence = refused(chat(server, messages=[{"role": "user", "content": "a" * 5000}]))
    assert "50" in sentence and "2048" in sentence


def test_prompt_far_over_context_is_refused_by_its_beginning(server):
    sentence = refused(complete(server, prompt="a" * 3_000_000))
    assert "more than" in sentence and "2048" in sentence


def test_prompt_and_max_tokens_over_context(server):
    sentence = refused(complete(server, max_tokens=2047), param="max_tokens")
    assert "2047" in sentence and "2048" in sentence
    assert complete(server, max_tokens=2046).status_code == 200


def test_unknown_model(server):
    sentence = refused(chat(server, model="large"), status=404, param="model")
    assert "'large'" in sentence and "small" in sentence
    with pytest.raises(openai.NotFoundError):
        server.openai.chat.completions.create(model="large", messages=HELLO)
    refused(server.http.get("/v1/models/large"), status=404)


@pytest.mark.parametrize("content", [b"{", b"", b"nonsense", b'{"messages": [}', b"\x00"])
def test_invalid_json(server, content):
    refused(raw(server, content))


def test_invalid_json_says_where(server):
    assert "character 14" in refused(raw(server, b'{"messages": [}'))


@pytest.mark.parametrize("content", [b"[]", b'"text"', b"5", b"null"])
def test_json_that_is_no_object(server, content):
    refused(raw(server, content))


def test_invalid_utf8(server):
    assert "UTF-8" in refused(raw(server, b'{"messages": "\xff\xfe"}'))


def test_half_a_surrogate_pair(server):
    refused(raw(server, b'{"prompt": "\\ud800"}', COMPLETIONS))
    refused(raw(server, b'{"prompt": "a", "stop": "\\ud800"}', COMPLETIONS))
    refused(raw(server, b'{"prompt": "a", "cache_salt": "\\ud800"}', COMPLETIONS))
    message = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    refused(raw(server, message))
    part = b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}'
    refused(raw(server, part))


def test_deep_json(server):
    refused(raw(server, b'{"messages":' + b"[" * 100_000))


def test_wrong_content_type(server):
    reply = server.http.post(CHAT, content=b"a=b", headers={"content-type": "text/plain"})
    assert "application/json" in refused(reply)


def test_body_too_large_by_its_header(server):
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {100 << 20}\r\n\r\n"
    with socket.create_connection((server.http.base_url.host, server.http.base_url.port)) as raw:
        raw.sendall(head.encode())  # and nothing of the body
        reply = raw.makefile("rb").read().decode()  # the server closes
    assert reply.startswith("HTTP/1.1 413") and "33554432 bytes" in reply


def test_body_too_large_while_reading(server):
    def endless():
        piece = b" " * (1 << 20)
        for _ in range(100):
            yield piece

    try:
        reply = server.http.post(CHAT, content=endless())
    except Exception as error:  # the server answers and closes while we still send
        assert "write" in str(error).lower() or "pipe" in str(error).lower() or str(error) == ""
    else:
        refused(reply, status=413)


def test_unknown_route_and_method(server):
    assert "/nowhere" in refused(server.http.get("/nowhere"), status=404)
    assert "GET" in refused(server.http.get(CHAT), status=405)


def test_full_queue_is_503_with_retry_after(server):
    server.engine.capacity = 0
    reply = chat(server)
    refused(reply, status=503)
    assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize("state", ["starting", "draining", "failed"])
def test_no_requests_unless_ready(server, state):
    server.engine.state = state
    for stream in (False, True):
        refused(chat(server, stream=stream), status=503)


@pytest.mark.parametrize("stream", [False, True])
def test_error_of_the_engine_before_the_first_token_has_its_status(server, stream):
    server.engine.finish = Finish(0, "error", -1, "The worker is gone.", 503)
    assert refused(chat(server, stream=stream), status=503) == "The worker is gone."


@pytest.mark.parametrize("stream", [False, True])
def test_deadline(server, stream):
    server.engine.finish = Finish(0, "deadline")
    assert "time ran out" in refused(chat(server, stream=stream, timeout=1.0), status=408)
    assert server.engine.requests[0].deadline > 0


def test_error_after_the_first_token_ends_the_stream_with_an_error_event(server):
    def script(request, generated):
        if generated == 3:
            server.engine.finish = Finish(0, "error", -1, "The worker is gone.", 500)
        return ord("x")

    server.engine.script = script
    with pytest.raises(openai.APIError, match="The worker is gone"):
        list(server.openai.chat.completions.create(model="small", messages=HELLO, stream=True))
    reply = chat(server, stream=True)
    server.engine.finish = None
    server.engine.script = says("a")
    assert reply.status_code == 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [999999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_tokens"),
        ({"text": "a", "sampling_params": {"regex": "a"}}, "regex"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
)
def test_native_route(server, body, param):
    refused(server.http.post("/generate", json=body), param=param)


def test_native_wrong_types(server):
    body = {"text": "a", "sampling_params": {"temperature": "hot"}}
    assert "temperature" in refused(server.http.post("/generate", json=body))


def test_tokenize_and_detokenize(server):
    refused(server.http.post("/tokenize", json={}))
    refused(server.http.post("/detokenize", json={"tokens": [-1]}), param="tokens")
    refused(server.http.post("/detokenize", json={"tokens": "a"}))
