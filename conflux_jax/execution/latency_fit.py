"""A LatencyModel from measured iterations.

Least squares of relative errors, so that short iterations count as much as long ones, with weights
that keep a few disturbed measurements from pulling. Every curve is a sum of ramps from knot to
knot with coefficients of at least 0: monotone by construction, and the problem is linear but for
the two interference factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import least_squares, nnls

from conflux_jax.scheduler.latency_model import (
    Curve,
    Identity,
    IterationShape,
    LatencyModel,
    num_samples,
    padded_context,
    prefill_span,
    read_share,
    work_share,
)

OUTLIER = 0.05  # relative error from which a measurement loses weight
REWEIGHTINGS = 8
STARTS = ((1.0, 1.0), (0.5, 0.5), (0.0, 0.0))  # k_d, k_p; the first of equally good ones wins
NEGLIGIBLE = 1e-9  # seconds at a term's largest, and of the factors
BETTER = 0.99  # the cost that a later start must reach, of the best so far
LANES = (1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 13.0, 18.0, 26.0, 36.0, 52.0, 72.0, 104.0, 144.0)
FINER = (0.78, 0.85, 0.92, 1.08, 1.17, 1.27)  # of the best of those

_Matrix = Float[np.ndarray, "shapes terms"]
_Column = Float[np.ndarray, " shapes"]


def fit_latency(
    shapes: Sequence[IterationShape],
    seconds: Sequence[float],
    identity: Identity,
    groups: int,
    segments: int,
    serial: bool = False,
) -> LatencyModel:
    """The model that fits `seconds` of `shapes` best. groups and segments: as in LatencyModel.
    serial: the paths are known to run one after the other, and so are blocks of queries: both
    factors and the lanes are 1, and noise cannot be taken for an overlap.

    Raises ValueError when there is nothing to fit, or a time is not positive."""
    measured = np.array(seconds, np.float64)
    if not len(shapes) or len(shapes) != len(seconds):
        raise ValueError(f"shapes: {len(shapes)} of them, with {len(seconds)} times")
    if not (measured > 0).all():
        raise ValueError(f"seconds: must be positive, got {measured.min()}")
    terms = _Terms.of(shapes, groups, segments, 1.0)
    if not serial:
        terms = _best_lanes(shapes, measured, terms)
    best = _polished(terms, _start(terms, measured, *STARTS[0]), measured, serial)
    for k_d, k_p in () if serial else STARTS[1:]:
        found = _polished(terms, _start(terms, measured, k_d, k_p), measured, serial)
        if found.cost < BETTER * best.cost:
            best = found
    return terms.model(best.theta, identity)


@dataclass(frozen=True)
class _Fit:
    """theta: the terms' coefficients, then k_d and k_p."""

    theta: np.ndarray
    cost: float


