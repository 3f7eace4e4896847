"""What came out of a simulation: what every request saw, and what that says of the system."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from conflux_jax.simulation.system import SimulatedRequest, Statistics

PERCENTS = (50, 95, 99)


@dataclass(frozen=True, eq=False)
class Results:
    """first_s, last_s: on the simulation's clock, when a request's first and last token came; NaN
    where it did not. worst_gap_s: its longest time between two tokens, 0 where it has one only.
    gaps_s: all such times of all requests. refused: why, by number. end_s: of the last token.
    complete: whether all requests were run to their ends."""

    requests: Sequence[SimulatedRequest]
    first_s: Float[np.ndarray, " requests"]
    last_s: Float[np.ndarray, " requests"]
    worst_gap_s: Float[np.ndarray, " requests"]
    gaps_s: array[float]
    refused: Mapping[int, str]
    end_s: float
    complete: bool = True
    statistics: Statistics | None = None

    @property
    def ttft_s(self) -> Float[np.ndarray, " requests"]:
        """From arrival to the first token; NaN without one."""
        return self.first_s - np.array([request.arrival_s for request in self.requests])

    @property
    def on_time(self) -> Bool[np.ndarray, " requests"]:
        """Whether the first token came by its deadline, every gap was within its target, and the
        request ended. One that was refused is not on time."""
        deadlines_s = np.array([request.deadline_s for request in self.requests])
        tbt_slos_s = np.array([request.tbt_slo_s for request in self.requests])
        in_time = (self.first_s <= deadlines_s) & (self.worst_gap_s <= tbt_slos_s)
        return in_time & ~np.isnan(self.last_s)

    @property
    def attainment(self) -> float:
        """Share of requests on time; 1 where there are none."""
        return float(self.on_time.mean()) if len(self.requests) else 1.0

    def summary(self) -> dict[str, float]:
        """Flat, by name; what has no number is left out. Percentiles are interpolated."""
        requests, statistics = self.requests, self.statistics
        values: dict[str, float] = {
            "requests": len(requests),
            "refused": len(self.refused),
            "complete": int(self.complete),
            "duration_s": self.end_s,
            "attainment": self.attainment,
            "output_tokens": len(self.gaps_s) + int(np.count_nonzero(~np.isnan(self.first_s))),
        }
        if len(requests) > 1 and requests[-1].arrival_s > requests[0].arrival_s:
            span_s = requests[-1].arrival_s - requests[0].arrival_s
            values["rate_per_s"] = (len(requests) - 1) / span_s
        for name, times_s in (
            ("ttft", self.ttft_s),
            ("tbt", np.frombuffer(self.gaps_s, np.float64) if self.gaps_s else np.zeros(0)),
            ("latency", self.last_s - self.first_s + self.ttft_s),
        ):
            known = times_s[~np.isnan(times_s)]
            if len(known):
                for percent, value in zip(PERCENTS, np.percentile(known, PERCENTS), strict=True):
                    values[f"{name}_p{percent}_s"] = float(value)
        if statistics is not None:
            values |= {
                "iterations": statistics.iterations,
                "kv_peak": statistics.kv_peak,
                "preemptions": statistics.preemptions,
            }
            if self.end_s > 0:
                values["utilisation"] = statistics.busy_s / self.end_s
        return values

    def write_requests(self, path: Path) -> None:
        """One JSON object a line: what was asked, what was seen. Times that never came are null."""
        on_time, ttft_s = self.on_time, self.ttft_s
        with path.open("w", encoding="utf-8") as file:
            for request in self.requests:
                at = request.number
                record = {
                    "number": at,
                    "arrival_s": request.arrival_s,
                    "prompt_tokens": request.prompt_tokens,
                    "output_tokens": request.output_tokens,
                    "ttft_slo_s": _finite(request.deadline_s - request.arrival_s),
                    "tbt_slo_s": _finite(request.tbt_slo_s),
                    "ttft_s": _finite(ttft_s[at]),
                    "last_token_s": _finite(self.last_s[at]),
                    "worst_gap_s": float(self.worst_gap_s[at]),
                    "on_time": bool(on_time[at]),
                    "refused": self.refused.get(at),
                }
                file.write(json.dumps(record) + "\n")


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
