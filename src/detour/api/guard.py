"""What every request passes before a route sees it: key, size of the body, request id, counting.

A plain ASGI middleware, so that a stream's chunks pay for no wrapper but one.
"""

import hmac
import http
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from detour.api.failures import error_response
from detour.errors import BadRequest, DetourError, TooLarge, Unauthorized
from detour.metrics import Metrics

FREE_PATHS = frozenset(("/health", "/health_generate", "/ready", "/ping", "/metrics", "/metrics/"))
CONTROL_PATHS = frozenset(("/flush_cache", "/reset_prefix_cache", "/abort_request"))
MAX_REQUEST_ID = 128
REQUEST_ID = "detour.request_id"  # its key in the ASGI scope
RAW_SEND = "detour.send"  # the server's own: what wraps it looks at a response's start alone


class Guard:
    def __init__(
        self, app: ASGIApp, metrics: Metrics, api_key: str, admin_api_key: str, max_body_bytes: int
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._key = api_key.encode()
        self._admin_key = (admin_api_key or api_key).encode()
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope[REQUEST_ID] = request_id
        scope[RAW_SEND] = send
        send = self._with_request_id(scope, send, request_id.encode("latin-1"))
        try:
            self._check_key(scope, headers)
            body = b""
            if scope["method"] in ("POST", "PUT", "PATCH"):
                body = await self._read(headers, receive)
        except DetourError as error:
            await error_response(error)(scope, receive, send)
            return
        except ConnectionResetError:
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        key = self._admin_key if path in CONTROL_PATHS else self._key
        if not key or path in FREE_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key):
            raise Unauthorized(
                "This server needs an API key: send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises TooLarge before or while it arrives."""
        told = headers.get("content-length", "0")
        if told.isascii() and told.isdigit() and int(told) > self._max_body:
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._max_body:
                raise self._too_large()
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is larger than the {self._max_body} bytes this server takes.")

    def _with_request_id(self, scope: Scope, send: Send, request_id: bytes) -> Send:
        async def send_(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if message["status"] == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                    message["headers"].append((b"connection", b"close"))
                route = scope.get("route")
                path = route.path if route is not None else "(none)"
                self._metrics.responded(path, message["status"])
            await send(message)

        return send_


def _request_id(headers: Headers) -> str:
    """The client's, if it is short printable ASCII, else one of ours."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(12)


def check_request_id(rid: str) -> str:
    """A `rid` from a body. Raises BadRequest."""
    if not rid or len(rid) > MAX_REQUEST_ID or not rid.isprintable():  # no surrogate is
        raise BadRequest(f"rid must be 1 to {MAX_REQUEST_ID} printable characters.", param="rid")
    return rid


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then whatever the connection says."""
    given = False

    async def receive_() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_
