"""Clients that go away or do not read, in every state of a request."""

import json
import socket
import threading

import pytest
from fake_engine import EOS, says

CHAT = "/v1/chat/completions"


@pytest.fixture
def engine(server):
    """The engine with its steps in the test's hand."""
    server.engine.auto = False
    server.engine.script = says("x" * 1000)
    yield server.engine
    server.until(lambda: server.engine.open_sequences == 0)


def send(server, path=CHAT, **fields):
    """A raw request whose connection the test may treat badly."""
    if path == CHAT:
        fields["messages"] = [{"role": "user", "content": "Hi"}]
    body = json.dumps(fields).encode()
    url = server.http.base_url
    connection = socket.create_connection((url.host, url.port))
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3], ids=["queued", "running"])
@pytest.mark.parametrize("n", [1, 3])
def test_gone_client_aborts_all_its_sequences(server, engine, stream, steps, n):
    connection = send(server, stream=stream, n=n)
    server.until(lambda: engine.open_sequences == n)
    for _ in range(steps):
        server.on_loop(engine.step)
    connection.close()
    server.until(lambda: engine.open_sequences == 0)
    assert engine.aborted == [request.sid for request in engine.requests]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_gone_client_of_the_other_routes(server, engine, path):
    prompt = {"text": ["a", "b"]} if path == "/generate" else {"prompt": ["a", "b"]}
    connection = send(server, path, stream=True, **prompt)
    server.until(lambda: engine.open_sequences == 2)
    server.on_loop(engine.step)
    connection.close()
    server.until(lambda: len(engine.aborted) == 2)


def test_finished_stream_is_not_aborted(server, engine):
    connection = send(server, stream=True, max_tokens=2)
    server.until(lambda: engine.open_sequences == 1)
    server.on_loop(engine.step)
    server.on_loop(engine.step)
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.close()
    server.until(lambda: engine.open_sequences == 0)
    assert engine.aborted == []


def test_one_connection_serves_stream_after_stream(server):
    for _ in range(3):
        body = {"prompt": "a", "stream": True}
        reply = server.http.post("/v1/completions", json=body)
        assert reply.text.endswith("data: [DONE]\n\n")


def test_other_streams_go_on_when_one_breaks(server, engine):
    bad = send(server, stream=True)
    server.until(lambda: engine.open_sequences == 1)
    texts = []

    def good() -> None:
        body = {"prompt": "a", "max_tokens": 5}
        texts.append(server.http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    thread = threading.Thread(target=good)
    thread.start()
    server.until(lambda: engine.open_sequences == 2)
    server.on_loop(engine.step)
    bad.close()
    server.until(lambda: engine.open_sequences == 1)
    for _ in range(4):
        server.on_loop(engine.step)
    thread.join(10)
    assert texts == ["xxxxx"]


def test_stop_token_alone_gives_an_empty_answer(server):
    server.engine.script = lambda request, generated: EOS
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        reply = server.http.post("/v1/completions", json=body)
        assert '"finish_reason":"stop"' in reply.text
