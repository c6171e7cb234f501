"""Puts load on a server and notes when things come back.

Closed loop: so many requests are always open. Open loop: requests start at drawn times, whether or
not earlier ones have ended. Knows requests and clocks; sums up nothing (report.py does).
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from detour.bench.datasets import Prompt
from detour.bench.endpoints import Ask, Endpoint, Piece, error_text, read_event
from detour.bench.http_client import BrokenReply, ConnectFailed, HttpClient


def _floats() -> "array[float]":
    return array("d")


def _ints() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Outcome:
    """What happened to one request. Times are perf_counter seconds.

    `times[i]` is when the i-th piece with text came and `counts[i]` how many tokens the server said
    it had given by then (-1: it did not say). Token counts at the end are -1 where never told.
    """

    prompt_tokens: int = -1
    output_tokens: int = -1
    cached_tokens: int = -1
    started: float = 0.0
    ended: float = 0.0
    times: "array[float]" = field(default_factory=_floats)
    counts: "array[int]" = field(default_factory=_ints)
    error: str = ""


@dataclass(frozen=True)
class Load:
    """`rate` requests per second (inf = at once), at most `concurrency` open (0 = no limit).

    `burstiness` is the shape of the gamma-distributed gaps between starts: 1 = Poisson, larger =
    more even.
    """

    rate: float
    concurrency: int
    burstiness: float = 1.0
    seed: int = 42


@dataclass(frozen=True)
class Measured:
    outcomes: list[Outcome]
    started: float
    ended: float
    client_cpu_seconds: float  # of this process, from start to end


class EventReader:
    """Server-sent events from pieces of a body; calls `on_payload` with each event's data."""

    def __init__(self, on_payload: Callable[[bytes, float], None]) -> None:
        self._on_payload = on_payload
        self._rest = b""

    def feed(self, body: bytes, now: float) -> None:
        if self._rest:
            body = self._rest + body
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = body.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                self._on_payload(event[6:], now)
            else:
                self._feed_lines(event, now)

    def _feed_lines(self, event: bytes, now: float) -> None:
        """An event with several lines: comments, event names, data over more than one line."""
        data = [
            line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
        ]
        if data:
            self._on_payload(b"\n".join(data), now)


class _Listener:
    """Fills an Outcome from what comes back on the wire."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.whole: list[bytes] = []  # the body where it is no stream
        self.done_seen = False
        self.events = EventReader(self.on_payload)

    def on_payload(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done_seen = True
            return
        self.note(read_event(payload), now)

    def on_whole(self, body: bytes, now: float) -> None:
        self.whole.append(body)

    def note(self, piece: Piece, now: float) -> None:
        outcome = self.outcome
        has_text, output, prompt, cached, error = piece
        if has_text:
            outcome.times.append(now)
            outcome.counts.append(output)
        if output >= 0:
            outcome.output_tokens = output
        if prompt >= 0:
            outcome.prompt_tokens = prompt
        if cached >= 0:
            outcome.cached_tokens = cached
        if error and not outcome.error:
            outcome.error = error


async def send(client: HttpClient, message: bytes, stream: bool) -> Outcome:
    """One request, from its bytes to its Outcome. Failures are noted in it, none is raised."""
    outcome = Outcome()
    listener = _Listener(outcome)
    sink = listener.events.feed if stream else listener.on_whole
    outcome.started = time.perf_counter()
    try:
        status = await client.exchange(message, sink, listener.on_whole)
    except (ConnectFailed, BrokenReply) as error:
        outcome.error = outcome.error or str(error)
    else:
        if status != 200:
            outcome.error = f"HTTP {status}: {error_text(b''.join(listener.whole))}"
        elif not stream:
            listener.note(read_event(b"".join(listener.whole)), time.perf_counter())
        elif not listener.done_seen and not outcome.error and not outcome.times:
            outcome.error = "the stream ended without a token"
    outcome.ended = time.perf_counter()
    return outcome


def starts(load: Load, count: int) -> list[float]:
    """Seconds after the beginning at which each request is due."""
    if load.rate == float("inf"):
        return [0.0] * count
    rng = np.random.default_rng(load.seed)
    gaps = rng.gamma(load.burstiness, 1.0 / (load.rate * load.burstiness), count)
    gaps[0] = 0.0
    return [float(t) for t in np.cumsum(gaps)]


async def run_load(
    client: HttpClient,
    messages: Sequence[bytes],
    stream: bool,
    load: Load,
    on_done: Callable[[Outcome], None],
) -> Measured:
    """All messages, under `load`. `on_done` hears of each as it ends."""
    count = len(messages)
    workers = min(load.concurrency or count, count)
    outcomes: list[Outcome] = []
    cpu = time.process_time()
    began = time.perf_counter()
    queue = iter(zip(starts(load, count), messages, strict=True))

    async def work(queue: Iterator[tuple[float, bytes]]) -> None:
        # Workers take from one queue in order, so a request waits for its time or for a free place.
        for due, message in queue:
            wait = began + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            outcome = await send(client, message, stream)
            outcomes.append(outcome)
            on_done(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work(queue))
    return Measured(outcomes, began, time.perf_counter(), time.process_time() - cpu)


def bodies(
    client: HttpClient, endpoint: Endpoint, path: str, ask: Ask, prompts: Sequence[Prompt]
) -> list[bytes]:
    """The bytes of all requests, made before the clock starts."""
    return [
        client.message("POST", path or endpoint.path, endpoint.body(prompt, ask))
        for prompt in prompts
    ]
