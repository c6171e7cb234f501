"""When open sequences must have ended. Knows times and sids only."""

import heapq
import math
from collections.abc import Collection


class Deadlines:
    """`open` in every call: the sids that count; those of other sids are forgotten on the way."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, sid: int, open: Collection[int]) -> None:
        heapq.heappush(self._heap, (deadline, sid))
        if len(self._heap) > 2 * len(open) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in open]
            heapq.heapify(self._heap)

    def next(self, open: Collection[int]) -> float:
        """Infinity where there is none."""
        while self._heap and self._heap[0][1] not in open:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> int:
        """The sid whose deadline comes first."""
        return heapq.heappop(self._heap)[1]
