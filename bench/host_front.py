"""The front's rows: 8 (message of a step), 10 (SSE), 12 (TTFT beside a long prompt)."""

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from front_server import words
from row import Row

from detour.engine.channel import ToFront
from detour.engine.request import Finish, Started, TokenEvents, unpack_ids

STREAMS, STEPS, INTERVAL = 1024, 40, 0.1
LONG_WORDS, SHORT_WORDS = 20_600, 82  # 32k and 128 tokens


class FrontServer:
    """bench/front_server.py as a process."""

    def __init__(self, streams: int, steps: int = 0, interval: float = 0.0, *modes: str) -> None:
        script = str(Path(__file__).with_name("front_server.py"))
        command = [sys.executable, script, str(streams), str(steps), str(interval), *modes]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.strip():
            raise RuntimeError("the front server did not start")
        self.port = int(line)

    def end(self) -> dict[str, list[float]]:
        out, _ = self._process.communicate(timeout=30)
        return json.loads(out)


def http_request(prompt: str, max_tokens: int) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Reader(asyncio.Protocol):
    """Sends one request and reads to the end. `first` is when the first event came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events = 0
        self.first = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        here = data.count(b"data: ")
        if here and not self.events:
            self.first = time.perf_counter()
        self.events += here

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(error)


async def read(port: int, request: bytes) -> Reader:
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(request), "127.0.0.1", port)
    await reader.done
    return reader


def message_row() -> Row:
    sids = np.arange(STREAMS, dtype=np.int64).tobytes()
    tokens = np.arange(STREAMS, dtype=np.int32).tobytes()
    events = TokenEvents(sids, tokens, [Started(1, 0)], finished=[Finish(2, "stop", 5)])
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(ToFront).decode

    def hop() -> None:
        got = decode(encode(events))
        np.frombuffer(got.sids, dtype=np.int64).tolist()
        unpack_ids(got.tokens).tolist()

    times = []
    for _ in range(300):
        before = time.process_time_ns()
        hop()
        hop()
        times.append((time.process_time_ns() - before) / 1e6)
    name = f"8 engine to front, {STREAMS} tokens: pack and unpack, twice"
    return Row(name, statistics.median(times), "ms", "6.9 mini-sglang", 0.5)


async def stream_all(port: int) -> None:
    """Raises AssertionError when a stream got fewer events than there were steps."""
    request = http_request("Once upon a time", STEPS)
    readers = await asyncio.gather(*(read(port, request) for _ in range(STREAMS)))
    wrong = [reader.events for reader in readers if reader.events < STEPS]
    assert not wrong, f"streams with fewer than {STEPS} events: {wrong[:5]}"


def micros_per_chunk(*modes: str) -> float:
    """The server's CPU time: the median of the steps."""
    server = FrontServer(STREAMS, STEPS, INTERVAL, *modes)
    try:
        asyncio.run(stream_all(server.port))
    finally:
        result = server.end()
    return statistics.median(result["cpu"]) / STREAMS * 1e6


def sse_row() -> Row:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    floor = micros_per_chunk("bare")
    name = f"10 SSE CPU per chunk, {STREAMS} streams, token to socket, disconnect seen"
    anchor = f"90 FastAPI, 5.5 bare protocol; bare here {floor:.1f}"
    return Row(name, micros_per_chunk(), "us", anchor, 20.0)


async def first_token_ms(port: int, request: bytes) -> float:
    before = time.perf_counter()
    reader = await read(port, request)
    return (reader.first - before) * 1e3


async def growth_ms(port: int, long_prompt: str, short_prompt: str) -> float:
    """Median TTFT of short requests while long prompts are tokenised, less the median without."""
    short, long = http_request(short_prompt, 1), http_request(long_prompt, 1)
    alone = [await first_token_ms(port, short) for _ in range(60)][10:]
    beside: list[float] = []
    for _ in range(25):
        tokenised = asyncio.create_task(read(port, long))
        await asyncio.sleep(0.02)  # its body has arrived
        while not tokenised.done():
            beside.append(await first_token_ms(port, short))
        await tokenised
    return statistics.median(beside) - statistics.median(alone)


def ttft_row() -> Row:
    server = FrontServer(0)
    try:
        growth = asyncio.run(growth_ms(server.port, words(LONG_WORDS), words(SHORT_WORDS, 1)))
    finally:
        server.end()
    name = "12 TTFT growth of a 128-token request beside a 32k prompt (latency)"
    return Row(name, growth, "ms", "119 tokenising in place", 10.0)


def rows() -> list[Row]:
    return [message_row(), sse_row(), ttft_row()]


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(
            f"{row.name}: {row.value:.3g} {row.unit} (bar {row.bar:g}; {row.anchor})\n"
        )
