"""Prompts a second beside decodes, of a system whose rates are known."""

from __future__ import annotations

import math

import pytest

from conflux_jax.simulation.prefill_race import Race
from conflux_jax.simulation.system import SimulatedRequest, Tokens

STEP_S = 0.02


class Clockwork:
    """Every STEP_S each decode has a token, and `prompts` prompts their first; every tenth step
    takes `slow` times as long."""

    def __init__(self, prompts: int, slow: float = 1.0):
        self._prompts, self._slow = prompts, slow
        self._waiting: list[SimulatedRequest] = []
        self._decoding: dict[int, int] = {}
        self._now_s, self._steps = 0.0, 0

    def add(self, request: SimulatedRequest) -> None:
        assert request.arrival_s <= self._now_s
        if request.output_tokens > 1:
            self._decoding[request.number] = request.output_tokens
        else:
            self._waiting.append(request)

    @property
    def next_s(self) -> float:
        return self._now_s if self._decoding or self._waiting else math.inf

    def step(self) -> list[Tokens]:
        self._steps += 1
        self._now_s += STEP_S * (self._slow if self._steps % 10 == 0 else 1.0)
        done = [request.number for request in self._waiting[: self._prompts]]
        del self._waiting[: self._prompts]
        numbers = [*self._decoding, *done]
        self._decoding = {n: left - 1 for n, left in self._decoding.items() if left > 1}
        return [Tokens(self._now_s, numbers)]


@pytest.mark.parametrize("prompts", [1, 3])
def test_counts_what_ends_in_its_window(prompts: int):
    finish = Race(5, 100, 100, tbt_slo_s=0.05).run(Clockwork(prompts))
    assert finish.prompts_s == pytest.approx(prompts / STEP_S, rel=0.01)
    assert finish.on_time == 1.0


def test_counts_late_gaps():
    """Every tenth step is three times as long, and too long: 12 steps' time for ten tokens."""
    finish = Race(5, 100, 100, tbt_slo_s=0.05).run(Clockwork(2, slow=3.0))
    assert finish.on_time == pytest.approx(0.9, abs=0.005)
    assert finish.prompts_s == pytest.approx(2 / (1.2 * STEP_S), rel=0.01)


def test_a_system_that_runs_out_of_decodes_is_an_error():
    class Ends(Clockwork):
        def add(self, request: SimulatedRequest) -> None:
            if request.output_tokens > 1:
                self._decoding[request.number] = 2

    with pytest.raises(ValueError, match="no decode is left after 5 have begun"):
        Race(5, 100, 100, tbt_slo_s=0.05).run(Ends(1))
