"""Cached prefixes: a radix tree over whole pages of tokens. Match, pin, insert, evict.

Knows tokens (as the bytes of int32 arrays) and page numbers; not which sequence uses them.

Two rules keep every operation local:
- A node's `pins` counts its own pins and its children that are pinned, so that pinning walks up
  only as far as nothing was pinned before. Pages of nodes with pins are never evicted.
- Nodes without pins stand in one list by last use. A node joins it after its children (they must
  lose their pins first), so the oldest node is always a leaf and eviction never searches.
"""

from dataclasses import dataclass

import numpy as np

from detour.engine.page_pool import PagePool
from detour.engine.plan import Int32s

NO_PAGES: Int32s = np.empty(0, np.int32)
_ITEM = 4  # bytes of a token


class Node:
    """A run of whole pages below its parent's. `end` counts the pages from the root to its end."""

    __slots__ = ("children", "end", "key", "newer", "older", "pages", "parent", "pins")

    def __init__(self, parent: "Node | None", key: bytes, pages: Int32s, end: int) -> None:
        self.parent = parent
        self.key = key  # its tokens; children are found by the bytes of their first page
        self.pages = pages
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        # Neighbours in the list of unpinned nodes; somewhere harmless while not in it. (Not itself:
        # a node that is taken out must not wait for the garbage collector.)
        self.older = self.newer = self if parent is None else parent


