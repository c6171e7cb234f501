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
from starlette.types import Message, Receive, Scope, Send

from detour.errors import DetourError

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
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

    @property
    def finished(self) -> bool:
        """All is said once `take` has been called again."""

    def take(self) -> bytes:
        """Events for all that is new since the last call; b"" if nothing is."""

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
        self._started = False
        self._waiting: asyncio.Task[None] | None = None  # a write that the client does not take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            self.wake()
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:  # also comes after our own last write
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
            body = self._source.take()
            last = self._source.finished
        except Exception:  # a fault of ours must end the stream, not leave it hanging
            log.exception("an event could not be written; the stream ends")
            self._source.abandon()
            body, last = _FAULT + DONE, True
        if not body and not last:
            return
        if not self._started:
            self._started = True
            failure = self._source.failure
            refusal = self._refuse(failure) if failure else None
            head = refusal or self
            body, last = (bytes(refusal.body), True) if refusal else (body, last)
            start = {
                "type": "http.response.start",
                "status": head.status_code,
                "headers": head.raw_headers,
            }
            self._write(_send_both(self._send, start, _chunk(body, last)), last)
        else:
            self._write(self._send(_chunk(body, last)), last)

    def _write(self, sending: Any, last: bool) -> None:
        if last:
            self._send = None
        try:
            wait = sending.send(None)
        except StopIteration:
            return
        self._waiting = asyncio.get_running_loop().create_task(self._finish(sending, wait))

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


async def _send_both(send: Send, start: Message, chunk: Message) -> None:
    await send(start)
    await send(chunk)


def _chunk(body: bytes, last: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}
