from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_jax.scheduler.page_pool import PageError, PagePool


def test_hands_out_the_lowest_first_and_what_came_back_last():
    pool = PagePool(groups=2, num_pages=4)
    first = pool.allocate(0, 2)
    assert [*first, *pool.allocate(0, 1)] == [0, 1, 2]
    pool.free(0, first)
    assert list(pool.allocate(0, 3)) == [0, 1, 3]
    assert pool.num_free(0) == 0 and pool.num_free(1) == 4


def test_more_than_free_is_an_error_and_takes_nothing():
    pool = PagePool(1, 2)
    with pytest.raises(PageError, match="3 pages asked, 2 are free"):
        pool.allocate(0, 3)
    with pytest.raises(PageError):
        pool.allocate(0, -1)
    assert pool.num_free(0) == 2 and not pool.allocate(0, 0)


@pytest.mark.parametrize("pages", [(0,), (0, 1, 2), (1,), (1, 0), (7,), (8,), (-1,)])
def test_what_is_no_whole_holding_is_not_taken(pages):
    pool = PagePool(2, 8)
    pool.allocate(0, 2)
    pool.allocate(1, 8)  # the same numbers of another group are other pages
    with pytest.raises(PageError):
        pool.free(0, array("i", pages))
    assert pool.num_free(0) == 6  # nothing was taken


def test_a_holding_freed_twice_is_noticed_when_its_first_page_is_anothers_by_then():
    pool = PagePool(1, 8)
    first, other = pool.allocate(0, 3), pool.allocate(0, 4)
    pool.free(0, first)
    later = pool.allocate(0, 1)
    assert later[0] == first[0]
    with pytest.raises(PageError, match="3 pages, of 1 that may be its"):
        pool.free(0, first)
    pool.free(0, later)
    pool.free(0, other)
    assert pool.num_free(0) == 8


def test_all_groups_at_once():
    pool = PagePool(groups=3, num_pages=5)
    first = pool.allocate_all(2)
    assert [list(pages) for pages in first] == [[0, 1]] * 3
    assert pool.open((0, 2, 2, 2)) == [2, 2, 3, 4]
    assert pool.free_pages() == [2, 3, 0]
    with pytest.raises(PageError, match="group 2: 1 pages asked"):
        pool.allocate_all(1)
    assert [pool.num_free(group) for group in range(3)] == [2, 3, 0]
    pool.free_all(first)
    assert [list(pool.allocate(group, 2)) for group in range(3)] == [[0, 1]] * 3
    pool.free(1, first[1])
    with pytest.raises(PageError, match="group 1: no holding begins with page 0"):
        pool.free_all(first)
    assert pool.free_pages() == [2, 5, 0]  # nothing was taken


def test_a_holding_grows_and_comes_back_once():
    pool = PagePool(1, 8)
    pages = pool.allocate(0, 2)
    other = pool.allocate(0, 1)
    pages.extend(pool.open([0, 0]))
    assert list(pages) == [0, 1, 3, 4] and pool.num_free(0) == 3
    assert pool.used().tolist() == [[True] * 5 + [False] * 3]
    pool.free(0, pages)
    with pytest.raises(PageError, match="no holding begins with page 0"):
        pool.free(0, pages)
    again = pool.allocate(0, 3)  # the same first page, another holding
    assert list(again) == [0, 1, 3]
    pool.free(0, again)
    pool.free(0, other)
    assert pool.num_free(0) == 8 and not pool.used().any()


@given(st.data(), st.integers(1, 20))
def test_accounting_is_exact(data, num_pages):
    pool, held, free = PagePool(1, num_pages), [], set(range(num_pages))
    for _ in range(20):
        if held and data.draw(st.booleans()):
            pages = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.free(0, pages)
            free |= set(pages)
        else:
            pages = pool.allocate(0, data.draw(st.integers(0, len(free))))
            assert set(pages) <= free and len(set(pages)) == len(pages)
            free -= set(pages)
            held.append(pages)
        assert pool.num_free(0) == len(free)
