"""Iterations that were timed, and a latency model held against them. No JAX: a simulation profiles
its hardware model the same way.

Some shapes are held out of the fit and timed twice over: they show the model's error, and beside it
what the machine's noise alone is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conflux_jax.execution.synthetic import Workload
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import LatencyModel

KINDS = ("decode only", "prefill only", "mixed")
ALL = "all"
HELD_OUT = 0.25  # of the shapes
MIN_FITTED = 2  # shapes of a bucket that stay in the fit


@dataclass(frozen=True)
class Measurement:
    """seconds: the median of a shape's repeats. again_s: that of as many others; 0 where there are
    none."""

    workload: Workload
    seconds: float
    again_s: float = 0.0


@dataclass(frozen=True)
class Errors:
    """Relative errors without their sign; NaN where there are none."""

    count: int
    mean: float
    p95: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        if not errors:
            return cls(0, np.nan, np.nan, np.nan)
        return cls(
            len(errors), float(np.mean(errors)), float(np.quantile(errors, 0.95)), max(errors)
        )


@dataclass(frozen=True)
class Calibration:
    """A fitted model, and the measurements that it was fitted to and those that it never saw."""

    model: LatencyModel
    fitted: tuple[Measurement, ...]
    held_out: tuple[Measurement, ...]

    def errors(self, measurements: Sequence[Measurement], kind: str = ALL) -> Errors:
        """Of the predictions, for the iterations of a kind."""
        return Errors.of(
            [
                abs(self.model.predict_s(m.workload.shape) / m.seconds - 1.0)
                for m in measurements
                if kind in (ALL, m.workload.kind)
            ]
        )

    def noise(self, kind: str = ALL) -> Errors:
        """What a model that knew every held-out shape's time from one measurement would be off in
        the next: no model can be expected to do better."""
        return Errors.of(
            [
                abs(m.again_s / m.seconds - 1.0)
                for m in self.held_out
                if kind in (ALL, m.workload.kind)
            ]
        )

    def table(self) -> str:
        """Relative errors of fit, held-out shapes and the noise, by kind of iteration."""
        lines = [f"{'':<10} {'iterations':<14} {'shapes':>6} {'mean':>7} {'p95':>7} {'worst':>7}"]
        for name, errors in (
            ("fit", lambda kind: self.errors(self.fitted, kind)),
            ("held out", lambda kind: self.errors(self.held_out, kind)),
            ("noise", self.noise),
        ):
            for kind in (*KINDS, ALL):
                found = errors(kind)
                shares = [found.mean, found.p95, found.worst]
                cells = " ".join(f"{share:>7.1%}" for share in shares) if found.count else "-"
                lines.append(f"{name:<10} {kind:<14} {found.count:>6} {cells}")
        return "\n".join(lines)

    def summary(self) -> dict[str, float]:
        """Errors and noise floor; and `decode_sms`, where multiprocessors are divided."""
        held_out, decode_sms = self.errors(self.held_out), self.model.decode_sms
        return {
            **({} if decode_sms is None else {"decode_sms": decode_sms}),
            "heldout_mean_error": held_out.mean,
            "heldout_p95_error": held_out.p95,
            "noise_floor": self.noise().mean,
        }


def hold_out(workloads: Sequence[Workload], rng: random.Random) -> set[int]:
    """Indices of a random `HELD_OUT` of the workloads that leave `MIN_FITTED` in every bucket."""
    left: dict[Bucket, int] = {}
    for workload in workloads:
        left[workload.bucket] = left.get(workload.bucket, 0) + 1
    held: set[int] = set()
    for index in rng.sample(range(len(workloads)), len(workloads)):
        bucket = workloads[index].bucket
        if len(held) < round(HELD_OUT * len(workloads)) and left[bucket] > MIN_FITTED:
            held.add(index)
            left[bucket] -= 1
    return held