@dataclass(frozen=True)
class _Terms:
    """What each coefficient counts, by shape: of the fixed part and of both paths. Every column's
    largest entry is 1, by `scales`, so that coefficients are seconds and compare (0 where no shape
    has any of it)."""

    fixed: Float[np.ndarray, "shapes fixed_terms"]
    prefill: Float[np.ndarray, "shapes prefill_terms"]
    decode: Float[np.ndarray, "shapes decode_terms"]
    scales: np.ndarray
    sizes: dict[str, tuple[int, ...]]
    groups: int
    segments: int
    lanes: float

    @classmethod
    def of(
        cls, shapes: Sequence[IterationShape], groups: int, segments: int, lanes: float
    ) -> _Terms:
        buckets = [shape.bucket for shape in shapes]
        samples = [num_samples(bucket, segments) for bucket in buckets]
        has_prefill = np.array([bucket.prefill for bucket in buckets])
        has_decode = np.array([bucket.decode_rows > 0 for bucket in buckets])
        rows = [bucket.rows for bucket in buckets]
        decode_rows = [bucket.decode_rows for bucket in buckets]
        sizes = {
            "linear": _knots(rows),
            "head": _knots(samples),
            "communication": _ends(_knots([b.rows for b in buckets if b.prefill])),
            "decode_rows": _ends(_knots([n for n in decode_rows if n])),
        }
        # What a constant would say of the head, the linear part's says already.
        fixed = [_ramps(rows, sizes["linear"]), _ramps(samples, sizes["head"])[:, 1:]]
        fixed.append(np.array([[float(bucket.handoff)] for bucket in buckets]))
        work = [
            (
                prefill_span(shape, lanes) * work_share(shape.bucket, groups),
                shape.prefill_work * read_share(groups),
            )
            for shape in shapes
        ]
        chunks = [(shape.num_chunks, shape.prefill_tokens) for shape in shapes]
        prefill = [_ramps(rows, sizes["communication"]), np.array(work), np.array(chunks)]
        contexts = [
            (shape.context_tokens, shape.all_context_tokens, padded_context(shape))
            for shape in shapes
        ]
        decode = [_ramps(decode_rows, sizes["decode_rows"]), np.array(contexts)]
        parts = [
            np.concatenate(fixed, axis=1),
            np.concatenate(prefill, axis=1) * has_prefill[:, None],
            np.concatenate(decode, axis=1) * has_decode[:, None],
        ]
        scales = np.concatenate([part.max(axis=0) for part in parts])
        scales[scales == 0] = np.inf  # never seen: whatever its coefficient, it costs nothing
        cuts = np.cumsum([part.shape[1] for part in parts])[:2]
        of_fixed, of_prefill, of_decode = np.split(scales, cuts)
        scaled = parts[0] / of_fixed, parts[1] / of_prefill, parts[2] / of_decode
        return cls(scaled[0], scaled[1], scaled[2], scales, sizes, groups, segments, lanes)

    def split(self, theta: np.ndarray) -> list[np.ndarray]:
        """Coefficients of the fixed part, of prefill, of decode."""
        cut = self.fixed.shape[1]
        return np.split(theta, (cut, cut + self.prefill.shape[1]))

    def paths(self, theta: np.ndarray) -> tuple[_Column, _Column, _Column]:
        """Seconds of the fixed part, of prefill alone, of decode alone, by shape."""
        fixed, prefill, decode = self.split(theta)
        return self.fixed @ fixed, self.prefill @ prefill, self.decode @ decode

    def matrix(self, slower: Bool[np.ndarray, " shapes"], k_d: float, k_p: float) -> _Matrix:
        """Predicted seconds by coefficient, given where prefill's path is the slower one."""
        prefill = np.where(slower[:, None], self.prefill, k_p * self.prefill)
        decode = np.where(slower[:, None], k_d * self.decode, self.decode)
        return np.concatenate([self.fixed, prefill, decode], axis=1)

    def model(self, theta: np.ndarray, identity: Identity) -> LatencyModel:
        *coefficients, k_d, k_p = theta.tolist()
        values = iter((np.array(coefficients) / self.scales).tolist())

        def curve(name: str, first: float | None = None) -> Curve:
            sizes = self.sizes[name] or (1,)  # there was none: costs nothing
            count = len(self.sizes[name]) - (first is not None)
            steps = [next(values) for _ in range(count)] if self.sizes[name] else [0.0]
            steps = steps if first is None else [first, *steps]
            return Curve(sizes, tuple(np.cumsum(steps).tolist()))

        return LatencyModel(
            identity=identity,
            groups=self.groups,
            segments=self.segments,
            lanes=self.lanes,
            linear=curve("linear"),
            head=curve("head", 0.0),
            handoff_s=next(values),
            communication=curve("communication"),
            work_s=next(values),
            read_s=next(values),
            chunk_s=next(values),
            token_s=next(values),
            decode_rows=curve("decode_rows"),
            context_s=next(values),
            all_context_s=next(values),
            padded_context_s=next(values),
            k_d=k_d,
            k_p=k_p,
        )


