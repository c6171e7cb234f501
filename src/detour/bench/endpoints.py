"""What a server is asked and how its events read, for the three request forms the field uses.

Knows JSON bodies and events; knows no sockets and no clock.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from detour.bench.datasets import Prompt
from detour.errors import BadRequest


class Ask(NamedTuple):
    """What is the same for all requests of a run."""

    model: str
    stream: bool
    ignore_eos: bool
    temperature: float
    seed: int  # -1 = none is sent
    extra: dict[str, Any]  # added to every body, last


class Piece(NamedTuple):
    """What one event (or one whole reply) said. -1 where it said nothing."""

    has_text: bool
    output_tokens: int = -1  # so far
    prompt_tokens: int = -1
    cached_tokens: int = -1
    error: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    text: str | None = None
    meta_info: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def read_event(payload: bytes) -> Piece:
    """One event of /v1/completions, /v1/chat/completions or /generate."""
    try:
        event = _decode(payload)
    except msgspec.DecodeError as error:
        return Piece(False, error=f"an event is not the expected JSON ({error}): {payload[:200]!r}")
    if event.error is not None:
        return Piece(False, error=_sentence(event.error))
    has_text = bool(event.text) or any(_says_something(choice) for choice in event.choices)
    usage = event.usage or event.meta_info
    if usage is None:
        return Piece(has_text)
    cached = usage.cached_tokens
    if usage.prompt_tokens_details is not None:
        cached = usage.prompt_tokens_details.cached_tokens
    return Piece(
        has_text,
        -1 if usage.completion_tokens is None else usage.completion_tokens,
        -1 if usage.prompt_tokens is None else usage.prompt_tokens,
        -1 if cached is None else cached,
    )


def _says_something(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta or choice.message
    return delta is not None and bool(
        delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
    )


def error_text(body: bytes) -> str:
    """The sentence in an error reply, whatever its shape."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:300].decode("utf-8", "replace").strip()
    return _sentence(found)


def _sentence(found: Any) -> str:
    for key in ("error", "message", "detail"):
        while isinstance(found, dict) and key in found:
            found = found[key]
    return found if isinstance(found, str) else str(found)[:300]


def _completions(prompt: Prompt, ask: Ask) -> dict[str, Any]:
    body = _openai(prompt, ask)
    body["prompt"] = prompt.ids or prompt.text
    body["max_tokens"] = prompt.output_tokens
    return body


def _chat(prompt: Prompt, ask: Ask) -> dict[str, Any]:
    if not prompt.text:
        raise BadRequest("Chat takes prompts of text alone; use --random-prompt-form text.")
    body = _openai(prompt, ask)
    body["messages"] = [{"role": "user", "content": prompt.text}]
    body["max_completion_tokens"] = prompt.output_tokens
    body["max_tokens"] = prompt.output_tokens  # llama-server and older servers know only this name
    return body


def _openai(prompt: Prompt, ask: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": ask.model,
        "temperature": ask.temperature,
        "stream": ask.stream,
        "ignore_eos": ask.ignore_eos,
    }
    if ask.stream:
        body["stream_options"] = {"include_usage": True}
    if ask.seed >= 0:
        body["seed"] = ask.seed
    return body


def _generate(prompt: Prompt, ask: Ask) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_new_tokens": prompt.output_tokens,
        "temperature": ask.temperature,
        "ignore_eos": ask.ignore_eos,
    }
    if ask.seed >= 0:
        sampling["sampling_seed"] = ask.seed
    body: dict[str, Any] = {"sampling_params": sampling, "stream": ask.stream}
    if prompt.ids:
        body["input_ids"] = prompt.ids
    else:
        body["text"] = prompt.text
    return body


class Endpoint(NamedTuple):
    path: str
    takes_ids: bool
    form: Callable[[Prompt, Ask], dict[str, Any]]

    def body(self, prompt: Prompt, ask: Ask) -> bytes:
        return msgspec.json.encode(self.form(prompt, ask) | ask.extra)


COMPLETIONS = Endpoint("/v1/completions", True, _completions)
CHAT = Endpoint("/v1/chat/completions", False, _chat)
GENERATE = Endpoint("/generate", True, _generate)

BACKENDS = {
    "openai": COMPLETIONS,
    "openai-chat": CHAT,
    "native": GENERATE,
    "sglang": GENERATE,
    "sglang-native": GENERATE,
    "sglang-oai": COMPLETIONS,
    "sglang-oai-chat": CHAT,
    "vllm": COMPLETIONS,
    "vllm-chat": CHAT,
    "lmdeploy": COMPLETIONS,
    "lmdeploy-chat": CHAT,
}
