"""Splits what a model thinks from what it answers, while both are on their way.

The syntaxes differ in their two marks alone; who begins to think shows in the prompt.
"""

from dataclasses import dataclass

from detour.errors import ConfigError
from detour.text.scan import Marks, Reading, Scan


@dataclass(frozen=True)
class Thinking:
    """How a model marks its thoughts.

    always: it thinks without saying so, unless the prompt has closed the thought.
    """

    open: str = "<think>"
    close: str = "</think>"
    always: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within a thought."""
        end = prompt.rstrip()
        return end.endswith(self.open) or (self.always and not end.endswith(self.close))


_THINK = Thinking()
# By name, less its "-" and "_", which every server spells differently.
_BY_NAME = {
    "glm45": _THINK,
    "glm47": _THINK,
    "deepseekr1": Thinking(always=True),
    "deepseekv3": _THINK,
    "deepseekv31": _THINK,
    "deepseekv32": _THINK,
    "qwen3": _THINK,
    "qwen3thinking": Thinking(always=True),
    "kimi": Thinking("◁think▷", "◁/think▷"),
    "kimik2": _THINK,
}


def find_thinking(name: str, template: str = "") -> Thinking | None:
    """None for "". "auto" looks which marks the chat template writes. Raises ConfigError."""
    if name == "auto":
        kinds = (_THINK, _BY_NAME["kimi"])
        return next((kind for kind in kinds if kind.close in template), None)
    if not name:
        return None
    found = _BY_NAME.get(name.lower().replace("-", "").replace("_", ""))
    if found is None:
        raise ConfigError(
            f"There is no reasoning parser {name!r}; there are: auto, {', '.join(_BY_NAME)}."
        )
    return found


class ReasoningParser(Scan):
    """A Parser of "reasoning" and "content".

    inside: the answer begins within a thought; else it does where its first word is the mark.
    """

    def __init__(self, thinking: Thinking, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self._marks = (thinking.open, thinking.close)
        self._close = Marks(thinking.close)

    def read(self) -> Reading[None]:
        mark = yield from self.decide(self._first_mark)
        if mark:
            yield from self.skip_blanks()
            self.take(len(mark))
            self.inside = mark == self._marks[0]
        if self.inside:
            yield from self.through(self._close, lambda text: self.say("reasoning", text), True)
        if mark or self.inside:
            self.inside = False
            yield from self.skip_blanks()
        yield from self.rest()

    def _first_mark(self, text: str) -> str | None:
        """The mark that the text begins with, blanks aside; "" for none, None while it may come.

        A template may have opened the thought that the model opens again, or closed it.
        """
        start = text.lstrip()
        for mark in self._marks:
            if start.startswith(mark):
                return mark
        return None if any(mark.startswith(start) for mark in self._marks) else ""


class StrayClose(Scan):
    """Content without the first closing mark: a call ended the thought before the model did."""

    inside = False

    def __init__(self, thinking: Thinking) -> None:
        super().__init__()
        self._close = Marks(thinking.close)

    def read(self) -> Reading[None]:
        yield from self.through(self._close, self.content, True)
        yield from self.rest()
