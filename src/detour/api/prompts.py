"""From what a client sends to prompt token ids, without stalling the streams of others.

A long text is encoded on a thread (tokenizers gives up the interpreter lock while it works); a
short one costs less than the hand-over and is encoded in place.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from detour.api.schema import Message
from detour.errors import BadRequest
from detour.text.chat_template import ChatTemplate
from detour.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 2_000
# More characters per token than any prose has: a text that is longer than this many per token of
# context is looked at through its beginning first, so that refusing it costs little.
_MAX_CHARACTERS_PER_TOKEN = 16

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    ids: Sequence[int]
    text: str = ""  # as sent; "" where token ids were sent


class Prompts:
    """Makes prompts. `close` ends its threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, threads: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def from_text(
        self, text: str, context_length: int, add_special_tokens: bool = True
    ) -> Prompt:
        """Raises BadRequest for a text that cannot fit `context_length` tokens by far."""
        ids = await self._run(
            len(text), lambda: self._encode(text, context_length, add_special_tokens)
        )
        return Prompt(ids, text)

    async def from_messages(
        self,
        messages: Sequence[Message],
        context_length: int,
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        opening: Callable[[str], str] = lambda text: "",
    ) -> Prompt:
        """Raises BadRequest for messages that the template cannot render.

        opening: what the answer is made to begin with, by the text rendered so far.
        """
        if not messages:
            raise BadRequest("messages must hold at least one message.", param="messages")
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        turns = [_plain(message, place) for place, message in enumerate(messages)]
        begins_turn = add_generation_prompt is not False and not continue_final_message

        def work() -> tuple[list[int], str]:
            text = self._template.render(
                turns, tools, begins_turn, continue_final_message, dict(template_kwargs)
            )
            text += opening(text)
            return self._encode(text, context_length, False), text

        size = sum(len(turn["content"]) for turn in turns) + 200 * len(tools)
        return Prompt(*await self._run(size + 20 * len(turns), work))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Raises BadRequest for an id that is not in the vocabulary."""
        self.check_ids(ids, self._tokenizer.vocab_size, "tokens")
        return await self._run(
            len(ids), lambda: self._tokenizer.decode(list(ids), skip_special_tokens)
        )

    def check_ids(self, ids: Sequence[int], size: int, param: str) -> None:
        """Raises BadRequest for an id outside a vocabulary of `size`."""
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise BadRequest(f"{param} must be between 0 and {size - 1}, got {wrong}.", param=param)

    async def _run(self, characters: int, work: Callable[[], _T]) -> _T:
        if characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, context_length: int, add_special_tokens: bool) -> list[int]:
        most = context_length * _MAX_CHARACTERS_PER_TOKEN
        if len(text) > most:
            beginning = self._tokenizer.encode(text[:most], add_special_tokens)
            if len(beginning) > context_length:
                raise over_context(f"more than {len(beginning)}", context_length)
        return self._tokenizer.encode(text, add_special_tokens)


def over_context(prompt_tokens: int | str, context_length: int) -> BadRequest:
    return BadRequest(
        f"The prompt has {prompt_tokens} tokens, but this server's context holds {context_length} "
        "(prompt and answer together).",
        param="messages|prompt",
        code="context_length_exceeded",
    )


def _plain(message: Message, place: int) -> dict[str, Any]:
    """The message as templates want it: content one string, tool arguments an object."""
    turn = message.model_dump(exclude_unset=True)
    turn["content"] = _content(message.content, place)
    if "reasoning" in turn:  # vLLM's name of what templates read
        turn.setdefault("reasoning_content", turn["reasoning"])
    calls = turn.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"messages[{place}].tool_calls[{number}] needs a function with a name.",
                param="messages",
            )
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise BadRequest(
                    f"messages[{place}].tool_calls: arguments are not valid JSON.", param="messages"
                ) from None
    return turn


def _content(content: str | list[dict[str, Any]] | None, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        kind, text = part.get("type", "text"), part.get("text")
        if kind != "text":
            raise BadRequest(
                f"messages[{place}].content: this model takes text parts only, not {kind!r}.",
                param="messages",
            )
        if not isinstance(text, str):
            raise BadRequest(
                f"messages[{place}].content: a text part needs a string 'text'.", param="messages"
            )
        texts.append(text)
    return "\n".join(texts)
