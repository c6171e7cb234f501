"""Parts that replies of the OpenAI routes share. Knows generations; knows no route."""

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from detour.api.answer import Answer, Thoughts
from detour.api.failures import error_body
from detour.api.generation import Choice, Generation
from detour.api.schema import StreamOptions
from detour.api.sse import DONE
from detour.errors import DetourError

_TAIL = b"]}\n\n"  # ends a chunk without usage

encode_json = msgspec.json.Encoder().encode


def usage(generation: Generation, thoughts: Thoughts | None = None) -> dict[str, Any]:
    """thoughts: how to tell their tokens apart, where that is done."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }
    if thoughts is not None:
        count = sum(thoughts.count(choice.token_ids) for choice in generation.choices)
        told["completion_tokens_details"] = {"reasoning_tokens": count}
    return told


def finish_reason(choice: Choice, answer: Answer | None = None) -> str | None:
    """In OpenAI's words; errors and deadlines are answered as errors instead."""
    reason = choice.finish_reason
    return (answer.finish_reason(reason) if answer else reason) or None


def json_reply(body: dict[str, Any] | list[Any]) -> Response:
    return Response(encode_json(body), media_type="application/json")


def error_event(error: DetourError) -> bytes:
    return b"data: " + encode_json(error_body(error)) + b"\n\n"


class OpenAIStream:
    """The Source of both OpenAI routes: a choice's chunks by `write_choice`, usage, [DONE].

    `head` is every chunk's part before the choices; `write_choice` gives the events of one choice
    for all that is new (b"" for nothing), each ended by the `tail` it is given.
    """

    __slots__ = (
        "_generation",
        "_head",
        "_only",
        "_thoughts",
        "_told",
        "_usage_always",
        "_with_usage",
        "_write_choice",
    )

    def __init__(
        self,
        generation: Generation,
        head: bytes,
        options: StreamOptions | None,
        write_choice: Callable[[Choice, bytes], bytes],
        thoughts: Thoughts | None = None,
    ) -> None:
        self._generation = generation
        self._head = head
        self._with_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._write_choice = write_choice
        self._thoughts = thoughts
        self._told = [False] * len(generation.choices)  # its finish reason was sent
        plain = len(generation.choices) == 1 and not self._usage_always
        self._only = generation.choices[0] if plain else None

    @property
    def failure(self) -> DetourError | None:
        return self._generation.failure

    def abandon(self) -> None:
        self._generation.abandon()

    def take(self) -> tuple[bytes, bool]:
        generation = self._generation
        if self._only is not None and not generation.finished:  # nearly all chunks of all streams
            return self._write_choice(self._only, _TAIL), False
        if generation.failure is not None:
            return error_event(generation.failure) + DONE, True
        tail = self._tail() if self._usage_always else _TAIL
        events = b""
        for choice in generation.choices:
            if self._told[choice.index]:
                continue
            self._told[choice.index] = bool(choice.finish_reason)
            events += self._write_choice(choice, tail)
        if generation.finished:
            if self._with_usage:
                events += self._head + self._tail()
            events += DONE
        return events, generation.finished

    def _tail(self) -> bytes:
        return b'],"usage":' + encode_json(usage(self._generation, self._thoughts)) + b"}\n\n"


def chunk_head(reply_id: str, kind: str, created: int, model: str) -> bytes:
    """`data: {"id": ..., "choices":[`, to be followed by choices and a tail."""
    body = encode_json({"id": reply_id, "object": kind, "created": created, "model": model})
    return b"data: " + body[:-1] + b',"choices":['
