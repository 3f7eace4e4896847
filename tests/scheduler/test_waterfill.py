import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_jax.scheduler.waterfill import waterfill


@pytest.mark.parametrize(
    ("loads", "level", "total", "shares"),
    [
        ((40, 10, 10, 0), 300, 1140, (260, 290, 290, 300)),  # the worked example of DESIGN
        ((40, 10, 10, 0), 300, 0, (0, 0, 0, 0)),
        ((40, 10, 10, 0), 300, 3, (0, 0, 0, 3)),
        ((40, 10, 10, 0), 300, 11, (0, 1, 0, 10)),
        ((0, 0, 0, 0), 8, 3, (1, 1, 1, 0)),  # a three-token prompt on four idle groups
        ((5, 9, 0), 4, 4, (0, 0, 4)),  # groups above the level take none
        ((7,), 10, 3, (3,)),
    ],
)
def test_examples(loads, level, total, shares):
    assert waterfill(loads, level, total) == shares


@pytest.mark.parametrize(
    ("loads", "level", "total"),
    [((40, 10, 10, 0), 300, 1141), ((5, 5), 5, 1), ((0, 0), 3, -1), ((0, 9), 4, 5)],
)
def test_what_does_not_fit_raises(loads, level, total):
    with pytest.raises(ValueError, match=r"total|fit"):
        waterfill(loads, level, total)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 6), st.data())
def test_equals_brute_force(loads, level, data):
    room = [max(0, level - load) for load in loads]
    total = data.draw(st.integers(0, sum(room)))
    shares = waterfill(loads, level, total)
    assert sum(shares) == total
    assert all(0 <= share <= most for share, most in zip(shares, room, strict=True))

    def top(cut):
        return max((a + b for a, b in zip(loads, cut, strict=True) if b), default=0)

    cuts = itertools.product(*(range(most + 1) for most in room))
    least = min(top(cut) for cut in cuts if sum(cut) == total)
    assert top(shares) == least


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=16), st.integers(1, 2000), st.data())
def test_water_is_level(loads, level, data):
    total = data.draw(st.integers(0, sum(max(0, level - load) for load in loads)))
    shares = waterfill(loads, level, total)
    tops = [load + share for load, share in zip(loads, shares, strict=True)]
    surface = max((top for top, share in zip(tops, shares, strict=True) if share), default=0)
    # Nobody is more than the one token lower that does not divide evenly, ...
    assert min(tops) >= surface - 1
    # ... and those that have it come first.
    high = [g for g, top in enumerate(tops) if top == surface and shares[g]]
    low = [g for g, top in enumerate(tops) if top == surface - 1]
    assert not high or not low or max(high) < min(low)
