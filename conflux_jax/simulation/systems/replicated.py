"""Several engines side by side, each with its part of the GPUs, behind a router that knows how
busy they are: how one serves short prompts, which need no second GPU to be in time.
"""

from __future__ import annotations

from collections.abc import Sequence

from conflux_jax.simulation.system import Observer, SimulatedRequest, Statistics, Tokens
from conflux_jax.simulation.systems.conflux import ConfluxSystem


class Replicated:
    """Satisfies `System`, `Reporting` and `Observable`. A request goes to the engine with the
    fewest prompt tokens to prefill, of equals to the one with the least KV: what `GetLoad` tells a
    router. Raises ValueError without engines."""

    def __init__(self, engines: Sequence[ConfluxSystem]):
        if not engines:
            raise ValueError("engines: at least one")
        self._engines = engines

    def add(self, request: SimulatedRequest) -> None:
        min(self._engines, key=_load).add(request)

    @property
    def next_s(self) -> float:
        return min(engine.next_s for engine in self._engines)

    def step(self) -> Sequence[Tokens]:
        return min(self._engines, key=_next_s).step()

    def observe(self, observer: Observer) -> None:
        """Of the first engine: who looks on takes groups to be those of one."""
        self._engines[0].observe(observer)

    def statistics(self) -> Statistics:
        """busy_s: the engines' mean, so that its share of the time says how busy the GPUs are."""
        parts = [engine.statistics() for engine in self._engines]
        return Statistics(
            iterations=sum(part.iterations for part in parts),
            busy_s=sum(part.busy_s for part in parts) / len(parts),
            kv_peak=max(part.kv_peak for part in parts),
            preemptions=sum(part.preemptions for part in parts),
        )


def _next_s(engine: ConfluxSystem) -> float:
    return engine.next_s


def _load(engine: ConfluxSystem) -> tuple[int, int]:
    load = engine.load()
    return load.prefill_tokens, sum(load.context_tokens)
