"""From a trace to the requests of a simulation: a slice of it, at a rate, with targets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from conflux_jax.simulation.system import SimulatedRequest
from conflux_jax.simulation.targets import Targets
from conflux_jax.simulation.traces import TraceError, TraceRequest

MINUTE_S = 60.0


def slice_minutes(
    requests: Iterable[TraceRequest], first: float, last: float
) -> list[TraceRequest]:
    """Those that arrive in minutes `first` to `last` of the trace, times from the slice's start.
    Reads no further. Raises TraceError where there are none."""
    start_s, end_s = first * MINUTE_S, last * MINUTE_S
    taken = []
    for request in requests:
        if request.arrival_s >= end_s:
            break
        if request.arrival_s >= start_s:
            taken.append(replace(request, arrival_s=request.arrival_s - start_s))
    if not taken:
        raise TraceError(f"no requests arrive in minutes {first:g} to {last:g} of the trace")
    return taken


def rate_of(requests: Sequence[TraceRequest]) -> float:
    """Requests a second: intervals over the time that they took. Raises TraceError where all came
    at once, and so at no rate.

    Worked: four requests within 2 s are three intervals: 1.5.
    """
    duration_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if duration_s <= 0.0:
        raise TraceError("all requests come at once, so their rate cannot be scaled")
    return (len(requests) - 1) / duration_s


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests in the same order with the same shared prefixes, `rate` a second: every
    time is stretched by one factor, so that bursts stay bursts. Raises TraceError as `rate_of`."""
    factor = rate_of(requests) / rate
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]


def spread(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """The same requests in the same order, those of one time spread up to the next time; the last
    of all as far as the ones before them.

    Mooncake's public traces have a clock of 3 s: 20 requests are said to come at once that came
    within 3 s. Taken at their word they are bursts that stay at any rate. Where they lie in
    between is drawn evenly, as for arrivals that know nothing of each other.
    """
    draw, times_s = random.Random(seed), sorted({request.arrival_s for request in requests})
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    until_s = dict(zip(times_s, gaps_s + gaps_s[-1:] or [0.0], strict=True))
    found = list[TraceRequest]()
    for time_s, group in itertools.groupby(requests, lambda request: request.arrival_s):
        first, *others = group
        later = sorted(draw.uniform(0.0, until_s[time_s]) for _ in others)
        found.append(first)
        found += [
            replace(request, arrival_s=time_s + after_s)
            for request, after_s in zip(others, later, strict=True)
        ]
    return found


def simulated(requests: Iterable[TraceRequest], targets: Targets) -> list[SimulatedRequest]:
    """Numbered, with deadlines."""
    return [
        SimulatedRequest(
            number=number,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            deadline_s=request.arrival_s + targets.ttft_slo_s(request.prompt_tokens),
            tbt_slo_s=targets.tbt_slo_s,
            prefix_hashes=request.prefix_hashes,
        )
        for number, request in enumerate(requests)
    ]
