"""Sequences without a slot: in which order they may enter, and which are better off waiting.

Knows nothing of pages being free; the scheduler asks for candidates and admits what fits.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence as Several
from typing import Literal

from detour.engine.page_ledger import PageLedger
from detour.engine.prefix_tree import common_length
from detour.engine.sequence import Sequence, SlotTable

Policy = Literal["fcfs", "lpm"]

SCAN = 128  # sequences looked at in one step; matching a long queue costs more than it brings
OVERTAKEN = 256  # admissions that may pass a waiting sequence before only its age counts
CLEARLY_LONGER = 32  # tokens worth one sequence's wait for another's prefill


class WaitingQueue:
    """Ordered by priority, then arrival; `lpm` puts the longest cached prefix first within a
    priority, unless the queue is too long to look at."""

    def __init__(self, ledger: PageLedger, table: SlotTable, policy: Policy) -> None:
        self._ledger = ledger
        self._table = table
        self._policy = policy
        self._items: list[Sequence] = []
        self._admissions = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, sequence: Sequence) -> None:
        sequence.overtaken_at = self._admissions
        insort(self._items, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        del self._items[bisect_left(self._items, sequence.rank, key=rank)]

    def admitted(self, sequence: Sequence) -> None:
        self._admissions += 1
        self.remove(sequence)

    def candidates(self) -> list[Sequence]:
        """Best first, at most SCAN."""
        if self._policy == "fcfs" or not 1 < len(self._items) <= SCAN:
            return self._items[:SCAN]
        return sorted(self._items, key=self._lpm_rank)

    def held_back(self, sequence: Sequence, prefilling: Several[Sequence]) -> bool:
        """Whether a sequence that is being prefilled now computes a prefix of this one that is
        clearly longer than what is cached. That ends with the other's prefill, so a wait ends too.
        """
        page_size, tree_pages = self._table.page_size, self._table.tree_pages
        for leader, pages in sequence.leaders:
            if leader.slot >= 0 and tree_pages[leader.slot] < pages:
                return True
        sequence.leaders = []
        most = self._ledger.most_cached(sequence)
        rivals = [other for other in prefilling if other.namespace == sequence.namespace]
        if not rivals or most <= 0:
            return False
        cached = self._ledger.tree.match_length(sequence.namespace, sequence.ids, most)
        for other in rivals:
            shared = min(common_length(other.ids, 0, sequence.ids) // page_size, most)
            gain = shared - cached
            sibling = other.request.group == sequence.request.group
            if gain > 0 and (sibling or gain * page_size >= CLEARLY_LONGER):
                sequence.leaders.append((other, shared))
        return bool(sequence.leaders)

    def _lpm_rank(self, sequence: Sequence) -> tuple[int, bool, int, int]:
        patient = self._admissions - sequence.overtaken_at < OVERTAKEN
        match = 0
        if patient:
            match = self._ledger.tree.match_length(
                sequence.namespace, sequence.ids, self._ledger.most_cached(sequence)
            )
        return -sequence.request.priority, patient, -match, sequence.arrival


def rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
