import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_jax.scheduler.page_pool import PageError, PagePool


def test_hands_out_the_lowest_first_and_what_came_back_last():
    pool = PagePool(groups=2, num_pages=4)
    assert pool.allocate(0, 3) == (0, 1, 2)
    pool.free(0, (0, 1))
    assert pool.allocate(0, 3) == (0, 1, 3)
    assert pool.num_free(0) == 0 and pool.num_free(1) == 4


def test_more_than_free_is_an_error_and_takes_nothing():
    pool = PagePool(1, 2)
    with pytest.raises(PageError, match="3 pages asked, 2 are free"):
        pool.allocate(0, 3)
    with pytest.raises(PageError):
        pool.allocate(0, -1)
    assert pool.num_free(0) == 2 and pool.allocate(0, 0) == ()


@pytest.mark.parametrize("pages", [(0, 0), (1,), (2,), (-1,)])
def test_double_and_foreign_frees_raise(pages):
    pool = PagePool(2, 2)
    pool.allocate(0, 1)
    pool.allocate(1, 2)  # the same numbers of another group are other pages
    with pytest.raises(PageError):
        pool.free(0, pages)


@settings(deadline=None)
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
