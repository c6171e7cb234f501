"""Llama 3.1 to 3.3: a bare {"name": ..., "parameters": {...}}, one after another.

Nothing marks a call but that it stands where a line begins and names a tool of the request.
"""

from detour.text.scan import Marks, Reading
from detour.text.tool_calls.json_calls import JsonCallParser

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(JsonCallParser):
    names = ("llama3", "llama3json", "llama4json")
    signs = ("<|start_header_id|>", '"parameters": ')
    marks = (PYTHON_TAG,)

    _open = Marks("{", PYTHON_TAG)

    @classmethod
    def opening(cls, name: str, needs_arguments: bool) -> str:
        return f'{{"name": "{name}", "parameters": ' if name else '{"name": "'

    def read(self) -> Reading[None]:
        self._line = ""  # the content since the last line break
        while mark := (yield from self.through(self._open, self.content)):
            if mark == PYTHON_TAG:
                self._line = ""
            elif self._line.strip():
                self.content(mark)
            else:
                self.text = mark + self.text
                if (yield from self.envelope(only_known=True)):
                    yield from self._separator()

    def content(self, text: str) -> None:
        before, line_break, line = text.rpartition("\n")
        self._line = line if line_break else self._line + text
        super().content(text)

    def _separator(self) -> Reading[None]:
        """Calls of one line stand between ";"."""
        self._line = ""
        if (yield from self.skip_blanks()) == ";":
            self.take(1)
            yield from self.skip_blanks()
