"""Item 11: everything but the model under full load. 1,024 streams of 128 tokens in, 128 out.

Throughput is over the wall clock and needs a quiet machine: front, engine and the client that reads
share its cores. The CPU time per token is printed with it and holds on a busy machine too.
"""

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from front_server import words
from row import Row

STREAMS, OUTPUT, STEP_SECONDS = 1024, 128, 0.010
WORDS = 64  # about 128 tokens
ROUNDS = 3


class Reader(asyncio.Protocol):
    """Sends one request, counts bytes and keeps the end: as cheap as a client can be."""

    def __init__(self, request: bytes, on_end: Callable[["Reader"], None]) -> None:
        self._request = request
        self._on_end = on_end
        self.tail = b""
        self.reads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.tail = data if len(data) > 600 else (self.tail + data)[-1200:]

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end(self)

    @property
    def tokens(self) -> int:
        """What the usage event at the end says."""
        place = self.tail.rfind(b'"completion_tokens":')
        return (
            int(self.tail[place + 20 :].lstrip().split(b",")[0].split(b"}")[0]) if place > 0 else 0
        )


def request(number: int) -> bytes:
    body = json.dumps(
        {
            "prompt": words(WORDS, number),
            "max_tokens": OUTPUT,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def load(port: int, requests: list[bytes]) -> tuple[float, int]:
    """Wall seconds from the first connection to the last end, and the tokens told."""
    loop = asyncio.get_running_loop()
    ended: list[Reader] = []
    done = loop.create_future()

    def on_end(reader: Reader) -> None:
        ended.append(reader)
        if len(ended) == len(requests):
            done.set_result(None)

    began = time.perf_counter()
    for one in requests:
        await loop.create_connection(lambda one=one: Reader(one, on_end), "127.0.0.1", port)
    await done
    return time.perf_counter() - began, sum(reader.tokens for reader in ended)


def one_round() -> dict[str, float]:
    """A server of its own under one load."""
    script = str(Path(__file__).with_name("full_server.py"))
    process = subprocess.Popen(
        [sys.executable, script, str(STEP_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    requests = [request(number) for number in range(STREAMS)]
    seconds, tokens = uvloop.run(load(port, requests))
    out, _ = process.communicate(timeout=60)
    if tokens != STREAMS * OUTPUT:
        raise RuntimeError(f"{tokens} tokens arrived instead of {STREAMS * OUTPUT}")
    cost: dict[str, float] = json.loads(out.splitlines()[-1])
    return cost | {"rate": tokens / seconds, "cpu": (cost["front"] + cost["engine"]) / tokens * 1e6}


def rows() -> list[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    rounds = [one_round() for _ in range(ROUNDS)]

    def median(name: str) -> float:
        return statistics.median(cost[name] for cost in rounds)

    what = f"11 {STREAMS} streams of {OUTPUT} in, {OUTPUT} out, step {STEP_SECONDS * 1e3:.0f} ms"
    return [
        Row(f"{what}: output (wall clock)", median("rate"), "tok/s", "", 25_000.0),
        Row("11 the same: share of time the device waits", median("idle") * 100, "%", "", 5.0),
        Row("11 the same: front and engine CPU per token", median("cpu"), "us", "", 40.0),
    ]


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(f"{row.name}: {row.value:.3g} {row.unit} (bar {row.bar:g})\n")
