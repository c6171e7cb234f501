"""Which pages each running sequence uses: pool, prefix tree and page table kept in agreement.

A sequence's first `tree_pages` pages belong to the tree, where one pin of its own keeps them; the
rest are held by it alone. Knows nothing of who runs next.
"""

import logging

import numpy as np

from detour.engine.page_pool import CACHED, HELD, PagePool
from detour.engine.plan import Int32s
from detour.engine.prefix_tree import NO_PAGES, Match, Node, PrefixTree
from detour.engine.request import Request
from detour.engine.sequence import Int64s, Sequence, SlotTable

log = logging.getLogger(__name__)


class PageLedger:
    def __init__(self, table: SlotTable, num_pages: int, share: bool) -> None:
        """`share` false: only sequences of one group share pages, while one of them is open."""
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, table.page_size)
        self.healed = 0
        self._table = table
        self._page_size = table.page_size
        self._share = share
        self._nodes: dict[int, Node] = {}  # slot -> the node it pins
        self._groups: dict[int, int] = {}  # group -> open sequences, where not shared beyond it
        self._changes: list[tuple[Int32s, Int32s, Int32s]] = []  # of the page table: not yet told

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a running sequence."""
        return self.pool.free + self.tree.evictable

    def open(self, request: Request) -> str:
        """A sequence was submitted; the namespace it shares prefixes in."""
        if self._share:
            return request.cache_salt
        self._groups[request.group] = self._groups.get(request.group, 0) + 1
        return _group_namespace(request.group)

    def close(self, request: Request) -> None:
        """A sequence ended, and has no pages any more."""
        if not self._share:
            self._groups[request.group] -= 1
            if not self._groups[request.group]:
                del self._groups[request.group]
                self.tree.drop(_group_namespace(request.group))

    def most_cached(self, sequence: Sequence) -> int:
        """How many pages a sequence may take from the tree: one token must be left to compute."""
        if sequence.wants_prompt_logprobs:
            return 0
        return (len(sequence.ids) // 4 - 1) // self._page_size

    def enter(self, slot: int, match: Match, known: int) -> None:
        """Give the sequence that enters `slot` pages for `known` tokens. `match.node` is pinned
        for it. Raises ValueError where the pages are not available."""
        cached = len(match.pages)
        own = self._take(self._table.pages_for(known) - cached)
        pages = np.concatenate((match.pages, own))
        self._nodes[slot] = match.node
        self._table.page_table[slot, : len(pages)] = pages
        self._table.capacity[slot] = len(pages) * self._page_size
        self._table.tree_pages[slot] = cached
        self._change(slot, 0, pages)

    def grow(self, slots: Int64s) -> None:
        """One more page for each of these slots. Raises ValueError where they are not available."""
        table = self._table
        pages = self._take(len(slots))
        columns = table.capacity[slots] // self._page_size
        table.page_table[slots, columns.astype(np.intp)] = pages
        table.capacity[slots] += self._page_size
        self._changes.append((slots.astype(np.int32), columns, pages))

    def insert(self, slot: int) -> None:
        """Let others share the full pages that this slot has computed."""
        table = self._table
        have = int(table.tree_pages[slot])
        full = int(table.computed[slot]) // self._page_size
        if full <= have:
            return
        tokens = table.tokens[slot, have * self._page_size : full * self._page_size].tobytes()
        pages = table.page_table[slot, have:full]
        node, present = self.tree.insert(self._nodes[slot], tokens, pages)
        if len(present):
            # Another sequence computed the same: use its pages, give back the copies. Steps that
            # are out read the copies; whoever gets them next writes in a later step.
            copies = pages[: len(present)].copy()
            pages[: len(present)] = present
            self.pool.release(copies)
            self._change(slot, have, present)
        self._nodes[slot] = node
        table.tree_pages[slot] = full

    def leave(self, slot: int, *, keep: bool, poisoned: bool = False) -> None:
        """Take all pages from a slot. `keep`: full computed ones stay cached. `poisoned`: what it
        computed is wrong, so nothing that only it used stays cached."""
        if keep:
            self.insert(slot)
        table = self._table
        first, last = int(table.tree_pages[slot]), int(table.capacity[slot]) // self._page_size
        self.pool.release(table.page_table[slot, first:last])
        node = self._nodes.pop(slot)
        self.tree.unpin(node)
        if poisoned:
            self.tree.forget(node)

    def take_changes(self) -> tuple[Int32s, Int32s, Int32s]:
        """Page table changes since the last call: slots, columns, pages; later ones count (so
        those of a slot that has a new sequence by now do no harm)."""
        changes, self._changes = self._changes, []
        if len(changes) == 1:
            return changes[0]
        if not changes:
            return NO_PAGES, NO_PAGES, NO_PAGES
        slots, columns, pages = zip(*changes, strict=True)
        return np.concatenate(slots), np.concatenate(columns), np.concatenate(pages)

    def violations(self) -> list[str]:
        """What contradicts "every page is free, held or cached, exactly one", a sentence each."""
        found = self.pool.violations() + self.tree.violations() + self._table.violations()
        held, cached = self._held(), self._cached()
        for name, pages, count, state in (
            ("held", held, self.pool.held, HELD),
            ("cached", cached, self.pool.cached, CACHED),
        ):
            if len(np.unique(pages)) != len(pages):
                found.append(f"a page is {name} twice")
            if len(pages) != count or not self.pool.are(state, pages):
                found.append(f"{len(pages)} pages are {name}, the pool knows of {count}")
        for slot, node in self._nodes.items():
            row = self._table.page_table[slot, : self._table.tree_pages[slot]]
            if not np.array_equal(row, self.tree.path_pages(node)):
                found.append(f"slot {slot}'s first pages are not those of the node it pins")
        return found

    def heal(self) -> list[str]:
        """Check, and repair what is wrong: page tables and tree are believed, the pool is not."""
        found = self.violations()
        if found:
            log.error("the page pool is healed: %s", "; ".join(found[:8]))
            self.healed += 1
            self.tree.recount()
            cached = np.unique(self._cached())
            held = np.setdiff1d(np.unique(self._held()), cached)
            self.pool.rebuild(held, cached)
        return found

    def _take(self, count: int) -> Int32s:
        if count > self.pool.free:
            self.tree.evict(count - self.pool.free)
        return self.pool.allocate(count)

    def _change(self, slot: int, column: int, pages: Int32s) -> None:
        slots = np.empty(len(pages), np.int32)
        slots.fill(slot)
        columns = np.arange(column, column + len(pages), dtype=np.int32)
        self._changes.append((slots, columns, pages))

    def _held(self) -> Int32s:
        table = self._table
        lasts = table.capacity // self._page_size
        rows = [table.page_table[s, table.tree_pages[s] : lasts[s]] for s in self._nodes]
        return np.concatenate([NO_PAGES, *rows])

    def _cached(self) -> Int32s:
        return np.concatenate([NO_PAGES, *(node.pages for node in self.tree.nodes())])


def _group_namespace(group: int) -> str:
    return f"group {group}"
