"""Every page is free, held or cached: exactly one."""

import pytest

from detour.engine.page_pool import CACHED, HELD, PagePool


def test_a_page_goes_round():
    pool = PagePool(6)
    assert (pool.free, pool.usable) == (5, 5)
    pages = pool.allocate(3)
    assert sorted(pages.tolist()) == [1, 2, 3], "page 0 belongs to nobody"
    assert pool.are(HELD, pages) and (pool.free, pool.held) == (2, 3)
    pool.share(pages[:2])
    assert pool.are(CACHED, pages[:2]) and (pool.held, pool.cached) == (1, 2)
    pool.release(pages[2:])
    pool.release_cached(pages[:2])
    assert (pool.free, pool.held, pool.cached, pool.faults) == (5, 0, 0, 0)
    assert pool.violations() == []


def test_no_more_than_there_are():
    pool = PagePool(3)
    with pytest.raises(ValueError, match="3 pages asked, 2 free"):
        pool.allocate(3)
    assert len(pool.allocate(0)) == 0
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)


def test_a_second_release_is_told_and_does_nothing(caplog):
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.release(pages)
    pool.release(pages)
    assert pool.faults == 1 and pool.free == 3
    assert "left as they are" in caplog.text
    pool.release_cached(pool.allocate(1))
    assert pool.faults == 2 and pool.held == 1
    assert pool.violations() == []


def test_violations_are_found_and_rebuilt_away():
    pool = PagePool(8)
    kept = pool.allocate(4)
    pool.held = 3
    pool._stack[0] = kept[0]
    assert len(pool.violations()) == 3
    pool.rebuild(kept[:2], kept[2:3])
    assert pool.violations() == []
    assert (pool.free, pool.held, pool.cached) == (4, 2, 1)
    assert not set(pool.allocate(4).tolist()) & set(kept[:3].tolist())
