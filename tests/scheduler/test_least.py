"""The least of numbers that come and go, against a list of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_jax.scheduler.least import Least


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=400))
def test_it_is_the_least_of_those_that_are_there(moves: list[tuple[bool, int]]):
    least, there = Least(), []
    for comes, number in moves:
        if comes:
            least.add(number)
            there.append(number)
        elif number in there:
            least.remove(number)
            there.remove(number)
        else:
            with pytest.raises(KeyError):
                least.remove(number)
        assert least.value == min(there, default=math.inf)


def test_what_has_gone_is_not_kept_while_the_least_stays():
    least = Least()
    least.add(-1)
    for number in range(10_000):
        least.add(number)
        least.remove(number)
    assert least.value == -1
    assert len(least._heap) < 100
