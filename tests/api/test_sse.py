"""EventStream over an ASGI server in the test's hand: full sockets, gone clients, faults."""

import asyncio

from detour.api.failures import error_response
from detour.api.sse import EventStream
from detour.errors import DetourError, Unavailable


class Words:
    """A source: what was said since the last take, until `over`."""

    def __init__(self) -> None:
        self.fresh: list[bytes] = []
        self.takes = 0
        self.over = False
        self.abandoned = 0
        self.failure: DetourError | None = None

    def take(self) -> tuple[bytes, bool]:
        self.takes += 1
        text = b"".join(self.fresh)
        self.fresh = []
        return text, self.over

    def abandon(self) -> None:
        self.abandoned += 1


class Client:
    """An ASGI server's side of one connection."""

    def __init__(self) -> None:
        self.source = Words()
        self.stream = EventStream(self.source, error_response)
        self.sent: list[dict] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = asyncio.Event()
        self.task = asyncio.create_task(self.stream({"type": "http"}, self.receive, self.send))

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.gone.set()  # as servers do once a response is complete

    def say(self, text: bytes, over: bool = False) -> None:
        self.source.fresh.append(text)
        self.source.over = over
        self.stream.wake()

    @property
    def bodies(self) -> list[bytes]:
        return [one["body"] for one in self.sent if one["type"] == "http.response.body"]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_chunks_are_written_in_the_call_that_brings_them():
    client = Client()
    await turns()
    client.say(b"one ")
    assert client.sent[0]["status"] == 200 and client.bodies == [b"one "]
    client.say(b"two", over=True)
    assert client.bodies == [b"one ", b"two"]
    await client.task
    assert client.source.abandoned == 0


async def test_a_silent_stream_says_comments(monkeypatch):
    monkeypatch.setattr("detour.api.sse.SILENCE", 0.0)
    client = Client()
    await turns()
    assert client.sent == []  # a refusal may still come, with a status of its own
    client.say(b"one")
    while len(client.bodies) < 3:
        await asyncio.sleep(0)
    client.say(b"two", over=True)
    await client.task
    assert client.bodies[0] == b"one" and client.bodies[-1] == b"two"
    assert set(client.bodies[1:-1]) == {b": keep-alive\n\n"}


async def test_what_came_before_the_response_began_is_not_lost():
    client = Client()
    client.say(b"early", over=True)
    await client.task
    assert client.bodies == [b"early"]


async def test_client_that_does_not_read_gets_fewer_and_larger_chunks():
    client = Client()
    await turns()
    client.say(b"a")
    client.reads.clear()
    for _ in range(1000):
        client.say(b"b")
    takes = client.source.takes
    assert client.bodies == [b"a"] and takes <= 3  # nothing is formatted while nothing is read
    client.reads.set()
    await turns()
    assert client.bodies == [b"a", b"b", b"b" * 999]
    client.say(b"c", over=True)
    await client.task
    assert client.bodies[-1] == b"c" and client.source.abandoned == 0


async def test_end_that_comes_while_the_client_does_not_read():
    client = Client()
    await turns()
    client.reads.clear()
    client.say(b"a")
    client.say(b"b", over=True)
    client.reads.set()
    await client.task
    assert b"".join(client.bodies) == b"ab" and client.sent[-1]["more_body"] is False


async def test_gone_client_abandons_once_and_hears_no_more():
    client = Client()
    await turns()
    client.say(b"a")
    client.gone.set()
    await client.task
    client.say(b"b")
    assert client.source.abandoned == 1 and client.bodies == [b"a"]


async def test_client_that_goes_while_it_does_not_read():
    client = Client()
    await turns()
    client.reads.clear()
    client.say(b"a")
    client.gone.set()
    client.reads.set()  # servers let go of a write whose connection is lost
    await client.task
    assert client.source.abandoned == 1


async def test_failure_before_the_first_byte_has_its_status():
    client = Client()
    await turns()
    client.source.failure = Unavailable("The queue is full.")
    client.say(b"", over=True)
    await client.task
    assert client.sent[0]["status"] == 503 and b"The queue is full." in client.bodies[0]
    assert (b"retry-after", b"1") in client.sent[0]["headers"]


async def test_fault_in_the_source_ends_the_stream_with_an_error():
    client = Client()
    await turns()
    client.say(b"a")

    def broken() -> tuple[bytes, bool]:
        raise ValueError("a fault of ours")

    client.source.take = broken
    client.stream.wake()
    await client.task
    assert client.bodies[-1].endswith(b"data: [DONE]\n\n") and b"error" in client.bodies[-1]
    assert client.source.abandoned == 1
