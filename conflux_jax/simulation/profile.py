"""A latency profile as what traffic is held against: times that were measured on a real engine."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conflux_jax.config import ConfigError
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import IterationShape, LatencyModel, LatencyPredictor

READ = {  # of a profile's identity
    "model": str,
    "dtype": str,
    "device_kind": str,
    "sp": int,
    "tp": int,
    "max_model_len": int,
    "rows_ladder": list,
    "decode_rows_ladder": list,
}


@dataclass(frozen=True)
class Profile:
    """measured_groups: that the profile was taken with. rows, decode_rows: its engine's ladders."""

    model: LatencyPredictor
    measured_groups: int
    rows: tuple[int, ...]
    decode_rows: tuple[int, ...]

    def predictor(self, groups: int) -> ProfilePredictor:
        return ProfilePredictor(self, groups)


@dataclass(frozen=True)
class ProfilePredictor:
    """Satisfies LatencyPredictor for any number of groups, of which one was measured: prefill
    attention divides its work by that number; communication is taken as it was measured."""

    profile: Profile
    groups: int

    def predict_s(self, shape: IterationShape) -> float:
        """Of the bucket that the engine would run it in. More rows than its ladders have are priced
        as they are: the engine would have to be configured for them."""
        work = round(shape.prefill_work * self.profile.measured_groups / self.groups)
        bucket, profile = shape.bucket, self.profile
        ladder = profile.rows if bucket.prefill else profile.decode_rows
        bucket = Bucket(
            _rung(ladder, bucket.rows),
            bucket.decode_rows if bucket.prefill else _rung(ladder, bucket.decode_rows),
            bucket.prefill,
            bucket.handoff,
        )
        return profile.model.predict_s(shape._replace(bucket=bucket, prefill_work=work))


def load_profile(path: Path) -> tuple[Profile, dict[str, Any]]:
    """A profile that `python -m conflux_jax.calibrate` wrote, and what it belongs to: what is named
    in READ among it. Raises ConfigError that names file and field."""
    try:
        model = LatencyModel.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"latency profile {path}: {error}") from error
    identity = dict(model.identity)
    for name, kind in READ.items():
        value = identity.get(name)
        if type(value) is not kind or not value:
            raise ConfigError(
                f"latency profile {path}: identity.{name}: must be of type {kind.__name__}, not "
                f"empty, got {value!r}"
            )
    rows, decode_rows = identity["rows_ladder"], identity["decode_rows_ladder"]
    return Profile(model, model.groups, tuple(rows), tuple(decode_rows)), identity


def _rung(ladder: Sequence[int], rows: int) -> int:
    """The smallest entry that is enough, or `rows` where none is.

    >>> _rung((8, 16), 9), _rung((8, 16), 17)
    (16, 17)
    """
    at = bisect.bisect_left(ladder, rows)
    return ladder[at] if at < len(ladder) else rows
