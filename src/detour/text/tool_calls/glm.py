"""GLM-4.5 to GLM-5: <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>.

Values are the bare text of a string and JSON of all else, so the tool's schema says which it is.
GLM-4.5 and 4.6 write line breaks between the marks, later ones do not; both are read.
"""

import re
from typing import ClassVar

from detour.text.scan import Marks, Reading
from detour.text.tool_calls import Call, comes, only_blanks
from detour.text.tool_calls.json_calls import JsonCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_NAME = re.compile(r"\s*([^\s<{]*)\s*")
_LONGEST_NAME = 300  # characters after <tool_call> within which a call shows that it is one
_AFTER_VALUE = comes(KEY, CLOSE, OPEN, VALUE_END)


class GlmParser(JsonCallParser):
    names: ClassVar[tuple[str, ...]] = ("glm47", "glm5")
    signs = (OPEN, KEY)
    rank = 2
    marks = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    _open = Marks(OPEN)
    _next = Marks(KEY, CLOSE, OPEN)
    _key = Marks(VALUE, CLOSE, KEY)
    _value = Marks(VALUE_END, CLOSE)

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        return f"{OPEN}{name}{KEY if name and needs_arguments else ''}"

    def read(self) -> Reading[None]:
        while (yield from self.through(self._open, self.content, True)):
            named = yield from self.decide(self._name)
            if named is None and self.tools.begin_with(self.text.strip()):
                self.text = ""  # it ends within the name of a call
                continue
            name, size = named or ("", -1)
            if size < 0:
                self.content(OPEN)
                continue
            self.take(size)
            if name:
                yield from self._call(Call(self, name))
                continue
            if self.text.startswith("{"):  # some fall back to JSON
                yield from self.envelope()
            if (yield from self.decide(comes(CLOSE))):
                yield from self.skip_blanks()
                self.take(len(CLOSE))

    def _name(self, text: str) -> tuple[str, int] | None:
        """The name and how long it is with the blanks around it; ("", -1) where prose follows."""
        found = _NAME.match(text)
        assert found is not None, "the pattern also matches nothing"
        follows = comes(KEY, CLOSE) if found[1] else comes(CLOSE, OPEN, "{")
        verdict = follows(text[found.end() :])
        if verdict:
            return found[1], found.end()
        return ("", -1) if verdict is False or len(text) > _LONGEST_NAME else None

    def _call(self, call: Call) -> Reading[None]:
        """The rest of a call, behind its name."""
        mark: str | None = yield from self.through(self._next, len)
        while mark == KEY:
            mark = yield from self._argument(call)
        if mark or (mark == "" and not self.cut):
            call.end()  # the model may have forgotten the mark, but it was done
        if mark == OPEN:
            self.text = OPEN + self.text

    def _argument(self, call: Call) -> Reading[str | None]:
        """An argument, behind <arg_key>, and the mark that comes next; None if the text ends
        within the argument."""
        name: list[str] = []
        mark = yield from self.through(self._key, name.append)
        if mark != VALUE:
            return mark or None
        call.key("".join(name).replace(KEY_END, "").strip())
        followed = {VALUE_END: _AFTER_VALUE, CLOSE: only_blanks}
        mark = yield from self.tagged_value(self._value, followed, call.add)
        if not mark:
            return None
        call.end_value()
        return CLOSE if mark == CLOSE else (yield from self.through(self._next, len))


class Glm45Parser(GlmParser):
    """The same with line breaks, as GLM-4.5 and 4.6 write it."""

    names = ("glm45", "glm4moe")
    rank = 0

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        return f"{OPEN}{name}\n{KEY if needs_arguments else ''}" if name else OPEN
