"""Counts what the engine does, for the metrics: iterations, and every request's times.

All of it happens on the engine's thread, once a token, so these are plain sums and lists under one
lock, which is taken once an iteration; they become Prometheus' metrics when somebody asks.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conflux_jax.config import SchedulerConfig
from conflux_jax.plan import IterationPlan
from conflux_jax.request import FinishReason, Request
from conflux_jax.scheduler.latency_model import Parts

TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_BOUNDS_S = (
    0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LONG_BOUNDS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
    2.0, 5.0, 10.0,
)  # fmt: skip
RATIO_BOUNDS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0)
TOKEN_BOUNDS = tuple(float(2**power) for power in range(18))
KINDS = ("decode", "mixed", "prefill", "handoff")  # what an iteration has rows of; the last: none
PHASES = ("decode", "prefill", "padding")  # what a row is used for
TARGETS = ("ttft", "tbt", "all")
# What an iteration's time goes to, by the latency model.
PARTS = ("linear", "head", "prefill_attention", "all_to_all", "decode_attention", "handoff")


class Histogram:
    """Observations by size. counts[i]: those of at most bounds[i] and above the one before; the
    last: those above all bounds."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class _Progress:
    """Of a request that has left the queue. Times are on the engine's clock."""

    admitted_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    longest_gap_s: float = 0.0


