"""Who owns each page of the KV cache: every page is in exactly one state.

Knows page numbers only: not what a page holds, nor which sequence holds it.
"""

import logging

import numpy as np

from detour.engine.plan import Int32s

log = logging.getLogger(__name__)

FREE, HELD, CACHED, RESERVED = 0, 1, 2, 3


class PagePool:
    """Pages 1 .. num_pages - 1; page 0 belongs to no sequence (padded rows write there).

    free -> held (`allocate`: one sequence may write it) -> cached (`share`: it is in the prefix
    tree, many may read it) -> free (`release`). A page that is released twice is reported, counted
    in `faults` and otherwise ignored.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is reserved), got {num_pages}")
        self.num_pages = num_pages
        self.free = num_pages - 1
        self.held = 0
        self.cached = 0
        self.faults = 0
        self._states = np.zeros(num_pages, np.uint8)
        self._states[0] = RESERVED
        # A stack: the page released last, whose memory is warm, is handed out first.
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)

    @property
    def usable(self) -> int:
        """Pages that sequences can ever have."""
        return self.num_pages - 1

    def allocate(self, count: int) -> Int32s:
        """Take `count` free pages (now held). Raises ValueError where fewer are free."""
        if count > self.free:
            raise ValueError(f"{count} pages asked, {self.free} free")
        self.free -= count
        self.held += count
        pages = self._stack[self.free : self.free + count].copy()
        self._states[pages.astype(np.intp)] = HELD
        return pages

    def share(self, pages: Int32s) -> None:
        """Held pages become cached ones."""
        moved = len(self._move(pages, HELD, CACHED))
        self.held -= moved
        self.cached += moved

    def release(self, pages: Int32s) -> None:
        """Held pages become free."""
        pages = self._move(pages, HELD, FREE)
        self.held -= len(pages)
        self._push(pages)

    def release_cached(self, pages: Int32s) -> None:
        """Cached pages become free."""
        pages = self._move(pages, CACHED, FREE)
        self.cached -= len(pages)
        self._push(pages)

    def are(self, state: int, pages: Int32s) -> bool:
        """Whether all of these pages are FREE, HELD, CACHED or RESERVED."""
        return bool((self._states[pages] == state).all())

    def violations(self) -> list[str]:
        """What contradicts the page equation free + held + cached = all, a sentence each."""
        found = []
        counts = np.bincount(self._states, minlength=4)
        for name, said, state in (
            ("free", self.free, FREE),
            ("held", self.held, HELD),
            ("cached", self.cached, CACHED),
        ):
            if counts[state] != said:
                found.append(f"{said} pages are counted as {name}, {counts[state]} are marked so")
        if self.free + self.held + self.cached != self.usable:
            found.append(
                f"free {self.free} + held {self.held} + cached {self.cached} pages != {self.usable}"
            )
        stack = self._stack[: self.free]
        if len(np.unique(stack)) != len(stack) or (self._states[stack] != FREE).any():
            found.append("the free list names a page twice or a page that is in use")
        return found

    def rebuild(self, held: Int32s, cached: Int32s) -> None:
        """Believe these lists (disjoint) and take all other pages for free."""
        self._states[1:] = FREE
        self._states[held] = HELD
        self._states[cached] = CACHED
        free = np.flatnonzero(self._states == FREE).astype(np.int32)
        self._stack[: len(free)] = free
        self.free, self.held, self.cached = len(free), len(held), len(cached)

    def _push(self, pages: Int32s) -> None:
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)

    def _move(self, pages: Int32s, state: int, to: int) -> Int32s:
        """From one state to another; those that were in the first one."""
        at = pages.astype(np.intp)  # numpy indexes several times faster by these
        states = self._states[at]
        if states.tobytes().count(state) != len(pages):
            wrong = pages[states != state]
            self.faults += 1
            log.error(
                "pages %s are in state %s, expected %d: left as they are",
                wrong[:8].tolist(),
                states[states != state][:8].tolist(),
                state,
            )
            pages = pages[states == state]
            at = pages.astype(np.intp)
        self._states[at] = to
        return pages
