"""Qwen3-Coder: <tool_call><function=f><parameter=k>v</parameter></function></tool_call>.

A value stands between two line breaks that are not part of it; the tool's schema says its type.
"""

from detour.text.scan import Marks, Reading
from detour.text.tool_calls import Call, ToolParser, comes

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_AFTER_VALUE = comes(PARAMETER, FUNCTION_END, CLOSE, PARAMETER_END)


class Qwen3CoderParser(ToolParser):
    names = ("qwen3coder", "qwen3xml")
    signs = (OPEN, FUNCTION)
    rank = 1
    marks = (OPEN, CLOSE)

    _open = Marks(OPEN, FUNCTION, CLOSE)
    _tag_end = Marks(">")
    _inside = Marks(PARAMETER, FUNCTION_END, CLOSE, FUNCTION)
    _value = Marks(f"\n{PARAMETER_END}", PARAMETER_END)

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        begin = f"{OPEN}\n{FUNCTION}"
        return f"{begin}{name}>\n{PARAMETER if needs_arguments else ''}" if name else begin

    def read(self) -> Reading[None]:
        called = False
        while mark := (yield from self.through(self._open, self.content, True)):
            if mark == FUNCTION:  # some leave <tool_call> out
                name = yield from self._tag()
                if name:
                    yield from self._call(Call(self, name))
                    called = True
            elif mark == CLOSE and called:
                called = False
            elif mark == CLOSE or (yield from self.decide(comes(FUNCTION))) is False:
                self.content(mark)

    def _tag(self) -> Reading[str]:
        """The rest of a tag: its name, "" if the text ends within it."""
        inside: list[str] = []
        mark = yield from self.through(self._tag_end, inside.append)
        return "".join(inside).strip() if mark else ""

    def _call(self, call: Call) -> Reading[None]:
        while (mark := (yield from self.through(self._inside, len))) == PARAMETER:
            key = yield from self._tag()
            if not key:
                return
            call.key(key)
            if (yield from self.decide(lambda text: text[:1] == "\n" if text else None)):
                self.take(1)
            followed = dict.fromkeys((f"\n{PARAMETER_END}", PARAMETER_END), _AFTER_VALUE)
            if not (yield from self.tagged_value(self._value, followed, call.add)):
                return
            call.end_value()
        if mark or not self.cut:
            call.end()
        if mark in (FUNCTION, CLOSE):
            self.text = mark + self.text
