"""Goodput: the highest request rate at which nearly all requests have every token on time.

A slice of a trace is replayed at one rate after another, its intervals stretched by one factor, so
that order, bursts and shared prefixes stay. A rate is sustained where SHARE of the slice's requests
are on time: first token by the deadline, every gap within the target. The search is `capacity`'s.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conflux_jax.config import ConfigError
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.models.spec import ModelSpec
from conflux_jax.simulation.capacity import (
    STEP,
    Best,
    Score,
    allowed_late,
    best_settings,
    highest_sustained,
)
from conflux_jax.simulation.hardware import Hardware, load_hardware
from conflux_jax.simulation.results import Results
from conflux_jax.simulation.roofline import ModelCosts, group_size
from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.system import SimulatedRequest, System
from conflux_jax.simulation.systems import SYSTEMS
from conflux_jax.simulation.systems.conflux import Blueprint
from conflux_jax.simulation.systems.conflux_design import assemble, design, replica_gpus
from conflux_jax.simulation.systems.search import candidates
from conflux_jax.simulation.targets import SLOWDOWN, Targets, scaled_targets
from conflux_jax.simulation.traces import TraceError, TraceRequest, read_trace
from conflux_jax.simulation.workload import at_rate, simulated, slice_minutes, spread

SHARE = 0.95  # of the requests, on time
ORDERS = ("fcfs", "own")  # own: by deadline in our system, shortest prefill first in the others
PROBE_SHARE = 0.4  # of the first slice, its beginning, on which settings are compared
FIRST_GUESS = 0.5  # of the rate that the linear layers' products alone would allow
NEAR_STEP = 1.12  # from a rate that was sustained on part of the slice, or on another
# Of our system: its defaults; without the bound on how often a prompt may be overtaken, which the
# others do not have either; room for the decodes of many short requests; and engines of fewer GPUs
# side by side, as the others are tried too.
OUR_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_bypass": 1_000_000},
    {"max_bypass": 1_000_000, "max_num_seqs": 2048},
)
FEWEST_GROUPS = (2, 1)  # of each of those
QUANTILES = tuple(float(percent) for percent in range(101))

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One system under one traffic. ttft_s: deadline of any prompt; None: the rule of `targets`.
    minutes: of trace in a slice; slice 0 is the first, and so on."""

    trace: str
    system: str
    model: str = "qwen3-14b"
    hardware: str = "h100"
    gpus: int = 4
    order: str = "own"
    tbt_ms: float = 100.0
    ttft_s: float | None = None
    minutes: float = 10.0

    def __post_init__(self):
        if self.order not in ORDERS:
            raise ConfigError(f"order: must be one of {', '.join(ORDERS)}, got {self.order!r}")
        for name, known in (("system", SYSTEMS), ("model", KNOWN_SPECS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name}: must be one of {', '.join(known)}, got {value!r}")

    @property
    def ordering(self) -> str | None:
        """As the system's builder takes it."""
        if self.order == "fcfs":
            return "fcfs"
        return None if self.system == "conflux" else "srpf"

    def record(self) -> dict[str, Any]:
        """JSON values that tell it from all others. Of the trace's path only the file's name."""
        return dataclasses.asdict(self) | {"trace": Path(self.trace).name}


class Tuned(NamedTuple):
    """settings: of the system, the best of those that were tried. rate: from which to search.
    sustained: whether they sustain it on what they were tried on."""

    settings: dict[str, Any]
    rate: float
    sustained: bool


class Point(NamedTuple):
    """attainment: share of requests on time; None where the run was given up, as that was certain
    to be too low."""

    rate: float
    sustained: bool
    attainment: float | None


@dataclass(frozen=True)
class Found:
    """Of one slice. rate: the highest sustained, 0 if none; failed: the lowest above it that was
    not. Times are of the run at `rate`: at every percent from 0 to 100, interpolated."""

    rate: float
    failed: float
    points: list[Point]
    ttft_s: list[float]
    tbt_s: list[float]
    summary: dict[str, float]


def tune(case: Case) -> Tuned:
    """A system's best settings, and where to search. They are compared on the first PROBE_SHARE
    of the first slice: see `capacity.best_settings`."""
    spec, hardware = KNOWN_SPECS[case.model], _hardware(case.hardware)
    if case.system == "conflux":
        choices = our_settings(spec, hardware, case.gpus)
    else:
        choices = candidates(case.system, spec, hardware, case.gpus)
    if not choices:
        raise ConfigError(f"gpus: {case.system} cannot run {spec.name} on {case.gpus}")
    probe = dataclasses.replace(case, minutes=PROBE_SHARE * case.minutes)

    def score(settings: Settings, rate: float) -> Score:
        results = run(probe, 0, settings, rate)
        span_s = results.requests[-1].arrival_s or 1.0
        reached = min(1.0, results.end_s / span_s) + results.attainment
        return Score(sustained(results), reached)

    best: Best[Settings] = best_settings(choices, score, first_guess(probe))
    return Tuned(dict(best.settings), best.rate, best.sustained)


def our_settings(spec: ModelSpec, hardware: Hardware, gpus: int) -> list[dict[str, Any]]:
    """What is worth trying for ours."""
    groups = gpus // group_size(ModelCosts.of(spec), hardware)
    replicas = [groups // few for few in FEWEST_GROUPS if groups > few and groups % few == 0]
    return [*OUR_SETTINGS, *({"max_bypass": 1_000_000, "replicas": count} for count in replicas)]


def measure(case: Case, seed: int, tuned: Tuned) -> Found:
    """Goodput on slice `seed`, which is the seed of the noise too."""
    points: list[Point] = []
    kept: dict[float, Results] = {}

    def sustains(rate: float) -> bool:
        results = run(case, seed, tuned.settings, rate)
        holds = sustained(results)
        points.append(Point(rate, holds, results.attainment if results.complete else None))
        if holds:
            kept.clear()  # a rate is only tried after lower ones were sustained
            kept[rate] = results
        return holds

    step = NEAR_STEP if tuned.sustained else STEP
    rate, failed = highest_sustained(sustains, tuned.rate, step)
    results = kept.get(rate)
    if results is None:
        return Found(rate, failed, sorted(points), [], [], {})
    gaps_s = np.frombuffer(results.gaps_s, np.float64) if results.gaps_s else np.zeros(0)
    return Found(
        rate,
        failed,
        sorted(points),
        quantiles(results.ttft_s),
        quantiles(gaps_s),
        results.summary(),
    )


def curve(case: Case, seed: int, settings: Settings, rates: Sequence[float]) -> list[Point]:
    """Attainment at each of the rates, none of them given up."""
    points = []
    for rate in rates:
        results = run(case, seed, settings, rate, whole=True)
        points.append(Point(rate, sustained(results), results.attainment))
    return points


def run(case: Case, seed: int, settings: Settings, rate: float, whole: bool = False) -> Results:
    """The slice at that rate. Unless the whole of it is asked for, given up once more requests are
    certainly late than may be of all of the slice, so that the verdict is that of a whole run."""
    requests = requests_at(case, seed, rate)
    most_late = None if whole else allowed_late(len(requests), SHARE)
    return simulate(build(case, settings, seed), requests, most_late=most_late)


def sustained(results: Results) -> bool:
    late = len(results.requests) - int(np.count_nonzero(results.on_time))
    return results.complete and late <= allowed_late(len(results.requests), SHARE)


def requests_at(case: Case, seed: int, rate: float) -> list[SimulatedRequest]:
    """Slice `seed` of the trace. Raises TraceError that names the file: where it cannot be read, is
    over before the slice, or has no rate in it."""
    try:
        taken = at_rate(traced(case.trace, seed, case.minutes), rate)
    except TraceError as error:
        named = str(error).startswith(f"{case.trace}:")
        raise error if named else TraceError(f"{case.trace}: {error}") from error
    return simulated(taken, targets(case))


@lru_cache(maxsize=16)
def traced(trace: str, seed: int, minutes: float) -> list[TraceRequest]:
    taken = slice_minutes(read_trace(trace), seed * minutes, (seed + 1) * minutes)
    return spread(taken, seed)


def targets(case: Case) -> Targets:
    if case.ttft_s is not None:
        return Targets(case.tbt_ms / 1000, floor_s=case.ttft_s)
    spec, hardware = KNOWN_SPECS[case.model], _hardware(case.hardware)
    return scaled_targets(spec, hardware, case.gpus, case.tbt_ms / 1000)


def first_guess(case: Case) -> float:
    """Requests a second, from the linear layers' speed and the slice's tokens."""
    spec, hardware = KNOWN_SPECS[case.model], _hardware(case.hardware)
    tokens_s = scaled_targets(spec, hardware, case.gpus, case.tbt_ms / 1000).tokens_s
    assert tokens_s is not None
    requests = requests_at(case, 0, rate=1.0)
    tokens = sum(request.prompt_tokens + request.output_tokens for request in requests)
    return FIRST_GUESS * SLOWDOWN * tokens_s / (tokens / len(requests))


def build(case: Case, settings: Settings, seed: int) -> System:
    """Raises ConfigError or ModelError that names what cannot work."""
    if case.system == "conflux":
        gpus, engine = replica_gpus(case.gpus, settings), dict(settings)
        replicas = engine.pop("replicas", 1)
        named = json.dumps(engine, sort_keys=True)
        blueprint = _blueprint(case.model, case.hardware, gpus, named)
        return assemble(blueprint, replicas, case.ordering, seed=seed)
    return SYSTEMS[case.system](
        KNOWN_SPECS[case.model],
        _hardware(case.hardware),
        case.gpus,
        {**settings, "seed": seed},
        case.ordering,
    )


@lru_cache(maxsize=8)
def _blueprint(model: str, hardware: str, gpus: int, settings: str) -> Blueprint:
    """One profile serves for all runs, as it does in a real engine. settings: JSON."""
    return design(KNOWN_SPECS[model], _hardware(hardware), gpus, json.loads(settings))


@lru_cache(maxsize=8)
def _hardware(name: str) -> Hardware:
    return load_hardware(name)


def quantiles(times_s: np.ndarray) -> list[float]:
    """At QUANTILES, to the microsecond; empty where there are no times."""
    known = times_s[~np.isnan(times_s)]
    return np.percentile(known, QUANTILES).round(6).tolist() if len(known) else []
