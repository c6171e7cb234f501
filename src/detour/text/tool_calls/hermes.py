"""Hermes and Qwen 2.5 to 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from detour.text.scan import Marks, Reading
from detour.text.tool_calls import comes
from detour.text.tool_calls.json_calls import JsonCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    names = ("hermes", "qwen25", "qwen", "qwen3")
    signs = (OPEN, '"arguments"')
    marks = (OPEN, CLOSE)

    _open = Marks(OPEN)

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        begin = f'{OPEN}\n{{"name": "'
        return f'{begin}{name}", "arguments": ' if name else begin

    def read(self) -> Reading[None]:
        while (yield from self.through(self._open, self.content, True)):
            if not (yield from self.decide(comes("{"))):
                self.content(OPEN)
                continue
            while (yield from self.decide(comes("{", "}"))):
                if (yield from self.skip_blanks()) == "}":  # one too many
                    self.take(1)
                else:
                    yield from self.envelope()
            if (yield from self.decide(comes(CLOSE))):
                yield from self.skip_blanks()
                self.take(len(CLOSE))
