"""The engine's metrics in Prometheus' form: vLLM's names for what vLLM has too, and our own.

`FAMILIES` is the one list of them; docs/operations.md has it as a table, by a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from conflux_jax.config import Config, ConfigError
from conflux_jax.engine import Engine
from conflux_jax.inbox import Unavailable
from conflux_jax.request import FinishReason
from conflux_jax.scheduler.outlook import Load
from conflux_jax.serve.tallies import KINDS, PARTS, PHASES, TARGETS, Histogram, Tallies

OWN_PREFIX = "conflux:"
LOAD_TIMEOUT_S = 2.0  # an engine in a longer step is described as it was when it last answered
_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

Value = float | Histogram
Values = Iterable[tuple[tuple[str, ...], Value]]  # labels, and what is there


@dataclass(frozen=True)
class View:
    """What a scrape shows: as of one moment between two iterations, where the engine answers."""

    engine: Engine
    tallies: Tallies
    load: Load | None

    @property
    def num_waiting(self) -> int:
        return 0 if self.load is None else self.load.num_waiting

    def by_group(self, values: Callable[[Load], Iterable[float]]) -> Values:
        numbers = () if self.load is None else values(self.load)
        return [((str(group),), float(number)) for group, number in enumerate(numbers)]

    def kv_use(self, load: Load) -> list[float]:
        num_pages = max(self.engine.info.num_pages, 1)
        return [1.0 - free / num_pages for free in load.free_pages]

    def by_kind(self, values: Callable[[Load], tuple[float, float]]) -> Values:
        if self.load is None:
            return []
        decode, prefill = values(self.load)
        return [(("decode",), decode), (("prefill",), prefill)]

    def group_rows(self) -> Values:
        for group, rows in enumerate(self.tallies.rows):
            for phase in PHASES:
                yield (str(group), phase), float(rows[phase])


@dataclass(frozen=True)
class Family:
    """One metric. own: ours, and so not under the prefix of those that vLLM has too."""

    name: str
    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    help: str
    values: Callable[[View], Values]
    labels: tuple[str, ...] = ()
    own: bool = False

    @property
    def type_name(self) -> str:
        return self.kind.__name__.removesuffix("MetricFamily").lower()

    def full_name(self, prefix: str) -> str:
        return (OWN_PREFIX if self.own else prefix) + self.name


def _one(value: Callable[[View], Value]) -> Callable[[View], Values]:
    return lambda view: [((), value(view))]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_COUNTER, _GAUGE, _HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
FAMILIES = (
    Family("num_requests_running", _GAUGE, "Requests accepted that do not wait in the queue",
           _one(lambda v: max(0, v.engine.num_live - v.num_waiting))),
    Family("num_requests_waiting", _GAUGE, "Requests in the queue", _one(lambda v: v.num_waiting)),
    Family("kv_cache_usage_perc", _GAUGE, "Share of all KV pages in use; 1 means all",
           _one(lambda v: 0.0 if v.load is None else _mean(v.kv_use(v.load)))),
    Family("num_preemptions_total", _COUNTER, "Requests that gave up their KV pages for others",
           _one(lambda v: 0 if v.load is None else v.load.num_preemptions)),
    Family("prompt_tokens_total", _COUNTER, "Tokens of prompts that have their first token",
           _one(lambda v: v.tallies.prompt_tokens)),
    Family("generation_tokens_total", _COUNTER, "Tokens generated",
           _one(lambda v: v.tallies.generated_tokens)),
    Family("request_success_total", _COUNTER, "Requests that are over, by finish reason",
           lambda v: [((str(reason),), v.tallies.ended_by[reason]) for reason in FinishReason],
           labels=("finished_reason",)),
    Family("time_to_first_token_seconds", _HISTOGRAM, "From a request's arrival",
           _one(lambda v: v.tallies.ttft)),
    Family("inter_token_latency_seconds", _HISTOGRAM, "Between two tokens of a request",
           _one(lambda v: v.tallies.gaps)),
    Family("e2e_request_latency_seconds", _HISTOGRAM, "From a request's arrival to its end",
           _one(lambda v: v.tallies.e2e)),
    Family("request_queue_time_seconds", _HISTOGRAM, "From arrival to the first chunk",
           _one(lambda v: v.tallies.queue)),
    Family("request_prefill_time_seconds", _HISTOGRAM, "From the first chunk to the first token",
           _one(lambda v: v.tallies.prefill)),
    Family("request_decode_time_seconds", _HISTOGRAM, "From the first token to the last",
           _one(lambda v: v.tallies.decode)),
    Family("request_inference_time_seconds", _HISTOGRAM, "From the first chunk to the last token",
           _one(lambda v: v.tallies.inference)),
    Family("request_time_per_output_token_seconds", _HISTOGRAM, "Mean time between a request's "
           "tokens", _one(lambda v: v.tallies.mean_gaps)),
    Family("request_params_max_tokens", _HISTOGRAM, "Tokens that requests could have generated",
           _one(lambda v: v.tallies.output_limits)),
    Family("request_prompt_tokens", _HISTOGRAM, "Prompt tokens of requests that are over",
           _one(lambda v: v.tallies.prompt_sizes)),
    Family("request_generation_tokens", _HISTOGRAM, "Generated tokens of requests that are over",
           _one(lambda v: v.tallies.output_sizes)),
    Family("iteration_tokens_total", _HISTOGRAM, "Tokens of an iteration, decodes and prefill",
           _one(lambda v: v.tallies.iteration_tokens)),
    Family("healthy", _GAUGE, "1 unless the engine has failed or hangs",
           _one(lambda v: float(v.engine.healthy)), own=True),
    Family("accepting", _GAUGE, "1 while new requests are taken",
           _one(lambda v: float(v.engine.healthy and not v.engine.state_message)), own=True),
    Family("prefill_tokens_waiting", _GAUGE, "Prompt tokens accepted and not prefilled yet",
           _one(lambda v: 0 if v.load is None else v.load.prefill_tokens), own=True),
    Family("group_decodes", _GAUGE, "Requests whose decode group it is",
           lambda v: v.by_group(lambda load: load.num_decodes), ("group",), own=True),
    Family("group_context_tokens", _GAUGE, "KV tokens of those",
           lambda v: v.by_group(lambda load: load.context_tokens), ("group",), own=True),
    Family("group_kv_cache_usage_perc", _GAUGE, "Share of the group's KV pages in use",
           lambda v: v.by_group(v.kv_use), ("group",), own=True),
    Family("group_rows_total", _COUNTER, "Rows of iterations: decode, prefill or padding",
           lambda v: v.group_rows(), ("group", "phase"), own=True),
    Family("iteration_seconds", _HISTOGRAM, "Measured, by what the iteration has: decode rows, "
           "prefill rows, both (mixed) or none (handoff)",
           lambda v: [((kind,), v.tallies.step_s[kind]) for kind in KINDS], ("kind",), own=True),
    Family("iteration_measured_over_predicted", _HISTOGRAM, "Measured over predicted seconds of "
           "iterations that the latency model predicted (with its margin)",
           _one(lambda v: v.tallies.ratio), own=True),
    Family("iteration_predicted_seconds_total", _COUNTER, "Predicted, of those iterations",
           _one(lambda v: v.tallies.predicted_s), own=True),
    Family("iteration_measured_seconds_total", _COUNTER, "Measured, of the same iterations",
           _one(lambda v: v.tallies.measured_s), own=True),
    Family("latency_model_correction", _GAUGE, "Mean of measured over modelled seconds, of "
           "iterations without (decode) and with prefill",
           lambda v: v.by_kind(lambda load: load.latency_corrections), ("kind",), own=True),
    Family("latency_model_spread", _GAUGE, "Standard deviation of the logarithm of measured over "
           "corrected seconds, of the same iterations",
           lambda v: v.by_kind(lambda load: load.latency_spreads), ("kind",), own=True),
    Family("latency_model_seconds_total", _COUNTER, "What the latency model expected of iterations,"
           " corrected, without the margin", _one(lambda v: v.tallies.modelled_s), own=True),
    Family("latency_model_error_seconds_total", _COUNTER, "How far the same iterations were from "
           "it, too long or too short", _one(lambda v: v.tallies.model_error_s), own=True),
    Family("iteration_part_seconds_total", _COUNTER, "Measured seconds, divided as the latency "
           "model divides them; attention parts may run side by side and then add up to more",
           lambda v: [((part,), v.tallies.part_s[part]) for part in PARTS], ("part",), own=True),
    Family("iteration_level_rows", _GAUGE, "C of the last iteration: rows that a group could have; "
           "0 where prefill was held back", _one(lambda v: v.tallies.level), own=True),
    Family("prefill_room_tokens_total", _COUNTER, "Prefill tokens that iterations had room for, "
           "up to C", _one(lambda v: v.tallies.room), own=True),
    Family("slo_requests_total", _COUNTER, "Requests that ran to their end and had a target: for "
           "the first token (ttft), between tokens (tbt), any (all)",
           lambda v: [((target,), v.tallies.with_target[target]) for target in TARGETS],
           ("target",), own=True),
    Family("slo_attained_total", _COUNTER, "Those of them whose every token was in time",
           lambda v: [((target,), v.tallies.on_time[target]) for target in TARGETS],
           ("target",), own=True),
    Family("engine_step_seconds_total", _COUNTER, "Wall time of iterations on the engine's thread",
           _one(lambda v: v.engine.stats()["step_s"]), own=True),
    Family("engine_host_seconds_total", _COUNTER, "The part of it that did not wait for the device",
           _one(lambda v: v.engine.stats()["host_s"]), own=True),
)  # fmt: skip


class Metrics(Collector):
    """The metrics of one engine, from now on; every sample has its `model_name`."""

    def __init__(self, config: Config, engine: Engine):
        self._engine = engine
        self._prefix = checked_prefix(config)
        self.tallies = Tallies(
            config.scheduler, engine.info.sp, lambda: engine.now_s, engine.modelled
        )
        self._load: Load | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        engine.observe(self.tallies)

    async def scrape(self) -> bytes:
        """As text, of a moment after all that was delivered before this call."""
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                self._load = await asyncio.wrap_future(self._engine.load())
        return generate_latest(self.registry)

    def describe(self) -> Iterator[Metric]:
        """Without samples: for the registry, which wants to know names only."""
        return (self._empty(family) for family in FAMILIES)

    def collect(self) -> Iterator[Metric]:
        view = View(self._engine, self.tallies, self._load)
        with self.tallies.lock:
            return iter([self._filled(family, view) for family in FAMILIES])

    def _empty(self, family: Family) -> Any:
        labels = ("model_name", *family.labels)
        return family.kind(family.full_name(self._prefix), family.help, labels=labels)

    def _filled(self, family: Family, view: View) -> Metric:
        metric = self._empty(family)
        for labels, value in family.values(view):
            labels = (self._engine.info.name, *labels)
            if isinstance(value, Histogram):
                metric.add_metric(labels, _buckets(value), value.total)
            else:
                metric.add_metric(labels, value)
        return metric


def checked_prefix(config: Config) -> str:
    """Raises ConfigError where metrics_prefix cannot begin a metric's name."""
    prefix = config.server.metrics_prefix
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"metrics_prefix: must be letters, digits, _ and :, not first a digit; got {prefix!r}"
        )
    return prefix


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), as Prometheus wants them: each with all before it."""
    bounds = (*map(repr, histogram.bounds), "+Inf")
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
