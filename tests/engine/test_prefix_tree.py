"""The tree against a list of what was put in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detour.engine.page_pool import PagePool
from detour.engine.prefix_tree import PrefixTree, common_length


def pack(ids) -> bytes:
    return np.array(ids, np.int32).tobytes()


class Tree:
    """A tree with page size 2 that sequences are put into whole."""

    def __init__(self, pages: int = 200) -> None:
        self.pool = PagePool(pages)
        self.tree = PrefixTree(self.pool, 2)

    def put(self, ids, namespace: str = ""):
        """Insert all whole pages as a sequence that ends does; the pages they are in."""
        root = self.tree.root(namespace)
        self.tree.pin(root)
        count = len(ids) // 2
        pages = self.pool.allocate(count)
        node, present = self.tree.insert(root, pack(ids[: count * 2]), pages)
        self.pool.release(pages[: len(present)].copy())
        pages[: len(present)] = present
        self.tree.unpin(node)
        self.check()
        return pages.tolist()

    def get(self, ids, most: int = 100, namespace: str = ""):
        """The pages of the longest match, pinned while looked at."""
        found = self.tree.match(namespace, pack(ids), min(most, len(ids) // 2))
        self.tree.pin(found.node)
        self.check()
        assert found.node.end == len(found.pages)
        assert self.tree.path_pages(found.node).tolist() == found.pages.tolist()
        self.tree.unpin(found.node)
        self.check()
        return found.pages.tolist()

    def check(self) -> None:
        assert self.tree.violations() == self.pool.violations() == []
        assert self.pool.faults == 0


def test_matches_whole_pages_of_the_longest_prefix():
    tree = Tree()
    pages = tree.put([1, 2, 3, 4, 5, 6, 7])
    assert len(pages) == 3
    assert tree.get([1, 2, 3, 4, 5, 6, 7, 8]) == pages
    assert tree.get([1, 2, 3, 4, 5, 9]) == pages[:2]
    assert tree.get([1, 2, 3, 4, 5, 6], most=1) == pages[:1]
    assert tree.get([1, 9, 3, 4]) == []
    assert tree.get([]) == []


def test_a_common_beginning_is_stored_once():
    tree = Tree()
    first = tree.put([1, 2, 3, 4, 5, 6])
    second = tree.put([1, 2, 3, 4, 7, 8])
    assert first[:2] == second[:2] and first[2] != second[2]
    assert tree.pool.cached == 4 and tree.pool.held == 0
    assert tree.get([1, 2, 3, 4, 7, 8]) == second


def test_namespaces_share_nothing_and_vanish_when_empty():
    tree = Tree()
    pages = tree.put([1, 2, 3, 4], "a")
    assert tree.get([1, 2, 3, 4], namespace="b") == []
    assert tree.put([1, 2, 3, 4], "b") != pages
    tree.tree.drop("a")
    tree.check()
    assert tree.get([1, 2, 3, 4], namespace="a") == []
    assert len(tree.get([1, 2, 3, 4], namespace="b")) == 2
    tree.tree.evict(10)
    assert tree.pool.free == tree.pool.usable
    assert tree.tree._roots == {}, "namespaces leave nothing behind"


def test_the_least_recently_used_goes_first_and_from_its_end():
    tree = Tree()
    old = tree.put([1, 2, 3, 4, 5, 6])
    tree.put([7, 8, 9, 10])
    assert tree.get([1, 2, 3, 4, 5, 6]) == old  # now the younger one
    assert tree.tree.evict(1) == 1
    assert tree.tree.match_length("", pack([7, 8, 9, 10]), 2) == 1  # which does not use it
    assert tree.tree.evict(2) == 2
    tree.check()
    assert tree.get([7, 8, 9, 10]) == []
    assert tree.get([1, 2, 3, 4, 5, 6]) == old[:2]


def test_pinned_pages_stay():
    tree = Tree()
    tree.put([1, 2, 3, 4, 5, 6])
    pages = tree.put([1, 2, 3, 4, 7, 8])
    found = tree.tree.match("", pack([1, 2, 3, 4]), 2)
    tree.tree.pin(found.node)
    assert tree.tree.evictable == 2
    assert tree.tree.evict(100) == 2
    tree.check()
    assert tree.get([1, 2, 3, 4, 7, 8]) == pages[:2]
    tree.tree.unpin(found.node)
    assert tree.tree.evict(100) == 2
    assert tree.pool.free == tree.pool.usable


def test_a_prompt_in_chunks_is_one_node():
    tree = Tree()
    node = tree.tree.root("")
    tree.tree.pin(node)
    for at in range(0, 20, 4):
        node, present = tree.tree.insert(node, pack(range(at, at + 4)), tree.pool.allocate(2))
        assert not len(present)
        tree.check()
    assert len(tree.tree.nodes()) == 1 and node.end == 10
    tree.tree.pin(node)  # another sequence uses it: it must not grow under it
    after, _ = tree.tree.insert(node, pack([90, 91]), tree.pool.allocate(1))
    assert after is not node and node.end == 10
    tree.tree.unpin(after)
    tree.tree.unpin(node)
    tree.check()
    assert tree.tree.evictable == 11


def test_forget_takes_only_what_nobody_else_uses():
    tree = Tree()
    shared = tree.put([1, 2, 3, 4])
    tree.put([1, 2, 5, 6])
    found = tree.tree.match("", pack([1, 2, 5, 6]), 2)
    tree.tree.pin(found.node)
    tree.tree.unpin(found.node)
    tree.tree.forget(found.node)
    tree.check()
    assert tree.get([1, 2, 5, 6]) == shared[:1]
    assert tree.get([1, 2, 3, 4]) == shared


@pytest.mark.parametrize(
    ("a", "b", "same"), [([1, 2, 3], [1, 2, 4], 2), ([], [1], 0), ([1], [1, 2], 1), ([2], [1], 0)]
)
def test_common_length(a, b, same):
    assert common_length(pack([9, *a]), 4, pack(b)) == same


sequences = st.lists(st.integers(0, 2), min_size=2, max_size=16)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), sequences),
        st.tuples(st.just("get"), sequences),
        st.tuples(st.just("pin"), sequences),
        st.tuples(st.just("unpin"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(1, 8)),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(actions)
def test_any_order_of_operations(steps):
    """What is found was put there; what is pinned stays found; evicting everything empties it."""
    tree = Tree(1000)
    contents: dict[int, tuple] = {}  # page -> the tokens up to its end
    pins: list[tuple] = []
    for action, what in steps:
        if action == "put":
            for at, page in enumerate(tree.put(what)):
                contents[page] = tuple(what[: 2 * at + 2])
        elif action == "get":
            for at, page in enumerate(tree.get(what)):
                assert contents[page] == tuple(what[: 2 * at + 2])
        elif action == "pin":
            found = tree.tree.match("", pack(what), len(what) // 2)
            tree.tree.pin(found.node)
            pins.append((found, what))
        elif action == "unpin" and pins:
            found, _ = pins.pop(what % len(pins))
            tree.tree.unpin(found.node)
        elif action == "evict":
            before = tree.tree.evictable
            assert tree.tree.evict(what) == min(what, before)
        tree.check()
        for found, ids in pins:
            assert tree.get(ids)[: len(found.pages)] == found.pages.tolist()
    for found, _ in pins:
        tree.tree.unpin(found.node)
    tree.tree.evict(10_000)
    assert tree.pool.free == tree.pool.usable and not tree.tree._roots
