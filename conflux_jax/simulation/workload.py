"""From a trace to the requests of a simulation: a slice of it, at a rate, with targets."""

from __future__ import annotations

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
