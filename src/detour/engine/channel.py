"""Typed messages between the front and the engine process, msgpack over zmq ipc.

Both directions are one-way streams (PUSH/PULL); an answer carries no id because each kind of
question is asked by one place at a time.
"""

import logging

import msgspec
import zmq
import zmq.asyncio

from detour.engine.request import Request, TokenEvents

log = logging.getLogger(__name__)

# --- front to engine


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client of these sequences is gone, or a stop string ended them; unknown sids are fine."""

    sids: list[int]


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached prefixes that no running sequence uses. Answered with Flushed."""


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """Answered with Stats."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what was submitted, then answer Drained and end the process."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process now; open sequences get a Finish with reason "abort"."""


ToEngine = Submit | Abort | FlushCache | AskStats | Drain | Shutdown

# --- engine to front


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine serves. Geometry as in engine.plan, and what people ask about a server."""

    num_pages: int
    page_size: int
    max_slots: int
    context_length: int
    vocab_size: int
    kv_bytes_per_token: int
    eos_ids: tuple[int, ...]
    weight_bytes: int
    dtype: str
    device: str
    backends: dict[str, str]  # op -> backend in use


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A snapshot of the engine; counters count from its start."""

    running: int = 0  # sequences in a slot
    waiting: int = 0
    pages_free: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # computed, so without cached ones
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    healed: int = 0  # page-pool equation violations found and repaired
    last_step_seconds: float = 0.0
    tokens_per_second: float = 0.0  # generated, over the last seconds


class Flushed(msgspec.Struct, frozen=True, tag=True):
    message: str = ""  # "" = done; else why not all of it


class Drained(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; one sentence."""

    message: str


ToFront = Ready | TokenEvents | Stats | Flushed | Drained | Failed


# --- the two ends


class EngineChannel:
    """The engine's end. It binds both addresses, so that the front may connect before or after."""

    def __init__(self, to_engine: str, to_front: str) -> None:
        """Addresses in zmq's spelling, e.g. ipc:///run/detour/engine-0."""
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._zmq.socket(zmq.PULL)
        self._outbox = self._zmq.socket(zmq.PUSH)
        for socket, address in ((self._inbox, to_engine), (self._outbox, to_front)):
            # No high-water mark: a slow front must never stop a step half way.
            socket.set_hwm(0)
            socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self) -> list[ToEngine]:
        """All messages that have arrived, without waiting. One that is none of ours is dropped."""
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages
            except msgspec.DecodeError as error:
                log.error("a message from the front was not understood: %s", error)

    def wait(self, seconds: float) -> bool:
        """Sleep until a message has arrived (true) or `seconds` have passed."""
        return bool(self._inbox.poll(round(seconds * 1000)))

    def send(self, message: ToFront) -> None:
        self._outbox.send(self._encoder.encode(message))

    def close(self, linger_seconds: float = 2.0) -> None:
        """Give the last messages that long to leave."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=round(linger_seconds * 1000))
        self._zmq.term()


class FrontChannel:
    """The front's end, on an asyncio event loop. Made inside a running loop."""

    def __init__(self, to_engine: str, to_front: str) -> None:
        self._zmq = zmq.asyncio.Context()
        self._inbox = self._zmq.socket(zmq.PULL)
        # Sending never waits (no high-water mark), so the sending socket needs no event loop.
        self._outbox: zmq.Socket[bytes] = zmq.Socket(zmq.Context(self._zmq), zmq.PUSH)
        for socket, address in ((self._inbox, to_front), (self._outbox, to_engine)):
            socket.set_hwm(0)
            socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(ToFront)
        self._encoder = msgspec.msgpack.Encoder()

    async def receive(self) -> ToFront:
        """The next message. Raises msgspec.DecodeError."""
        return self._decoder.decode(await self._inbox.recv())

    def send(self, message: ToEngine) -> None:
        """After close() nobody is left to hear it: then nothing happens."""
        if self._outbox.closed:
            return
        self._outbox.send(self._encoder.encode(message))

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._zmq.term()
