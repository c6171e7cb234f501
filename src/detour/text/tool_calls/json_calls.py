"""Calls that are written as JSON: the part that those syntaxes share."""

import json

from detour.text.scan import Reading
from detour.text.tool_calls import ToolParser

ARGUMENTS = ("arguments", "parameters")
KNOWN_KEYS = (*ARGUMENTS, "name", "type", "id", "function")


class JsonCallParser(ToolParser):
    """Reads a call's JSON as it comes; its arguments are passed on as they are."""

    def envelope(self, only_known: bool = False) -> Reading[bool]:
        """{"name": ..., "arguments": {...}}, in any order. The text ahead begins with it.

        only_known: an object of other keys, or that names no tool of the request, is content; else
        only one that names no function. Returns whether it was a call.
        """
        raw, name, early, said = [self.take(1)], "", "", False
        while (mark := (yield from self.skip_blanks(raw.append))) and mark in '",':
            if mark == ",":
                raw.append(self.take(1))
                continue
            key = yield from self._read_key(raw)
            if only_known and not said and key not in KNOWN_KEYS:
                break
            if key in ARGUMENTS and name and not said:
                self.say("call", name)
                said = True
                if not (yield from self.arguments()):
                    return True
                continue
            value: list[str] = []
            yield from self.skip_blanks(raw.append)
            yield from self.json_value(value.append)
            raw += value
            if key in ARGUMENTS:
                early = "".join(value)
            elif key == "name":
                name = _string("".join(value))
                if only_known and name not in self.tools:
                    break
        return self._end_call(raw, name, early, said, only_known)

    def _end_call(
        self, raw: list[str], name: str, early: str, said: bool, only_known: bool
    ) -> bool:
        """Behind the last key and value: the brace, or where it should be."""
        closed = self.text.startswith("}")
        if name and closed and not said:
            self.say("call", name)
            self.say("arguments", _object(early))
            said = True
        if said:
            self.take(int(closed))
            if closed or not self.cut:  # a brace too few after whole arguments
                self.say("end")
        elif self.text or not self.ended or (only_known and not name):
            self.content("".join(raw))
        return said

    def _read_key(self, raw: list[str]) -> Reading[str]:
        """A key and its colon; "" where there is none."""
        text: list[str] = []
        yield from self.json_value(text.append)
        raw.extend(text)
        if (yield from self.skip_blanks(raw.append)) == ":":
            raw.append(self.take(1))
        return _string("".join(text))

    def arguments(self) -> Reading[bool]:
        """A call's arguments: an object is said as it comes. False if the text ends within it."""
        first = yield from self.skip_blanks()
        if first == "{":
            return (yield from self.json_value(lambda text: self.say("arguments", text)))
        value: list[str] = []
        whole = yield from self.json_value(value.append)
        if whole:
            self.say("arguments", _object("".join(value)))
        return whole


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _object(text: str) -> str:
    """Arguments that are no plain object: none at all, or an object within a string."""
    inner = _string(text)
    return inner if inner.lstrip().startswith("{") else text if text.startswith("{") else "{}"
