"""How many prompts a second a system prefills beside decodes that never end, their TBT kept.

A closed loop: a few prompts are always there, and each one that has its first token is replaced by
another. So the systems are compared by what they can do, not by how they queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from conflux_jax.simulation.system import SimulatedRequest, System


class Finish(NamedTuple):
    """prompts_s: prefilled a second. on_time: share of the decodes' gaps within the target."""

    prompts_s: float
    on_time: float


@dataclass(frozen=True)
class Race:
    """decodes: that run all along, of `context_tokens` at their start. waiting: prompts of
    `prompt_tokens` that are there at any moment. tbt_slo_s: of the decodes. warm_s, measured_s:
    seconds from the first prompt that do not count, and that do."""

    decodes: int
    context_tokens: int
    prompt_tokens: int
    tbt_slo_s: float
    waiting: int = 8
    warm_s: float = 3.0
    measured_s: float = 10.0

    def run(self, system: System) -> Finish:
        """Raises ValueError for a system that cannot hold the requests, or ends early."""
        return _Run(self, system).finish()

    @property
    def output_tokens(self) -> int:
        """Of a decode: more than it can get while this lasts, at a fifth of its target each."""
        return int(5 * (self.warm_s + self.measured_s) / self.tbt_slo_s)


class _Run:
    def __init__(self, race: Race, system: System):
        self._race, self._system = race, system
        self._number = 0
        self._latest_s: dict[int, float] = {}
        self._gaps = self._late = self._prompts = 0
        self._from_s = self._until_s = float("inf")

    def finish(self) -> Finish:
        race, system = self._race, self._system
        for _ in range(race.decodes):
            self._add(0.0, race.context_tokens, race.output_tokens)
        now_s = 0.0
        while now_s < self._until_s:
            if (now_s := system.next_s) == float("inf"):
                raise ValueError(f"no decode is left after {len(self._latest_s)} have begun")
            for tokens in system.step():
                now_s = tokens.time_s
                for number in tokens.numbers:
                    self._note(number, tokens.time_s)
        return Finish(self._prompts / race.measured_s, 1.0 - self._late / max(self._gaps, 1))

    def _add(self, now_s: float, prompt_tokens: int, output_tokens: int) -> None:
        request = SimulatedRequest(
            self._number, now_s, prompt_tokens, output_tokens, tbt_slo_s=self._race.tbt_slo_s
        )
        self._number += 1
        self._system.add(request)

    def _note(self, number: int, time_s: float) -> None:
        race = self._race
        counts = self._from_s <= time_s < self._until_s
        if number >= race.decodes:
            self._prompts += counts
            self._add(time_s, race.prompt_tokens, 1)
            return
        if counts:
            self._gaps += 1
            self._late += time_s - self._latest_s[number] > race.tbt_slo_s
        begun = len(self._latest_s)
        self._latest_s[number] = time_s
        if begun < len(self._latest_s) == race.decodes:
            self._from_s = time_s + race.warm_s
            self._until_s = self._from_s + race.measured_s
            for _ in range(race.waiting):
                self._add(time_s, race.prompt_tokens, 1)
