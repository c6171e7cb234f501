"""Push a token, get the text that is safe to show; stop strings. One object a stream.

Safe to show means: whole characters only, and nothing that a later token could still turn into a
stop string. However the tokens arrive, the pieces add up to the same text.
"""

import codecs
from collections.abc import Iterable, Sequence

from detour.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one stream of tokens into text, a token at a time.

    stop: strings that end the text. The one that is complete first wins; of two that end at the
        same character, the longer one.
    include_stop: leave the stop string in the text.
    at_start: the tokens begin a text rather than continue a prompt (see Tokenizer.decode).
    """

    __slots__ = (
        "_first",
        "_held",
        "_include_stop",
        "_pending",
        "_pieces",
        "_stop",
        "_strip",
        "_texts",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        at_start: bool = False,
    ) -> None:
        self._texts = tokenizer.texts(skip_special_tokens)
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._stop = tuple(text for text in stop if text)
        self._first = frozenset(text[0] for text in self._stop)
        self._include_stop = include_stop
        self._strip = at_start and tokenizer.strips_first_space
        self._pending = b""  # the start of a character that is not whole yet
        self._held = ""  # text that may become a stop string
        self.stopped = ""  # the stop string that matched

    def push(self, token: int) -> str:
        """The text that became safe to show with this token; "" after a stop string."""
        try:
            text = self._texts[token]
        except IndexError:  # a padding row of the model's vocabulary
            text = ""
        if text is None or self._pending or self._strip:
            text = self._slow(token)
        if self._held or self.stopped or not self._first.isdisjoint(text):
            return self._scan(text)
        return text

    def push_all(self, tokens: Iterable[int]) -> str:
        """What pushing them one after another gives."""
        return "".join([self.push(token) for token in tokens])

    def finish(self) -> str:
        """The text held back so far; the stream has ended. A part of a character is not shown."""
        self._pending = b""
        rest, self._held = self._held, ""
        return rest

    def _slow(self, token: int) -> str:
        """A token that begins, continues or follows a part of a character, or begins the text."""
        data = self._pending
        if token < len(self._pieces):
            data += self._pieces[token]
        # Also replaces bytes at once that no later byte can make a character of.
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _scan(self, text: str) -> str:
        """Lets through what cannot belong to a stop string, and looks for whole ones."""
        if self.stopped:
            return ""
        text = self._held + text
        best_end, best_start, found = len(text) + 1, 0, ""
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (start + len(stop), start) < (best_end, best_start):
                best_end, best_start, found = start + len(stop), start, stop
        if found:
            self.stopped, self._held = found, ""
            return text[: best_end if self._include_stop else best_start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    def _hold_from(self, text: str) -> int:
        """Where the longest ending of the text begins that is the beginning of a stop string."""
        cut = size = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, size - len(stop) + 1), cut)
            while start >= 0:
                if stop.startswith(text[start:]):
                    cut = start
                    break
                start = text.find(stop[0], start + 1, cut)
        return cut
