"""DeepSeek-V3, R1 and V3.1: <｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁call▁end｜> around JSON.

V3 and R1 write `function`, the separator, the name and fenced JSON; V3.1 the name, the separator
and bare JSON. Both are read.
"""

from typing import ClassVar

from detour.text.scan import Marks, Reading
from detour.text.tool_calls.json_calls import JsonCallParser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepseekV31Parser(JsonCallParser):
    names: ClassVar[tuple[str, ...]] = ("deepseekv31",)
    signs: ClassVar[tuple[str, ...]] = (CALL,)
    rank = 1
    marks = (BEGIN, END, CALL, CALL_END, SEPARATOR)

    _open = Marks(BEGIN, END, CALL, CALL_END)
    _separator = Marks(SEPARATOR)
    _name_end = Marks("\n", "{", CALL_END)
    _json = Marks("{", CALL_END)
    _close = Marks(CALL_END, CALL, END)

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        return f"{BEGIN}{CALL}{name}{SEPARATOR if name else ''}"

    def read(self) -> Reading[None]:
        while mark := (yield from self.through(self._open, self.content, True)):
            if mark == CALL:
                yield from self._call()

    def _call(self) -> Reading[None]:
        before: list[str] = []
        if not (yield from self.through(self._separator, before.append)):
            return
        name, mark = "".join(before).strip(), "{"
        if (yield from self.skip_blanks()) != "{":
            behind: list[str] = []
            mark = yield from self.through(self._name_end, behind.append)
            name = "".join(behind).strip() or name
            if mark == "\n":
                mark = yield from self.through(self._json, len)
            self.text = mark + self.text
        if not mark:
            return
        self.say("call", name)
        if mark != "{":
            self.say("arguments", "{}")
        elif not (yield from self.arguments()):
            return
        self.say("end")
        if (yield from self.through(self._close, len)) == CALL:
            self.text = CALL + self.text


class DeepseekV3Parser(DeepseekV31Parser):
    names = ("deepseekv3", "deepseekr1")
    signs = (CALL, "```json")
    rank = 2

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        begin = f"{BEGIN}{CALL}function{SEPARATOR}"
        return f"{begin}{name}\n```json\n" if name else begin
