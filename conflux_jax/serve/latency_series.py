"""How latencies and attainment go over time: a point a second, each about the last seconds before
it, from the histograms that the metrics have anyway. Costs nothing while nobody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from conflux_jax.serve.tallies import Tallies

WINDOW_S = 10.0  # that a point is about
STEP_S = 1.0  # between points
MOST_POINTS = 600


class Point(NamedTuple):
    """time_s: on the engine's clock. Percentiles are of first tokens and of gaps between tokens in
    the window, None where there were none. attained, judged: requests that ended in it and had
    targets. Rates are a second."""

    time_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tbt_p50_s: float | None
    tbt_p95_s: float | None
    attained: int
    judged: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float


class _Counts(NamedTuple):
    """Sums since the start, at a moment."""

    time_s: float
    ttft: tuple[int, ...]
    gaps: tuple[int, ...]
    attained: int
    judged: int
    output_tokens: int
    prompt_tokens: int


class LatencySeries:
    """points: the last MOST_POINTS, oldest first; num_points: that there have been in all."""

    def __init__(self, tallies: Tallies):
        self.points: deque[Point] = deque(maxlen=MOST_POINTS)
        self.num_points = 0
        self._tallies = tallies
        self._before: deque[_Counts] = deque()  # no older than the window, but for the first

    def begin(self, now_s: float) -> None:
        """Somebody looks again: what was between counts for no point."""
        self._before.clear()
        self._before.append(self._counts(now_s))

    def advance(self, now_s: float) -> None:
        """Add a point, if one is due."""
        if now_s < self._before[-1].time_s + STEP_S:
            return
        now = self._counts(now_s)
        while len(self._before) > 1 and self._before[1].time_s <= now_s - WINDOW_S:
            self._before.popleft()
        self.points.append(self._point(self._before[0], now))
        self.num_points += 1
        self._before.append(now)

    def since(self, number: int) -> list[Point]:
        """The points after the first `number` of all, as far as they are kept."""
        missed = min(self.num_points - number, len(self.points))
        return list(self.points)[len(self.points) - missed :]

    def _counts(self, now_s: float) -> _Counts:
        tallies = self._tallies
        with tallies.lock:
            return _Counts(
                now_s,
                tuple(tallies.ttft.counts),
                tuple(tallies.gaps.counts),
                tallies.on_time["all"],
                tallies.with_target["all"],
                tallies.generated_tokens,
                tallies.prompt_tokens,
            )

    def _point(self, old: _Counts, new: _Counts) -> Point:
        bounds = self._tallies.ttft.bounds, self._tallies.gaps.bounds
        ttft = [b - a for a, b in zip(old.ttft, new.ttft, strict=True)]
        gaps = [b - a for a, b in zip(old.gaps, new.gaps, strict=True)]
        seconds = new.time_s - old.time_s
        return Point(
            time_s=new.time_s,
            ttft_p50_s=quantile(bounds[0], ttft, 0.5),
            ttft_p95_s=quantile(bounds[0], ttft, 0.95),
            tbt_p50_s=quantile(bounds[1], gaps, 0.5),
            tbt_p95_s=quantile(bounds[1], gaps, 0.95),
            attained=new.attained - old.attained,
            judged=new.judged - old.judged,
            output_tokens_per_s=(new.output_tokens - old.output_tokens) / seconds,
            prompt_tokens_per_s=(new.prompt_tokens - old.prompt_tokens) / seconds,
        )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """As Prometheus estimates it: straight lines within a bucket, the last bound above all. counts:
    as `Histogram` has them. None where nothing was counted.

    Worked: 4 observations up to 1 and 6 from there to 2. The 7th of the ten is half-way through the
    second bucket:

    >>> quantile((1.0, 2.0), (4, 6, 0), 0.7)
    1.5
    >>> quantile((1.0, 2.0), (0, 0, 3), 0.5)
    2.0
    """
    total = sum(counts)
    if not total:
        return None
    left, low = share * total, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return low + (bound - low) * max(left, 0.0) / count
        left -= count
        low = bound
    return bounds[-1]
