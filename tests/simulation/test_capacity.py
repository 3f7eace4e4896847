"""Bracketing and bisection, halving over settings, intervals: on numbers with known answers."""

from __future__ import annotations

import doctest
import math

import pytest

from conflux_jax.simulation import capacity
from conflux_jax.simulation.capacity import (
    Score,
    best_settings,
    highest_sustained,
    interval,
)


def test_examples():
    assert doctest.testmod(capacity).failed == 0


@pytest.mark.parametrize("start", [0.4, 2.9, 3.1, 3.2, 60.0])
def test_a_known_capacity_is_found(start: float):
    tried = []

    def sustains(rate: float) -> bool:
        tried.append(rate)
        return rate <= 3.1

    found = highest_sustained(sustains, start, tolerance=0.03)
    assert found.low <= 3.1 < found.high <= found.low * 1.03
    assert {found.low, found.high} <= set(tried)
    assert len(tried) == len(set(tried))


def test_the_worked_example():
    tried = []
    highest_sustained(lambda rate: tried.append(round(rate, 2)) or rate <= 3.1, 4.0)
    assert tried == [4.0, 3.2, 2.56, 2.86, 3.03, 3.11]


def test_no_rate_and_every_rate():
    nothing, everything = highest_sustained(lambda _: False, 8.0), highest_sustained(bool, 8.0)
    assert nothing.low == 0.0 and nothing.high < 0.5
    assert math.isinf(everything.high) and everything.low > 100.0


@pytest.mark.parametrize("start", [1.0, 5.0, 40.0])
def test_who_sustains_most_is_best(start: float):
    """From below, in between and above all of them; each is tried once at most at a rate."""
    tried = []

    def score(limit: int, rate: float) -> Score:
        tried.append((limit, rate))
        return Score(rate <= limit, limit / rate)

    found = best_settings([3, 9, 4, 6], score, start)
    assert found.settings == 9
    assert not found.sustained or found.rate <= 9
    assert len(tried) == len(set(tried))


def test_equal_settings_and_one_alone():
    found = best_settings(["a", "b"], lambda _, rate: Score(rate <= 2.0, 0.5), 1.0, step=1.5)
    assert found.settings == "a" and found.sustained and found.rate == 1.5
    alone = best_settings(["a"], lambda *_: pytest.fail("tried"), 7.0)
    assert alone == ("a", 7.0, False)
    with pytest.raises(ValueError, match="none of the settings"):
        best_settings([], lambda *_: Score(True, 1.0), 1.0)


def test_interval():
    """Two values e^0 and e^2: the logarithms' mean is 1 and its standard error 1, and Student's t
    has its 97.5% point for one degree of freedom at tan(0.475 pi)."""
    found = interval([1.0, math.exp(2.0)])
    reach = math.tan(0.475 * math.pi)
    expected = (math.e, math.exp(1.0 - reach), math.exp(1.0 + reach))
    assert found == pytest.approx(expected)
    assert interval([5.0]) == (pytest.approx(5.0), 0.0, math.inf)
    assert interval([1.0, 0.0]) == interval([]) == (0.0, 0.0, 0.0)
