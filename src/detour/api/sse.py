"""Server-sent events, written from where the tokens arrive. Knows ASGI, not what an event says.

A stream costs one task for its whole life, which waits for the client to go away. Chunks are
written by `wake`, a plain call: the ASGI `send` coroutine is run up to its first wait. While the
client does not read, `send` waits (the server's flow control), nothing is written and what arrives
is gathered by the source into one later, larger chunk; so a slow client costs its text, no more.
"""

import asyncio
import logging
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from detour.api.guard import RAW_SEND
from detour.errors import DetourError

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = (
    b": keep-alive\n\n"  # a comment: proxies must not cut a stream that waits, say for an engine
)
SILENCE = 15.0  # seconds, twice that at most, after which a comment is sent
_FAULT = b'data: {"error":{"message":"The server failed to write the answer.",'
_FAULT += b'"type":"internal_error","param":null,"code":null}}\n\n'
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must not gather chunks
}


class Source(Protocol):
    """What a stream says."""

    @property
    def failure(self) -> DetourError | None:
        """Why there will be no answer, if so. Asked before the first byte, for the status."""

    def take(self) -> tuple[bytes, bool]:
        """Events for all that is new since the last call (b"" if nothing is), and: that was all."""

    def abandon(self) -> None:
        """The client is gone. Called at most once, and not after all was said."""


class EventStream(Response):
    """An ASGI response over a Source. Its maker arranges for `wake` to be called on news."""

    def __init__(self, source: Source, refuse: "Refusal") -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._refuse = refuse
        self._send: Send | None = None  # None before the response runs and after it ended
        self._send_chunk: Any = None  # as _send, without the wrappers that look at the start alone
        self._started = False
        self._silent = False  # nothing was written since the last look
        self._waiting: asyncio.Task[None] | None = None  # a write that the client does not take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._send_chunk = scope.get(RAW_SEND, send)
        self._watch_silence()
        try:
            self.wake()
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:  # also comes after our own last write
            self._timer.cancel()
            if self._send is not None:
                self._send = None
                self._source.abandon()
            if self._waiting is not None:
                await asyncio.wait([self._waiting])

    def wake(self) -> None:
        """Write what is new, unless the client has yet to take what was written before."""
        if self._send is None or self._waiting is not None:
            return
        try:
            body, last = self._source.take()
        except Exception:  # a fault of ours must end the stream, not leave it hanging
            log.exception("an event could not be written; the stream ends")
            self._source.abandon()
            body, last = _FAULT + DONE, True
        if body or last:
            self._write(body, last)

    def _keep_alive(self) -> None:
        if self._send is None:
            return
        if self._silent and self._started and self._waiting is None:
            self._write(KEEP_ALIVE, last=False)
        self._silent = True
        self._watch_silence()

    def _watch_silence(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SILENCE, self._keep_alive)

    def _write(self, body: bytes, last: bool) -> None:
        assert self._send is not None
        self._silent = False
        if self._started:
            sending = self._send_chunk(
                {"type": "http.response.body", "body": body, "more_body": not last}
            )
        else:
            sending = self._start(self._send, body, last)
        if last:
            self._send = None
        try:
            wait = sending.send(None)
        except StopIteration:
            return
        self._waiting = asyncio.get_running_loop().create_task(self._finish(sending, wait))

    async def _start(self, send: Send, body: bytes, last: bool) -> None:
        """Headers and the first events; or the refusal, where there is nothing but a failure."""
        self._started = True
        failure = self._source.failure
        head: Response = self
        if failure is not None:
            head = self._refuse(failure)
            body, last = bytes(head.body), True
            self._send = None
        start = {"type": "http.response.start", "status": head.status_code}
        await send(start | {"headers": head.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _finish(self, sending: Coroutine[Any, Any, None], wait: Any) -> None:
        try:
            await _Rest(sending, wait)
        finally:
            self._waiting = None
        self.wake()


class Refusal(Protocol):
    """Renders an error that comes before the first byte."""

    def __call__(self, error: DetourError) -> Response: ...


class _Rest:
    """Awaits what is left of a coroutine that was run up to its first wait by hand."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], wait: Any) -> None:
        self._coroutine = coroutine
        self._wait = wait

    def __await__(self) -> Generator[Any, Any, None]:
        wait = self._wait
        while True:
            yield wait
            try:
                wait = self._coroutine.send(None)
            except StopIteration:
                return
