"""An HTTP/1.1 client for load: a write per request, a callback per piece of body, no task a chunk.

Knows connections and message framing (through httptools); knows nothing of JSON, tokens or models.
A load generator shares the machine with the server it measures, so what it spends per chunk counts.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from detour.errors import BadRequest

BodySink = Callable[[bytes, float], None]  # a piece of the body, and its perf_counter time


class ConnectFailed(Exception):
    """Nobody answers at the address."""


class BrokenReply(Exception):
    """The connection ended, or spoke something else than HTTP, before the reply was complete."""

    def __init__(self, message: str, *, nothing_came: bool) -> None:
        super().__init__(message)
        self.nothing_came = nothing_came


class Target:
    """Where a server is. `url` is http(s)://host[:port][/prefix].

    Raises BadRequest for anything else.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise BadRequest(f"{url!r} is not a server's URL: its port is not a number.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"{url!r} is not a server's URL; write http://127.0.0.1:30000.")
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{self.prefix}"
        self.host_header = parts.netloc.rpartition("@")[2]


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. The parser's callbacks are the on_* methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpResponseParser(self)
        self.usable = True  # open, and the server did not ask to close it
        self.uses = 0
        self.now = 0.0
        self._expects_reply = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    async def exchange(self, message: bytes, sink: BodySink, error_sink: BodySink) -> int:
        """Send `message`; the body goes to `sink` if the status is 200, else to `error_sink`."""
        self.uses += 1
        self.status = 0
        self.came = False
        self.framed = False
        self._sink, self._error_sink = sink, error_sink
        self._expects_reply = True
        self.done: asyncio.Future[int] = self.loop.create_future()
        self.transport.write(message)
        try:
            return await self.done
        except asyncio.CancelledError:
            self.abandon()
            raise
        finally:
            self._expects_reply = False

    def abandon(self) -> None:
        self.usable = False
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        self.came = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's reply is not HTTP ({error})")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.framed = True

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self._body = self._sink if self.status == 200 else self._error_sink

    def on_body(self, body: bytes) -> None:
        self._body(body, self.now)

    def on_message_complete(self) -> None:
        if not self.parser.should_keep_alive():
            self.usable = False
            self.transport.close()
        if not self.done.done():
            self.done.set_result(self.status)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if not self._expects_reply or self.done.done():
            return
        if exc is None and self.status and not self.framed:
            self.done.set_result(self.status)  # a body without a length ends with its connection
        else:
            self._fail("the server closed the connection before the reply was complete")

    def _fail(self, message: str) -> None:
        self.usable = False
        self.transport.abort()
        if self._expects_reply and not self.done.done():
            self.done.set_exception(BrokenReply(message, nothing_came=not self.came))


class HttpClient:
    """Exchanges with one server over as many connections as there are exchanges at once."""

    def __init__(self, target: Target, headers: dict[str, str]) -> None:
        self._target = target
        lines = [f"Host: {target.host_header}", "User-Agent: detour-bench", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join(lines)
        self._free: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, so that they can be made before the clock starts."""
        head = f"{method} {self._target.prefix}{path} HTTP/1.1\r\n{self._head}\r\n"
        if body or method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def exchange(self, message: bytes, sink: BodySink, error_sink: BodySink) -> int:
        """Returns the status once the body is complete. Raises ConnectFailed, BrokenReply.

        A kept connection that the server had closed in the meantime is replaced without a word.
        """
        while self._free:
            connection = self._free.pop()
            if not connection.usable:
                continue
            try:
                return await self._on(connection, message, sink, error_sink)
            except BrokenReply as error:
                if not error.nothing_came:
                    raise
        return await self._on(await self._connect(), message, sink, error_sink)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A whole small reply: (status, body)."""
        pieces: list[bytes] = []

        def keep(piece: bytes, _: float) -> None:
            pieces.append(piece)

        status = await self.exchange(self.message(method, path, body), keep, keep)
        return status, b"".join(pieces)

    async def close(self) -> None:
        for connection in self._free:
            connection.transport.close()
        self._free.clear()
        await asyncio.sleep(0)

    async def _on(
        self, connection: _Connection, message: bytes, sink: BodySink, error_sink: BodySink
    ) -> int:
        status = await connection.exchange(message, sink, error_sink)
        if connection.usable:
            self._free.append(connection)
        return status

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        target = self._target
        try:
            _, connection = await loop.create_connection(
                _Connection, target.host, target.port, ssl=self._tls
            )
        except (OSError, ssl.SSLError) as error:
            raise ConnectFailed(f"no server answers ({error})") from error
        return connection