def _best_lanes(shapes: Sequence[IterationShape], measured: _Column, serial: _Terms) -> _Terms:
    """The terms with which a start fits best: a coarse search, then a finer one; `serial`, which
    have one lane, unless others are clearly better."""

    def cost(terms: _Terms) -> float:
        *coefficients, k_d, k_p = _start(terms, measured, *STARTS[1])
        fixed, prefill, decode = terms.paths(np.array(coefficients))
        stage = np.maximum(prefill + k_d * decode, decode + k_p * prefill)
        error = np.abs((fixed + stage) / measured - 1.0)
        return float(np.minimum(error**2, OUTLIER * (2 * error - OUTLIER)).sum())

    best, least = serial, BETTER * cost(serial)
    for grid in (LANES[1:], FINER):
        base = 1.0 if grid is not FINER else best.lanes
        for factor in grid:
            terms = _Terms.of(shapes, serial.groups, serial.segments, max(1.0, factor * base))
            if (found := cost(terms)) < least:
                best, least = terms, found
    return best


def _start(terms: _Terms, measured: _Column, k_d: float, k_p: float) -> np.ndarray:
    """Coefficients for fixed factors: which path is the slower one is taken from the coefficients
    before, and measurements that are far off get less weight (Huber's)."""
    slower = np.full(len(measured), True)
    weights = np.ones(len(measured))
    coefficients = np.zeros(0)
    for _ in range(REWEIGHTINGS):
        by = weights / measured
        matrix = terms.matrix(slower, k_d, k_p)
        coefficients, _ = nnls(matrix * by[:, None], measured * by)
        _, prefill, decode = terms.paths(coefficients)
        slower = prefill + k_d * decode >= decode + k_p * prefill
        error = np.abs(terms.matrix(slower, k_d, k_p) @ coefficients / measured - 1.0)
        weights = np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(error, 1e-12)))
    return np.array([*coefficients, k_d, k_p])


def _polished(terms: _Terms, start: np.ndarray, measured: _Column, serial: bool) -> _Fit:
    """All coefficients and, unless `serial`, both factors together, from `start`."""

    def factors(theta: np.ndarray) -> np.ndarray:
        return np.ones(2) if serial else theta[-2:]

    def errors(theta: np.ndarray) -> np.ndarray:
        fixed, prefill, decode = terms.paths(theta[:-2])
        k_d, k_p = factors(theta)
        stage = np.maximum(prefill + k_d * decode, decode + k_p * prefill)
        return (fixed + stage) / measured - 1.0

    def jacobian(theta: np.ndarray) -> np.ndarray:
        _, prefill, decode = terms.paths(theta[:-2])
        k_d, k_p = factors(theta)
        slower = prefill + k_d * decode >= decode + k_p * prefill
        by_k_d = np.where(slower & (not serial), decode, 0.0)
        by_k_p = np.where(slower | serial, 0.0, prefill)
        columns = [terms.matrix(slower, k_d, k_p), by_k_d[:, None], by_k_p[:, None]]
        return np.concatenate(columns, axis=1) / measured[:, None]

    high = np.array([*[np.inf] * (len(start) - 2), 1.0, 1.0])
    solve: Any = least_squares  # its annotations know no Jacobian that is a function
    found = solve(
        errors, start, jacobian, bounds=(0.0, high), loss="huber", f_scale=OUTLIER, x_scale="jac"
    )
    theta = np.clip(found.x, 0.0, high)
    theta[theta < NEGLIGIBLE] = 0.0  # the solver keeps off its bounds, however useless a term is
    theta[-2:] = factors(theta)
    return _Fit(theta, float(found.cost))


def _knots(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


def _ends(knots: tuple[int, ...]) -> tuple[int, ...]:
    """The first and the last: a straight line."""
    return knots if len(knots) < 3 else (knots[0], knots[-1])


def _ramps(sizes: Sequence[int], knots: tuple[int, ...]) -> _Matrix:
    """A column of ones, then for each two neighbouring knots one that rises from 0 to 1 between
    them: the sum of the first `n` coefficients is what the curve has at knot `n`."""
    x = np.array(sizes, np.float64)
    columns = [np.ones(len(x))] if knots else []
    for low, high in itertools.pairwise(knots):
        columns.append(np.clip((x - low) / (high - low), 0.0, 1.0))
    return np.stack(columns, axis=1) if columns else np.zeros((len(x), 0))