class Tallies:
    """An `Observer`. clock: the engine's. modelled: `Engine.modelled`. Readers hold `lock`.

    A request is late or on time by its own targets, or the config's where it has none; only one
    that ran to its end (a stop, or its length) counts, for a client that left may not have waited.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: int,
        clock: Callable[[], float],
        modelled: Callable[[IterationPlan], Parts | None] = lambda plan: None,
    ):
        self.lock = threading.Lock()
        self._config, self._clock, self._modelled = config, clock, modelled
        self._progress: dict[str, _Progress] = {}
        # Requests:
        self.ended_by = Counter[FinishReason]()
        self.prompt_tokens = 0  # of those that have their first token
        self.generated_tokens = 0
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.gaps, self.mean_gaps = Histogram(GAP_BOUNDS_S), Histogram(GAP_BOUNDS_S)
        self.e2e, self.queue, self.prefill, self.decode, self.inference = (
            Histogram(LONG_BOUNDS_S) for _ in range(5)
        )
        self.prompt_sizes, self.output_sizes, self.output_limits = (
            Histogram(TOKEN_BOUNDS) for _ in range(3)
        )
        self.with_target, self.on_time = Counter[str](), Counter[str]()
        # Iterations:
        self.rows = [Counter[str]() for _ in range(groups)]  # by group and phase
        self.step_s = {kind: Histogram(STEP_BOUNDS_S) for kind in KINDS}
        self.iteration_tokens = Histogram(TOKEN_BOUNDS)
        self.ratio = Histogram(RATIO_BOUNDS)  # measured over predicted seconds
        self.predicted_s, self.measured_s = 0.0, 0.0  # of iterations that had a prediction
        self.modelled_s, self.model_error_s = 0.0, 0.0  # without the margin; and how far it was off
        self.part_s = dict.fromkeys(PARTS, 0.0)
        self.level, self.room = 0, 0  # of the last iteration; prefill tokens that all had room for

    # What the engine tells.

    def launched(self, plan: IterationPlan) -> None:
        if not plan.admissions:
            return
        now = self._clock()
        with self.lock:
            for admission in plan.admissions:
                request = admission.request
                if request.request_id in self._progress:
                    continue  # preempted, and admitted again
                self._progress[request.request_id] = _Progress(now)
                self.queue.observe(now - request.arrival_s)

    def collected(self, plan: IterationPlan, elapsed_s: float) -> None:
        decodes = [len(rows) for rows in plan.decodes]
        shares = plan.prefill_shares or (0,) * len(decodes)
        kind = _kind(any(decodes), bool(plan.chunks))
        parts = self._modelled(plan)
        with self.lock:
            for rows, decode, prefill in zip(self.rows, decodes, shares, strict=True):
                rows["decode"] += decode
                rows["prefill"] += prefill
                rows["padding"] += plan.bucket.rows - decode - prefill
            self.step_s[kind].observe(elapsed_s)
            self.iteration_tokens.observe(sum(decodes) + plan.num_prefill_tokens)
            if plan.predicted_s > 0.0:
                self.predicted_s += plan.predicted_s
                self.measured_s += elapsed_s
                self.ratio.observe(elapsed_s / plan.predicted_s)
            self.level = plan.level
            self.room += plan.prefill_room
            if parts is not None and parts.total > 0.0:
                self._divide(parts, elapsed_s)

    def delivered(
        self, requests: Sequence[Request], reasons: Sequence[FinishReason | None], now_s: float
    ) -> None:
        with self.lock:
            self.generated_tokens += len(requests)
            for request, reason in zip(requests, reasons, strict=True):
                progress = self._progress.get(request.request_id)
                if progress is None:  # of before the first call of this observer
                    continue
                self._count_token(request, progress, now_s)
                if reason is not None:
                    self._finish(request, reason, now_s)

    def ended(self, request: Request, reason: FinishReason) -> None:
        with self.lock:
            self._finish(request, reason, self._clock())

    def first_token_s(self, request_ids: Sequence[str]) -> dict[str, float]:
        """When the first tokens of these came, on the engine's clock, where they have."""
        with self.lock:
            found = [(i, self._progress.get(i)) for i in request_ids]
            return {i: p.first_s for i, p in found if p is not None and p.num_tokens}

    # Under the lock.

    def _divide(self, parts: Parts, elapsed_s: float) -> None:
        self.modelled_s += parts.total
        self.model_error_s += abs(elapsed_s - parts.total)
        seconds = (
            parts.linear,
            parts.head,
            parts.prefill - parts.communication,
            parts.communication,
            parts.decode,
            parts.handoff,
        )
        for name, part_s in zip(PARTS, seconds, strict=True):
            self.part_s[name] += part_s * elapsed_s / parts.total

    def _count_token(self, request: Request, progress: _Progress, now_s: float) -> None:
        if progress.num_tokens:
            gap_s = now_s - progress.last_s
            self.gaps.observe(gap_s)
            progress.longest_gap_s = max(progress.longest_gap_s, gap_s)
        else:
            progress.first_s = now_s
            self.ttft.observe(now_s - request.arrival_s)
            self.prefill.observe(now_s - progress.admitted_s)
            self.prompt_tokens += len(request.prompt_token_ids)
        progress.last_s = now_s
        progress.num_tokens += 1

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        progress = self._progress.pop(request.request_id, None)
        self.ended_by[reason] += 1
        self.e2e.observe(now_s - request.arrival_s)
        num_tokens = 0 if progress is None else progress.num_tokens
        self.prompt_sizes.observe(len(request.prompt_token_ids))
        self.output_sizes.observe(num_tokens)
        self.output_limits.observe(request.max_output_tokens)
        if progress is None or not num_tokens:
            return
        self.decode.observe(progress.last_s - progress.first_s)
        self.inference.observe(progress.last_s - progress.admitted_s)
        if num_tokens > 1:
            self.mean_gaps.observe((progress.last_s - progress.first_s) / (num_tokens - 1))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._judge(request, progress)

    def _judge(self, request: Request, progress: _Progress) -> None:
        params, config = request.params, self._config
        ttft_slo_s = config.ttft_slo_s if params.ttft_slo_s is None else params.ttft_slo_s
        tbt_slo_s = config.tbt_slo_s if params.tbt_slo_s is None else params.tbt_slo_s
        met: dict[str, bool] = {}
        if ttft_slo_s is not None:
            met["ttft"] = progress.first_s - request.arrival_s <= ttft_slo_s
        if tbt_slo_s is not None:
            met["tbt"] = progress.longest_gap_s <= tbt_slo_s
        if met:
            met["all"] = all(met.values())
        for target, is_met in met.items():
            self.with_target[target] += 1
            self.on_time[target] += is_met


def _kind(has_decodes: bool, has_prefill: bool) -> str:
    """One of KINDS."""
    if has_prefill:
        return "mixed" if has_decodes else "prefill"
    return "decode" if has_decodes else "handoff"
