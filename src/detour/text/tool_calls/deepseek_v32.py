"""DeepSeek-V3.2 and later: <｜DSML｜invoke name="f"> around <｜DSML｜parameter name="k" string="true">.

A parameter says itself whether it is the bare text of a string or JSON.
"""

import re

from detour.text.scan import Marks, Reading
from detour.text.tool_calls import Call, ToolParser, comes
from detour.text.tool_schema import ANY, STRING

DSML = "｜DSML｜"
CALLS = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>")
CALLS_END = (f"</{DSML}function_calls>", f"</{DSML}tool_calls>")
INVOKE, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"

_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')
_JSON = ANY - STRING
_AFTER_VALUE = comes(PARAMETER, INVOKE_END, PARAMETER_END)


class DeepseekV32Parser(ToolParser):
    names = ("deepseekv32", "deepseekv4")
    signs = (DSML,)
    rank = 3
    marks = (DSML,)

    _open = Marks(*CALLS, *CALLS_END, INVOKE)
    _tag_end = Marks(">")
    _inside = Marks(PARAMETER, INVOKE_END, INVOKE, *CALLS_END)
    _value = Marks(PARAMETER_END)

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        begin = f'{CALLS[0]}\n{INVOKE} name="'
        return f'{begin}{name}">\n' if name else begin

    def read(self) -> Reading[None]:
        while mark := (yield from self.through(self._open, self.content, True)):
            if mark == INVOKE:
                name = (yield from self._attributes()).get("name", "")
                if name:
                    yield from self._call(Call(self, name))

    def _attributes(self) -> Reading[dict[str, str]]:
        """Of the tag whose name is behind us; none if the text ends within it."""
        inside: list[str] = []
        mark = yield from self.through(self._tag_end, inside.append)
        return dict(_ATTRIBUTE.findall("".join(inside))) if mark else {}

    def _call(self, call: Call) -> Reading[None]:
        while (mark := (yield from self.through(self._inside, len))) == PARAMETER:
            attributes = yield from self._attributes()
            if not attributes:
                return
            types = {"true": STRING, "false": _JSON}.get(attributes.get("string", ""), ANY)
            call.key(attributes.get("name", ""), types)
            followed = {PARAMETER_END: _AFTER_VALUE}
            if not (yield from self.tagged_value(self._value, followed, call.add)):
                return
            call.end_value()
        if mark or not self.cut:
            call.end()
        if mark == INVOKE:
            self.text = mark + self.text
