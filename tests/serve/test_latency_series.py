"""Latencies over time, from the histograms of the metrics."""

from __future__ import annotations

import doctest

import pytest

from conflux_jax.config import SchedulerConfig
from conflux_jax.serve import dashboard_data, latency_series
from conflux_jax.serve.latency_series import MOST_POINTS, WINDOW_S, LatencySeries, quantile
from conflux_jax.serve.tallies import Tallies


@pytest.mark.parametrize("module", [latency_series, dashboard_data])
def test_worked_examples(module):
    assert doctest.testmod(module).failed == 0


def test_a_quantile_of_nothing_is_none():
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) is None


def test_a_quantile_lies_in_the_bucket_of_its_rank():
    assert quantile((1.0, 2.0, 4.0), (1, 0, 3, 0), 0.5) == pytest.approx(2.0 + 2.0 / 3)
    assert quantile((1.0, 2.0, 4.0), (0, 2, 0, 0), 1.0) == 2.0


def made() -> tuple[Tallies, LatencySeries]:
    tallies = Tallies(SchedulerConfig(), 1, lambda: 0.0)
    return tallies, LatencySeries(tallies)


def test_a_point_is_about_the_window_before_it():
    """Before anybody looks at 100 s there was a slow token, at 105 s a fast one; by 116 s neither
    is in the window any more."""
    tallies, series = made()
    tallies.ttft.observe(30.0)
    tallies.generated_tokens = 1000
    series.begin(100.0)
    for second in range(101, 117):
        if second == 105:
            tallies.ttft.observe(0.09)
            tallies.gaps.observe(0.012)
            tallies.generated_tokens += 50
            tallies.prompt_tokens += 20
            tallies.with_target["all"] += 2
            tallies.on_time["all"] += 1
        series.advance(float(second))
        series.advance(second + 0.5)  # too early for another
    by_time = {point.time_s: point for point in series.points}
    assert sorted(by_time) == [float(second) for second in range(101, 117)]
    assert by_time[104].ttft_p50_s is None and by_time[104].judged == 0
    assert by_time[104].output_tokens_per_s == 0.0
    for second in (105, 110, 114):
        point = by_time[second]
        assert point.ttft_p50_s is not None and point.tbt_p95_s is not None
        assert 0.08 < point.ttft_p50_s <= 0.1 and 0.01 < point.tbt_p95_s <= 0.015
        assert (point.attained, point.judged) == (1, 2)
        seconds = min(second - 100, WINDOW_S)
        assert point.output_tokens_per_s == pytest.approx(50 / seconds)
        assert point.prompt_tokens_per_s == pytest.approx(20 / seconds)
    assert by_time[115].ttft_p50_s is None and by_time[116].judged == 0


def test_what_was_while_nobody_looked_is_in_no_point():
    tallies, series = made()
    series.begin(0.0)
    series.advance(1.0)
    tallies.ttft.observe(9.0)
    series.begin(50.0)
    series.advance(51.0)
    assert [(point.time_s, point.ttft_p50_s) for point in series.points] == [(1, None), (51, None)]


def test_a_reader_gets_each_point_once_and_only_so_many_are_kept():
    _, series = made()
    series.begin(0.0)
    series.advance(1.0)
    assert [point.time_s for point in series.since(0)] == [1.0]
    assert series.since(1) == []
    for second in range(2, MOST_POINTS + 6):
        series.advance(float(second))
    assert len(series.points) == MOST_POINTS
    assert series.since(0)[0].time_s == 6.0
    assert [point.time_s for point in series.since(series.num_points - 2)] == [604.0, 605.0]
