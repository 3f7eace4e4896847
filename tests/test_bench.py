"""What the benchmarks make of what they measure, on made-up measurements."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench import overlap_host, warmup
from bench.overlap_host import WatchedExecutor, idle_fraction
from conflux_jax.plan import Bucket, DecodeRow, DecodeRows, IterationPlan


def plan_of(decodes: int) -> IterationPlan:
    rows = DecodeRows.of([DecodeRow(f"r{i}", i, 7) for i in range(decodes)])
    return IterationPlan(0, Bucket(decodes, decodes, False, False), (rows,))


class ScriptedDevice:
    """A runner whose step is ready `step_s` after its launch or after the step before it, whichever
    is later. A launch takes `launch_s`, the host `host_s` between collect and launch."""

    def __init__(self, step_s: float, launch_s: float):
        self.step_s, self.launch_s = step_s, launch_s
        self.now_s = self.ready_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def close(self) -> None: ...

    def launch(self, plan: IterationPlan) -> SimpleNamespace:
        self.now_s += self.launch_s
        self.ready_s = at = max(self.now_s, self.ready_s) + self.step_s
        token_ids = SimpleNamespace(is_ready=lambda: self.now_s >= at)
        return SimpleNamespace(sampled=SimpleNamespace(token_ids=token_ids), ready_s=at)

    def collect(self, ticket: SimpleNamespace) -> None:
        self.now_s = max(self.now_s, ticket.ready_s)


@pytest.mark.parametrize(
    ("step_s", "host_s", "ahead", "least", "most"),
    [
        (0.1, 0.03, True, 0.0, 0.0),  # hidden
        (0.1, 0.2, True, 0.5, 1.0),  # the host is slower: the device waits half of the time
        (0.1, 0.03, False, 0.23, 1.0),  # the first host, but without a launch ahead of the device
    ],
)
def test_the_idle_fraction_is_never_underestimated(
    monkeypatch: pytest.MonkeyPatch, step_s, host_s, ahead, least, most
):
    device = ScriptedDevice(step_s, launch_s=0.001)
    monkeypatch.setattr(overlap_host.time, "perf_counter", device.clock)
    watched = WatchedExecutor(device)
    previous = None
    for _ in range(20):
        device.now_s += host_s
        step = watched.launch(plan_of(4))
        if ahead and previous is not None:
            watched.collect(previous)
        elif not ahead:
            watched.collect(step)
        previous = step
    fraction, counted, median_s = idle_fraction(watched.steps, 4)
    assert counted >= 17 and median_s >= step_s
    assert least <= fraction <= most
    with pytest.raises(RuntimeError, match="no two steps in a row had 5 decodes"):
        idle_fraction(watched.steps, 5)


def test_warm_up_figures_are_the_cold_start_and_the_median_of_the_warm_ones():
    base = {"variants": 12, "load_s": 1.0, "trace_s": 1.0, "lower_s": 1.0, "compile_s": 1.0}
    starts = [{**base, "warm_up_s": seconds} for seconds in (20.0, 4.0, 9.0, 3.0)]
    assert warmup.flat(starts) == {"variants": 12, "cold_s": 20.0, "warm_s": 4.0}
    assert "warm / cold: 0.20" in warmup.table(starts)
