"""Searching for the highest rate that something sustains, and for the settings that sustain most.

Nothing here knows of requests or systems: a rate is a number, and whoever asks says whether it is
sustained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from scipy.special import stdtrit

STEP = 1.25  # between two rates while the bracket is not closed
TOLERANCE = 0.04  # of a bracket that is narrow enough
REACH = 30.0  # times the first rate, up and down, beyond which nothing is looked for
SETTINGS_STEP = 1.07  # between two rates at which settings are compared, rising; falling by two
KEPT = 6  # settings that are not dropped before some sustain a rate
CONFIDENCE = 0.95


class Bracket(NamedTuple):
    """low: the highest rate that was sustained, 0 where none was. high: the lowest above it that
    was not, infinite where all were."""

    low: float
    high: float


def highest_sustained(
    sustains: Callable[[float], bool],
    start: float,
    step: float = STEP,
    tolerance: float = TOLERANCE,
) -> Bracket:
    """From `start` up or down by `step` until one rate is sustained and the next is not, then by
    halves (of the ratio) until they are within `tolerance` of each other.

    Where being sustained does not fall off with the rate once and for all, it is one of the places
    where it does. Worked, capacity 3.1 and start 4: 4 no, 3.2 no, 2.56 yes; then 2.86 yes, 3.03
    yes, 3.11 no: the bracket is (3.03, 3.11).
    """
    low, high, rate = 0.0, math.inf, start
    while not (low and math.isfinite(high)):
        if sustains(rate):
            low, rate = rate, rate * step
        else:
            high, rate = rate, rate / step
        if not start / REACH <= rate <= start * REACH:
            return Bracket(low, high)
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        if sustains(middle):
            low = middle
        else:
            high = middle
    return Bracket(low, high)


class Score(NamedTuple):
    """How something did at a rate. reached: a share, of anything that says who came closer."""

    sustained: bool
    reached: float


class Best[S](NamedTuple):
    """rate: the highest that they are known to sustain, or where `sustained` is False, to try."""

    settings: S
    rate: float
    sustained: bool


def best_settings[S](
    candidates: Sequence[S],
    score: Callable[[S, float], Score],
    start: float,
    step: float = SETTINGS_STEP,
) -> Best[S]:
    """The candidate that sustains the highest of the rates start * step ** n; among equals, who
    comes closest at the next one.

    While none sustains a rate, all go on to one lower by two steps, but of more than KEPT the worse
    half: who does best far above its capacity need not do so below. Once some sustain one, they
    alone go on to the next higher one. One candidate is not tried at all. Raises ValueError where
    there are none.
    """
    if not candidates:
        raise ValueError("candidates: none of the settings fits this model on these GPUs")

    @cache
    def scored(which: int, rung: int) -> Score:
        return score(candidates[which], start * step**rung)

    left, rung, found = list(range(len(candidates))), 0, False
    while len(left) > 1 and 1 / REACH <= step**rung <= REACH:
        left.sort(key=lambda which: scored(which, rung), reverse=True)  # equals keep their order
        holding = sum([scored(which, rung).sustained for which in left])
        if holding:
            left, found, rung = left[:holding], True, rung + 1
        elif found:
            left = left[:1]
        else:
            left, rung = left[: max(KEPT, len(left) // 2)], rung - 2
    return Best(candidates[left[0]], start * step ** (rung - found), found)


def allowed_late(requests: int, share: float) -> int:
    """How many of them may be late while `share` is on time.

    >>> allowed_late(100, 0.95), allowed_late(19, 0.95), allowed_late(20, 0.95)
    (5, 0, 1)
    """
    return math.floor(requests * (1 - share) + 1e-9)


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Of the geometric mean: Student's t on the logarithms, as if the values were drawn
    independently. Rates and their ratios are as likely to be off by a factor up as down. Unbounded
    for one value alone; 0 throughout where a value is 0, or none is given."""
    if not values or min(values) <= 0:
        return Interval(0.0, 0.0, 0.0)
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(stdtrit(len(logs) - 1, (1 + confidence) / 2)) * error
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))
