"""A scheduler on a real runner, turned by the real loop: for tests of what comes out of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import jax
import numpy as np

from conflux_jax.config import Config
from conflux_jax.execution.runner import Runner
from conflux_jax.loop import InFlight, turn
from conflux_jax.plan import IterationPlan
from conflux_jax.request import FinishReason, PromptLogprobs, Request, SamplingParams
from conflux_jax.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "kv_pool_tokens": 1024,
    "page_tokens": 4,
    "handoff_pages": 6,
    "decode_rows_ladder": (8,),
    "bucket_growth": 8.0,
}


def settings(runner: Runner, **changes) -> Config:
    """Of a runner made with SETTINGS."""
    return Config.from_flat(**{**SETTINGS, "sp": runner.geometry.groups, **changes})


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


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
    runner of its own. tokens: what came, by request; ends: the requests that are over; messages:
    of those that ended without a token; logprobs: of tokens, where asked for; prompts: what was
    said of each prompt.
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
        self.messages: dict[str, str] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.prompts: dict[str, list[PromptLogprobs]] = {}
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
            assert event.request_id not in self.ends
            if event.token_id is None:
                self.messages[event.request_id] = event.message
            else:
                self.tokens[event.request_id].append(event.token_id)
            if event.logprobs is not None:
                self.logprobs.setdefault(event.request_id, []).append(event.logprobs.sampled)
            if event.prompt_logprobs is not None:
                assert len(self.tokens[event.request_id]) == 1
                self.prompts.setdefault(event.request_id, []).append(event.prompt_logprobs)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.finish_reason

    def forget(self) -> None:
        """What is under way will never be there."""
        self._previous = None

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
