"""How models write calls of tools: one file a syntax, found by name from this folder."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeGuard

from detour.errors import ConfigError
from detour.text.scan import Marks, Reading, Scan, Take
from detour.text.tool_schema import ANY, STRING, Tools, quoted, to_json

Judge = Callable[[str], bool | None]


class ToolParser(Scan):
    """A Parser of "content", "call", "arguments" and "end". One object an answer.

    A call that the text ends within has no "end": its arguments must not be acted upon.
    """

    names: ClassVar[tuple[str, ...]]  # of the flag, less "-" and "_"
    signs: ClassVar[tuple[str, ...]]  # what a chat template of this syntax writes, each of them
    rank: ClassVar[int] = 0  # of two whose signs a template holds, the larger one
    marks: ClassVar[tuple[str, ...]]  # tokens that must stay visible, special or not

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self.tools = tools

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        """The beginning of a call, to make a model go on with one; name "" leaves it the choice."""
        raise NotImplementedError

    def tagged_value(self, close: Marks, followed: Mapping[str, Judge], add: Take) -> Reading[str]:
        """A value up to a closing mark that is followed by what may follow it: else the mark is
        part of the value. Returns the mark, "" if the text ends within the value."""
        while True:
            mark = yield from self.through(close, add)
            if not mark or (yield from self.decide(followed[mark])) is not False:
                return mark
            add(mark)


class Call:
    """Says a call and writes its arguments as JSON, value by value, while they are read."""

    def __init__(self, parser: ToolParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._begin = "{"  # before the next key
        self._types = ANY
        self._held: list[str] = []  # of a value whose type shows once it is whole
        parser.say("call", name)

    def key(self, key: str, types: frozenset[str] = ANY) -> None:
        """Begin an argument; types: what the text says of it, beside the tool's schema."""
        schema = self._parser.tools.types(self._name, key)
        self._types = schema if types == ANY else types
        opens = '"' if self._types == STRING else ""
        self._parser.say("arguments", f"{self._begin}{quoted(key)}: {opens}")
        self._begin = ", "

    def add(self, text: str) -> None:
        if self._types == STRING:
            self._parser.say("arguments", quoted(text)[1:-1])
        else:
            self._held.append(text)

    def end_value(self) -> None:
        if self._types == STRING:
            self._parser.say("arguments", '"')
        else:
            self._parser.say("arguments", to_json("".join(self._held), self._types))
            self._held.clear()

    def end(self) -> None:
        """Not where the model was cut off: there may be more to come."""
        self._parser.say("arguments", "{}" if self._begin == "{" else "}")
        self._parser.say("end")


def comes(*marks: str) -> Judge:
    """Judges whether one of the marks comes next, blanks aside; None while it may."""

    def judge(text: str) -> bool | None:
        rest = text.lstrip()
        if rest.startswith(marks):
            return True
        return None if any(mark.startswith(rest) for mark in marks) else False

    return judge


def only_blanks(text: str) -> bool | None:
    """Judges that nothing comes at all: false with the first word."""
    return False if text.strip() else None


def find_tool_parser(name: str, template: str = "") -> type[ToolParser] | None:
    """None for "". "auto" looks which syntax the chat template writes. Raises ConfigError."""
    parsers = tool_parsers()
    if name == "auto":
        fitting = [one for one in parsers if all(sign in template for sign in one.signs)]
        return max(fitting, key=lambda one: one.rank, default=None)
    if not name:
        return None
    asked = name.lower().replace("-", "").replace("_", "")
    found = next((one for one in parsers if asked in one.names), None)
    if found is None:
        known = ", ".join(sorted(name for one in parsers for name in one.names))
        raise ConfigError(f"There is no tool-call parser {name!r}; there are: auto, {known}.")
    return found


def tool_parsers() -> list[type[ToolParser]]:
    """Every syntax that has a file in this folder."""
    modules = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    found = [value for module in modules for value in vars(module).values()]
    return list(dict.fromkeys(filter(_is_parser, found)))


def _is_parser(value: object) -> TypeGuard[type[ToolParser]]:
    return isinstance(value, type) and issubclass(value, ToolParser) and "names" in vars(value)
