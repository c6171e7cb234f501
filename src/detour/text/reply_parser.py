"""What a model says, parted into reasoning, content and calls, while it says it.

Puts a reasoning parser and a tool-call parser together. Calls are looked for first: one that the
model writes while it thinks ends the thought. Knows nothing of HTTP or of any reply's shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detour.text.reasoning import ReasoningParser, StrayClose, Thinking, find_thinking
from detour.text.scan import Kind, Piece
from detour.text.tool_calls import ToolParser, find_tool_parser
from detour.text.tool_schema import Tools

_JOINED = ("reasoning", "content", "arguments")


@dataclass(frozen=True)
class ReplySyntax:
    """How the served model writes thoughts and calls; None where that is not read."""

    thinking: Thinking | None = None
    tool_parser: type[ToolParser] | None = None

    def opening(self, name: str, tools: Sequence[Mapping[str, Any]]) -> str:
        """What makes the model go on with a call; of any of the tools where `name` is ""."""
        assert self.tool_parser is not None, "calls are forced only where they can be read"
        return self.tool_parser.opening(name, bool(name) and Tools(tools).needs_arguments(name))

    def closed_thought(self, prompt: str) -> str:
        """What ends a thought that the prompt's end has begun."""
        thinking = self.thinking or Thinking()
        return thinking.close if prompt.rstrip().endswith(thinking.open) else ""

    def less(self, thinking: bool, calls: bool) -> "ReplySyntax":
        """Without reading thoughts, or calls, where these are true."""
        return ReplySyntax(None if thinking else self.thinking, None if calls else self.tool_parser)

    def parser(
        self, prompt: str, tools: Sequence[Mapping[str, Any]], opening: str = ""
    ) -> "ReplyParser | None":
        """For one answer to this prompt; None where there is nothing to part.

        opening: what the prompt ends with and the answer begins with (see above).
        """
        calls = self.tool_parser(Tools(tools)) if self.tool_parser else None
        if self.thinking is None and calls is None:
            return None
        inside = not opening and self.thinking is not None and self.thinking.opened_by(prompt)
        return ReplyParser(self.thinking, inside, calls, opening)

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that must not be left out of the text."""
        thinking = (self.thinking.open, self.thinking.close) if self.thinking else ()
        return (*thinking, *(self.tool_parser.marks if self.tool_parser else ()))


def reply_syntax(reasoning: str, tool_calls: str, template: str) -> ReplySyntax:
    """By the parsers' names; "auto" asks the chat template, "" is none. Raises ConfigError."""
    return ReplySyntax(find_thinking(reasoning, template), find_tool_parser(tool_calls, template))


class ReplyParser:
    """A Parser of all kinds of pieces. Neighbours of one kind come as one.

    Blanks around a thought, and between or around calls, are nobody's and dropped.
    """

    def __init__(
        self,
        thinking: Thinking | None,
        inside: bool = False,
        calls: ToolParser | None = None,
        opening: str = "",
    ) -> None:
        """inside: the answer begins within a thought. opening: was said before the first push."""
        self._thinking = thinking
        self._thoughts: ReasoningParser | StrayClose | None = None
        if thinking is not None:
            self._thoughts = ReasoningParser(thinking, inside)
        self._calls = calls
        self._kind: Kind = "content"  # of what was said last
        self._blanks = ""  # white space that is said once more of its kind comes
        self._at_start = False  # white space is dropped until there is something of its kind
        self._called = False
        self._said: list[tuple[Kind, list[str]]] = []
        self._stops: frozenset[str] | None = None  # see _passing
        if opening:
            self._read(opening)

    def push(self, text: str) -> list[Piece]:
        if self._stops is None or not self._stops.isdisjoint(text):
            self._read(text)
            self._stops = self._passing()
            return self._taken()
        said = text.rstrip()  # nearly all that a model says
        blanks, self._blanks = self._blanks, text[len(said) :]
        if said:
            return [Piece(self._kind, blanks + said)]
        self._blanks = blanks + text
        return []

    def finish(self, cut: bool = False) -> list[Piece]:
        if self._calls is not None:
            self._sort(self._calls.finish(cut))
        if self._thoughts is not None:
            self._say(self._thoughts.finish(cut))
        if self._kind == "content" and not self._called and not self._at_start:
            self._add("content", self._blanks)
        return self._taken()

    def _passing(self) -> frozenset[str] | None:
        """The characters that a text must not hold to be just more of what was said last."""
        nothing = frozenset[str]()
        calls = nothing if self._calls is None else self._calls.stops
        thoughts = nothing if self._thoughts is None else self._thoughts.stops
        thinks = self._thoughts is not None and self._thoughts.inside
        same_kind = self._kind == ("reasoning" if thinks else "content")
        if calls is None or thoughts is None or self._at_start or not same_kind:
            return None
        return calls | thoughts

    def _read(self, text: str) -> None:
        if self._calls is None:
            self._uncalled(text)
        else:
            self._sort(self._calls.push(text))

    def _taken(self) -> list[Piece]:
        pieces = [Piece(kind, "".join(texts)) for kind, texts in self._said]
        self._said.clear()
        return pieces

    def _sort(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "content":
                self._uncalled(piece.text)
                continue
            if piece.kind == "call":
                self._begin_call()
            self._add(piece.kind, piece.text)

    def _begin_call(self) -> None:
        if isinstance(self._thoughts, ReasoningParser) and self._thinking is not None:
            unclosed = self._thoughts.inside
            self._say(self._thoughts.finish())
            self._thoughts = StrayClose(self._thinking) if unclosed else None
        self._kind, self._called = "call", True
        self._blanks, self._at_start = "", True

    def _uncalled(self, text: str) -> None:
        """Text that is no part of a call."""
        if self._thoughts is None:
            self._trimmed("content", text)
        else:
            self._say(self._thoughts.push(text))

    def _say(self, pieces: Sequence[Piece]) -> None:
        for kind, text in pieces:
            self._trimmed(kind, text)

    def _trimmed(self, kind: Kind, text: str) -> None:
        if kind != self._kind:
            self._at_start = self._at_start or kind == "reasoning" or self._kind == "reasoning"
            self._kind, self._blanks = kind, ""
        if self._at_start:
            text = text.lstrip()
            if not text:
                return
            self._at_start = False
        said = text.rstrip()
        if said:
            self._add(kind, self._blanks + said)
            self._blanks = text[len(said) :]
        else:
            self._blanks += text

    def _add(self, kind: Kind, text: str) -> None:
        if kind in _JOINED and self._said and self._said[-1][0] == kind:
            self._said[-1][1].append(text)
        elif text or kind not in _JOINED:
            self._said.append((kind, [text]))
