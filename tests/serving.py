"""A scheduler on a real runner, turned by the real loop: for tests of what comes out of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import jax

from conflux_jax.config import Config
from conflux_jax.execution.runner import Runner
from conflux_jax.loop import InFlight, turn
from conflux_jax.plan import IterationPlan
from conflux_jax.request import FinishReason, Request, SamplingParams
from conflux_jax.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    params: SamplingParams = GREEDY,
    eos: frozenset[int] = frozenset(),
) -> Request:
    """The draws of a request depend on its id."""
    seed = sum(map(ord, request_id))
    return Request(request_id, tuple(prompt), params, max_tokens, eos, seed)


class Serving:
    """A fresh scheduler on a runner that may have served others before.

    num_pages: of each group, where fewer than the runner has; a test of memory pressure needs no
    runner of its own. tokens: what came, by request; ends: the requests that are over.
    """

    def __init__(self, runner: Runner, config: Config, num_pages: int | None = None):
        geometry = runner.geometry
        if num_pages is not None:
            assert num_pages <= geometry.num_pages
            geometry = replace(geometry, num_pages=num_pages)
        self.runner, self.num_pages = runner, geometry.num_pages
        self.scheduler = Scheduler(config.scheduler, geometry, runner.ladders, runner.max_model_len)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.plans: list[IterationPlan] = []
        self._previous: InFlight | None = None

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.tokens[request.request_id] = []

    def turn(self) -> None:
        now = float(len(self.plans))
        self._previous, events = turn(self.scheduler, self.runner, lambda: now, self._previous)
        if self._previous is not None:
            self.plans.append(self._previous.plan)
        for event in events:
            assert event.token_id is not None and event.request_id not in self.ends
            self.tokens[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.finish_reason

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    def drain(self) -> Mapping[str, list[int]]:
        """Serve what is there to its end; then all pages are free. The tokens of all requests."""
        while self.scheduler.has_work or self._previous is not None:
            self.turn()
        assert set(self.scheduler.load().free_pages) == {self.num_pages}
        return self.tokens


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """After warm-up nothing compiles, whatever runs; nothing is even traced."""
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled
