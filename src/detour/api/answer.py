"""One choice's answer, parted, in OpenAI's words: deltas while it comes, or a message once it is
whole. Knows the parser's pieces and the shapes; nothing of HTTP.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from detour.text.reply_parser import ReplyParser
from detour.text.scan import Piece

Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How to count the tokens of a thought: by the tokens that are its marks.

    inside: the answer begins within one.
    """

    opens: int  # -1 = no token is that mark
    closes: int
    inside: bool

    def count(self, ids: Sequence[int]) -> int:
        """Of an answer's tokens; the mark that ends the thought is one of its own."""
        if not self.inside and (not ids or ids[0] != self.opens):
            return 0
        return ids.index(self.closes) + 1 if self.closes in ids else len(ids)


class Answer:
    """Push text, finish: as the parser it wraps, but deltas come out.

    one_call: calls after the first are left out (parallel_tool_calls false).
    gathers_thoughts: reasoning comes as one delta, once it is over (stream_reasoning false).
    """

    __slots__ = ("_calls", "_gathered", "_one_call", "_parser", "whole_calls")

    def __init__(
        self, parser: ReplyParser, one_call: bool = False, gathers_thoughts: bool = False
    ) -> None:
        self._parser = parser
        self._one_call = one_call
        self._gathered: list[str] | None = [] if gathers_thoughts else None
        self._calls = 0
        self.whole_calls = 0  # that may be acted upon

    def push(self, text: str) -> list[Delta]:
        return self._deltas(self._parser.push(text))

    def finish(self, reason: str) -> list[Delta]:
        deltas = self._deltas(self._parser.finish(cut=reason != "stop"))
        return deltas + self._thoughts()

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self.whole_calls else reason

    def message(self, text: str, reason: str) -> dict[str, Any]:
        """The whole answer. A call that was cut off is left out: it must not be acted upon."""
        texts: dict[str, str] = {"content": "", "reasoning_content": ""}
        calls: list[dict[str, Any]] = []
        for delta in self.push(text) + self.finish(reason):
            for call in delta.pop("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            for kind in texts:
                texts[kind] += delta.get(kind, "")
        thought, calls = texts["reasoning_content"] or None, calls[: self.whole_calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": texts["content"] or (None if calls or thought else ""),
            "reasoning_content": thought,
            "reasoning": thought,
        }
        if calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in calls
            ]
        return message

    def _deltas(self, pieces: Iterable[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for kind, text in pieces:
            if kind == "reasoning" and self._gathered is not None:
                self._gathered.append(text)
                continue
            deltas += self._thoughts()
            if kind == "content":
                deltas.append({"content": text})
            elif kind == "reasoning":
                deltas.append(_thought(text))
            else:
                deltas += self._call(kind, text)
        return deltas

    def _call(self, kind: str, text: str) -> list[Delta]:
        self._calls += kind == "call"
        if self._one_call and self._calls > 1:
            return []
        if kind == "end":
            self.whole_calls = self._calls
            return []
        call: dict[str, Any] = {"index": self._calls - 1}
        if kind == "call":
            call |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            call["function"] = {"name": text, "arguments": ""}
        else:
            call["function"] = {"arguments": text}
        return [{"tool_calls": [call]}]

    def _thoughts(self) -> list[Delta]:
        if not self._gathered:
            return []
        text = "".join(self._gathered)
        self._gathered.clear()
        return [_thought(text)]


def _thought(text: str) -> Delta:
    """SGLang's name of the field and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}
