"""Open requests: parameters, prompt and tokens so far; what a new worker needs to continue them.

Knows nothing of channels, listeners or text. Bounded by the bytes it holds, so that a flood of long
prompts is refused at the door and not found out by the kernel.
"""

from array import array
from collections.abc import Iterable

import msgspec

from detour.engine.request import Request
from detour.errors import Unavailable

_ENTRY_BYTES = 1024  # what an entry costs beside its token ids, generously


class Entry:
    """One open sequence."""

    __slots__ = ("request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = array("i", request.output_ids)  # int32, everything emitted so far

    @property
    def weight(self) -> int:
        """Bytes reserved for it: prompt and the most it can still generate."""
        return _ENTRY_BYTES + len(self.request.prompt_ids) + 4 * self.request.params.max_tokens


class Journal:
    """Entries by sid. `add` and `drop` keep the sum of weights within `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_held(self) -> int:
        return self._bytes

    @property
    def sids(self) -> list[int]:
        return list(self._entries)

    def add(self, requests: Iterable[Request]) -> None:
        """Open all of them. Raises Unavailable when they do not fit; then none was opened."""
        entries = [Entry(request) for request in requests]
        weight = sum(entry.weight for entry in entries)
        if self._bytes + weight > self._max_bytes:
            raise Unavailable(
                f"The open requests hold {self._bytes >> 20} MiB of the "
                f"{self._max_bytes >> 20} MiB the server keeps for them; try again later.",
                code="queue_full",
            )
        self._bytes += weight
        for entry in entries:
            self._entries[entry.request.sid] = entry

    def drop(self, sid: int) -> None:
        """Close a sequence that ended or was aborted. Unknown sids are ignored."""
        entry = self._entries.pop(sid, None)
        if entry is not None:
            self._bytes -= entry.weight

    def tokens(self, sid: int) -> "array[int]":
        """Tokens so far, to append to. Raises KeyError for a sid that is not open."""
        return self._entries[sid].tokens

    def continuations(self) -> list[Request]:
        """Every open sequence as a request that goes on after its last token, oldest first."""
        return [
            msgspec.structs.replace(entry.request, output_ids=entry.tokens.tobytes())
            for _, entry in sorted(self._entries.items())
        ]
