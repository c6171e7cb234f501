"""Every error as OpenAI's error JSON: one sentence, the field at fault, the right status."""

import http
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from detour.errors import BadRequest, DetourError, NotFound, Unavailable

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1


def error_body(error: DetourError) -> dict[str, Any]:
    """{"error": {...}} as OpenAI has it, with SGLang's and vLLM's flat fields beside it."""
    # What a client sent may stand in the sentence, half a surrogate pair too, which is no UTF-8.
    message = error.message.encode("utf-8", "backslashreplace").decode()
    fields = {
        "message": message,
        "type": error.type,
        "param": error.param or None,
        "code": error.code or None,
    }
    return {"error": fields, "object": "error", **fields, "code": error.status}


def error_response(error: DetourError) -> Response:
    headers = {}
    if isinstance(error, Unavailable):
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    if error.status == http.HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


def add_handlers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, DetourError)
        if error.status >= 500 and not isinstance(error, Unavailable):
            log.error("%s %s: %s", request.method, request.url.path, error.message)
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        content_type = request.headers.get("content-type", "")
        return error_response(_validation_error(error.errors(), content_type))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_http_error(request, error))

    async def unknown(request: Request, error: Exception) -> Response:
        """Starlette logs the traceback after this, as it is raised again."""
        return error_response(DetourError("The server failed on this request; its log says why."))

    app.add_exception_handler(DetourError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unknown)


def _http_error(request: Request, error: HTTPException) -> DetourError:
    path = request.url.path
    if error.status_code == http.HTTPStatus.NOT_FOUND:
        return NotFound(f"There is no {path} here; /docs lists what there is.")
    result = BadRequest(f"{error.detail}.")
    if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
        result = BadRequest(f"{path} does not take {request.method}.", code="method_not_allowed")
    elif error.detail == "There was an error parsing the body":
        result = BadRequest("The body is not valid JSON in UTF-8.", code="invalid_json")
    result.status = error.status_code
    return result


def _validation_error(errors: Sequence[Mapping[str, Any]], content_type: str) -> BadRequest:
    """The first error as a sentence. Of a union's branches, all complain: they become one."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        place = first["loc"][-1]
        return BadRequest(
            f"The body is not valid JSON: {reason} at character {place}.", code="invalid_json"
        )
    path = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if not path:
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return BadRequest(
                f"The body must be JSON with content type application/json, not {content_type!r}."
            )
        return BadRequest("The body must be a JSON object.")
    param = str(path[0])
    alike = [error for error in errors if param in error["loc"]]
    fields = [part for part in path if not _names_a_branch(part)]
    name = _dotted(fields)
    if first["type"] == "missing":
        return BadRequest(f"{name} is missing.", param=name)
    wants = dict.fromkeys(_want(error) for error in alike if len(alike) == 1 or _near(error, path))
    return BadRequest(f"{name}: {' or '.join(wants)}.", param=name)


def _near(error: Mapping[str, Any], path: Sequence[Any]) -> bool:
    """Another branch of the same union: complains of the same place or a shallower one."""
    place = [part for part in error["loc"] if part != "body"]
    return len(place) <= len(path) or place[: len(path)] == list(path)


def _want(error: Mapping[str, Any]) -> str:
    message = str(error["msg"])
    return message[:1].lower() + message[1:]


def _names_a_branch(part: Any) -> bool:
    """pydantic puts the branch of a union into the path: "str", "list[int]", "function-wrap"."""
    return isinstance(part, str) and (part in _BRANCHES or part.startswith(("list[", "dict[")))


_BRANCHES = frozenset(
    ("str", "int", "float", "bool", "NativeSampling", "constrained-int", "nullable")
)


def _dotted(path: Sequence[Any]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text