class Root(Node):
    """Holds no page. Is there as long as it has pins or children."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, b"", NO_PAGES, 0)
        self.namespace = namespace


@dataclass(frozen=True)
class Match:
    node: Node  # ends exactly where the match ends
    pages: Int32s


class PrefixTree:
    """One root a namespace: prefixes are shared only within one."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.evictable = 0  # pages in nodes without pins
        self.evicted = 0  # pages, since the start
        self._pool = pool
        self._page_bytes = page_size * _ITEM
        self._roots: dict[str, Root] = {}
        # `newer` of this node is the least recently used one, `older` the most recently used.
        self._ends = Node(None, b"", NO_PAGES, 0)

    def root(self, namespace: str) -> Root:
        """Pin it, or it may go with the next namespace that loses its last page."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
            root.older = root.newer = self._ends
        return root

    def match_length(self, namespace: str, tokens: bytes, most: int) -> int:
        """Pages of the longest cached prefix of `tokens`, at most `most`. Changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        node, pages, inner = self._walk(root, tokens, most, [])
        return node.end + inner

    def match(self, namespace: str, tokens: bytes, most: int) -> Match:
        """The longest cached prefix of `tokens` in whole pages, at most `most`.

        A node that it ends inside of is split there. Pin the match before anything else happens.
        """
        pieces: list[Int32s] = []
        node, child, inner = self._walk(self.root(namespace), tokens, most, pieces)
        if inner:
            node = self._split(child, inner)
            pieces.append(node.pages)
        return Match(node, _joined(pieces))

    def pin(self, node: Node) -> None:
        """Keep the pages from the root to the end of this node."""
        at: Node | None = node
        while at is not None:
            at.pins += 1
            if at.pins > 1 or at.parent is None:
                return
            self.evictable -= len(at.pages)
            self._unlink(at)
            at = at.parent

    def unpin(self, node: Node) -> None:
        """Take one pin back; the path now counts as just used."""
        at: Node = node
        while True:
            at.pins -= 1
            if at.pins:
                return
            if at.parent is None:
                self._forget_root(at)
                return
            self.evictable += len(at.pages)
            _link_after(at, self._ends.older)
            at = at.parent

    def insert(self, node: Node, tokens: bytes, pages: Int32s) -> tuple[Node, Int32s]:
        """Put held `pages`, which hold `tokens` (as many whole pages), below a pinned `node`.

        Moves the caller's pin to the node returned, which ends where `tokens` end. Where the tree
        has a beginning of `tokens` already, its pages are returned: the caller uses them from now
        on, and its own copies, pages[: len(returned)], stay the caller's to release.
        """
        pieces: list[Int32s] = []
        last, child, inner = self._walk(node, tokens, len(pages), pieces)
        if inner:
            last = self._split(child, inner)
            pieces.append(last.pages)
        present = _joined(pieces)
        have = len(present)
        if have < len(pages):
            key, own = tokens[have * self._page_bytes :], pages[have:]
            self._pool.share(own)
            if last is node and node.pins == 1 and not node.children and node.parent is not None:
                # Only the caller uses this leaf: it grows, so that a prompt computed in many chunks
                # is one node.
                node.key += key
                node.pages = np.concatenate((node.pages, own))
                node.end += len(own)
                return node, present
            last = self._add(last, key, own.copy())
        if last is not node:
            self.pin(last)
            self.unpin(node)
        return last, present

    def evict(self, count: int) -> int:
        """Release up to `count` pages, least recently used first. Returns how many."""
        pieces: list[Int32s] = []
        done = 0
        while done < count:
            node = self._ends.newer
            if node is self._ends:
                break
            keep = len(node.pages) - (count - done)
            if keep > 0:
                pieces.append(node.pages[keep:])
                self._trim(node, keep)
                done = count
            else:
                pieces.append(node.pages)
                done += len(node.pages)
                self._remove(node)
        if pieces:
            self._pool.release_cached(_joined(pieces))
            self.evicted += done
        return done

    def forget(self, node: Node) -> None:
        """Release this node and those above it, as far as nobody else uses them."""
        while node.parent is not None and not node.pins and not node.children:
            parent = node.parent
            self._pool.release_cached(node.pages)
            self._remove(node)
            node = parent

    def drop(self, namespace: str) -> None:
        """Release all pages of a namespace, except pinned ones."""
        root = self._roots.get(namespace)
        if root is not None:
            for node in reversed(_below(root)):  # children before parents
                if not node.pins:
                    self._pool.release_cached(node.pages)
                    self._remove(node)

    def nodes(self) -> list[Node]:
        """All nodes except roots, parents before children."""
        return [node for root in self._roots.values() for node in _below(root)]

    def path_pages(self, node: Node) -> Int32s:
        """The pages from the root to the end of `node`."""
        pieces = []
        at: Node | None = node
        while at is not None:
            pieces.append(at.pages)
            at = at.parent
        return np.concatenate(pieces[::-1])

    def recount(self) -> None:
        """Count the evictable pages anew."""
        self.evictable = sum(len(node.pages) for node in self.nodes() if not node.pins)

    def violations(self) -> list[str]:
        """What contradicts this module's rules, a sentence each."""
        nodes = self.nodes()
        ages: dict[int, int] = {}
        at = self._ends.newer
        while at is not self._ends:
            ages[id(at)] = len(ages)
            at = at.newer
        found = [fault for node in nodes for fault in self._faults(node)]
        if ages.keys() != {id(node) for node in nodes if not node.pins}:
            found.append("the list of unpinned nodes is not the unpinned nodes")
        if self.evictable != sum(len(node.pages) for node in nodes if not node.pins):
            found.append(f"{self.evictable} pages are counted as evictable, wrongly")
        for node in nodes:
            if ages.get(id(node), -1) > ages.get(id(node.parent), len(ages)):
                found.append("a parent would be evicted before its child")
        return found

    def _faults(self, node: Node) -> list[str]:
        parent = node.parent
        assert parent is not None
        rules = {
            "a node's tokens do not fill its pages": (
                len(node.key) == len(node.pages) * self._page_bytes > 0
            ),
            "a node's end is not its parent's plus its pages": (
                node.end == parent.end + len(node.pages)
            ),
            "a node is not found by its first page": (
                parent.children.get(node.key[: self._page_bytes]) is node
            ),
            "a node has fewer pins than pinned children": (
                node.pins >= sum(child.pins > 0 for child in node.children.values())
            ),
            "a pinned node has an unpinned parent": bool(parent.pins or not node.pins),
        }
        return [sentence for sentence, holds in rules.items() if not holds]

    def _walk(
        self, node: Node, tokens: bytes, most: int, pieces: list[Int32s]
    ) -> tuple[Node, Node, int]:
        """Go down along `tokens`, adding the pages of whole nodes to `pieces`.

        Returns the last whole node, and the child of it (else itself) that begins like the rest of
        `tokens`, with how many pages they have in common (0 = none).
        """
        step = self._page_bytes
        at, limit = 0, most * step
        while at < limit:
            child = node.children.get(tokens[at : at + step])
            if child is None:
                break
            key = child.key
            if len(key) <= limit - at and tokens.startswith(key, at):
                pieces.append(child.pages)
                at += len(key)
                node = child
            else:
                inner = common_length(key, 0, tokens[at:limit]) * _ITEM // step
                return node, child, inner
        return node, node, 0

    def _split(self, node: Node, at: int) -> Node:
        """Part `node` after `at` pages; returns the upper part. Pins stay with the lower part."""
        parent = node.parent
        assert parent is not None
        cut = at * self._page_bytes
        upper = Node(parent, node.key[:cut], node.pages[:at], node.end - len(node.pages) + at)
        node.key, node.pages, node.parent = node.key[cut:], node.pages[at:], upper
        parent.children[upper.key[: self._page_bytes]] = upper
        upper.children[node.key[: self._page_bytes]] = node
        if node.pins:
            upper.pins = 1
        else:
            _link_after(upper, node)
        return upper

    def _add(self, parent: Node, key: bytes, pages: Int32s) -> Node:
        node = Node(parent, key, pages, parent.end + len(pages))
        parent.children[key[: self._page_bytes]] = node
        self.evictable += len(pages)
        _link_after(node, self._ends.older)
        return node

    def _trim(self, node: Node, keep: int) -> None:
        """Cut an unpinned leaf to its first `keep` pages."""
        self.evictable -= len(node.pages) - keep
        node.end -= len(node.pages) - keep
        node.key, node.pages = node.key[: keep * self._page_bytes], node.pages[:keep]

    def _remove(self, node: Node) -> None:
        """Take an unpinned leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._page_bytes]]
        self.evictable -= len(node.pages)
        self._unlink(node)
        if parent.parent is None and not parent.pins:
            self._forget_root(parent)

    def _unlink(self, node: Node) -> None:
        node.older.newer, node.newer.older = node.newer, node.older
        node.older = node.newer = self._ends

    def _forget_root(self, root: Node) -> None:
        if isinstance(root, Root) and not root.children:
            self._roots.pop(root.namespace, None)


def common_length(a: bytes, start: int, b: bytes) -> int:
    """How many tokens a[start:] and b (offsets in bytes) have in common from their beginning."""
    count = min(len(a) - start, len(b)) // _ITEM
    differ = np.frombuffer(a, np.int32, count, start) != np.frombuffer(b, np.int32, count)
    if not count:
        return 0
    first = int(differ.argmax())
    return first if differ[first] else count


def _joined(pieces: list[Int32s]) -> Int32s:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else NO_PAGES


def _below(root: Node) -> list[Node]:
    """All nodes under `root`, parents before children."""
    nodes = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _link_after(node: Node, older: Node) -> None:
    node.older, node.newer = older, older.newer
    older.newer.older = node
    older.newer = node
