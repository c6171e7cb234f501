"""Reading a text that comes in pieces, for parsers of what a model says. Knows no syntax.

A parser is push and finish, nothing else. Each is written as one generator that reads on and waits
where more text could change its mind, so however the text is cut the pieces add up to the same.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple, Protocol, TypeVar

Kind = Literal["reasoning", "content", "call", "arguments", "end"]

_T = TypeVar("_T")
_LONGEST_NUMBER = 4_000  # characters of a JSON number or word; beyond it nothing is one
_STRUCTURE = re.compile(r'\\.|["{}\[\]]|[\x00-\x1f]', re.DOTALL)
_SCALAR_END = re.compile(r"[\s,\]}<]")


class Piece(NamedTuple):
    """A bit of a parsed answer.

    "reasoning" and "content" carry text; "call" begins a call of the function `text`, "arguments"
    carries more of its JSON, "end" says that the call is whole.
    """

    kind: Kind
    text: str


class Parser(Protocol):
    def push(self, text: str) -> list[Piece]:
        """What became certain with this text."""

    def finish(self, cut: bool = False) -> list[Piece]:
        """What is left. cut: the model was stopped (length, abort) rather than done."""


Take = Callable[[str], object]
Reading = Generator[None, None, _T]  # yields where it needs more text


class Marks:
    """A set of strings to find in a text that comes in pieces."""

    def __init__(self, *marks: str) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._search = re.compile("|".join(map(re.escape, longest_first))).search
        self._starts = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self.first = frozenset(mark[0] for mark in marks)
        self._longest = len(longest_first[0])

    def cut(self, text: str) -> tuple[str, str, str]:
        """(before the first mark, the mark, what follows); without one the mark is "" and what
        follows is the end of the text that may yet become one."""
        if self.first.isdisjoint(text):
            return text, "", ""
        found = self._search(text)
        if found:
            return text[: found.start()], found[0], text[found.end() :]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._starts:
                return text[:start], "", text[start:]
        return text, "", ""


class Scan:
    """A Parser whose `read` is a generator over the text that came.

    stops: while more text would only be passed on as it is, the characters that it must not hold
        for that: who sees to it may pass the text on himself. None = it has to be pushed.
    """

    def __init__(self) -> None:
        self.stops: frozenset[str] | None = None
        self.text = ""  # came and is not read yet
        self.ended = False
        self.cut = False
        self._pieces: list[Piece] = []
        self._reading = self.read()

    def push(self, text: str) -> list[Piece]:
        self.text += text
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        self.ended, self.cut = True, cut
        return self.push("")

    def read(self) -> Reading[None]:
        raise NotImplementedError

    def say(self, kind: Kind, text: str = "") -> None:
        self._pieces.append(Piece(kind, text))

    def content(self, text: str) -> None:
        self._pieces.append(Piece("content", text))

    def take(self, size: int) -> str:
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def through(self, marks: Marks, take: Take, passes: bool = False) -> Reading[str]:
        """Hands the text before the first mark to `take` as it comes. Returns the mark, which is
        then behind us, or "" once the text has ended.

        passes: `take` says it and remembers nothing, see `stops`.
        """
        while True:
            before, mark, self.text = marks.cut(self.text)
            if self.ended and not mark:
                before, self.text = before + self.text, ""
            if before:
                take(before)
            if mark or self.ended:
                return mark
            self.stops = marks.first if passes and not self.text else None
            yield
            self.stops = None

    def rest(self) -> Reading[None]:
        """All that comes is content."""
        while True:
            if self.text:
                self.content(self.take(len(self.text)))
            self.stops = frozenset()
            yield

    def decide(self, judge: Callable[[str], _T | None]) -> Reading[_T | None]:
        """The judge's first verdict on the text ahead; None if it ends without one."""
        while (verdict := judge(self.text)) is None and not self.ended:
            yield
        return verdict

    def skip_blanks(self, take: Take = len) -> Reading[str]:
        """Hands white space to `take`; returns the next character, not read yet, "" at the end."""
        while True:
            rest = self.text.lstrip()
            if len(rest) < len(self.text):
                take(self.take(len(self.text) - len(rest)))
            if rest or self.ended:
                return rest[:1]
            yield

    # --- JSON

    def json_value(self, take: Take) -> Reading[bool]:
        """Hands one JSON value to `take` as it comes; false if the text ends within it.

        Line breaks and tabs that models leave raw within strings are escaped.
        """
        first = yield from self.skip_blanks()
        if first and first in '{["':
            return (yield from self._nested(take))
        while True:
            end = _SCALAR_END.search(self.text)
            if end or self.ended or len(self.text) > _LONGEST_NUMBER:
                break
            yield
        take(self.take(end.start() if end else len(self.text)))
        return end is not None

    def _nested(self, take: Take) -> Reading[bool]:
        depth, quoted = 0, False
        while True:
            done = 0
            for found in _STRUCTURE.finditer(self.text):
                mark = found[0]
                if mark == '"':
                    quoted = not quoted
                elif quoted and mark < " ":
                    take(self.text[done : found.start()] + json.dumps(mark)[1:-1])
                    done = found.end()
                elif not quoted and mark in "{[":
                    depth += 1
                elif not quoted and mark in "}]":
                    depth -= 1
                if depth <= 0 and not quoted and mark in '"}]':
                    take(self.text[done : found.end()])
                    self.take(found.end())
                    return True
            held = _ends_in_escape(self.text)
            size = len(self.text) - held
            if size > done:
                take(self.text[done:size])
            self.take(size)
            if self.ended:
                return False
            yield


def _ends_in_escape(text: str) -> bool:
    """The last character is a backslash that has yet to say what it escapes."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1
