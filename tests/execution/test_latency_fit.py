"""Fitting: from times of a known model with noise to a model that predicts as that one does."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from conflux_jax.execution.latency_fit import fit_latency
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import (
    Curve,
    IterationShape,
    LatencyModel,
    iteration_shape,
    prefill_work,
)

GROUPS, SEGMENTS = 2, 4
ROWS, DECODE_ROWS, MIXED_DECODE_ROWS = (32, 128, 256), (1, 4, 16, 32), (0, 8, 32)
SERIAL = LatencyModel(
    identity={"model": "known"},
    groups=GROUPS,
    segments=SEGMENTS,
    linear=Curve((1, 32, 128, 256), (0.010, 0.012, 0.040, 0.080)),
    head=Curve((1, 36), (0.0, 0.006)),
    handoff_s=0.002,
    communication=Curve((32, 256), (0.002, 0.006)),
    work_s=2e-7,
    read_s=5e-6,
    chunk_s=2e-4,
    token_s=1e-6,
    decode_rows=Curve((1, 32), (0.001, 0.004)),
    context_s=2e-6,
    all_context_s=5e-7,
    padded_context_s=1e-6,
)


PREFILL_NUMBERS = ("prefill_tokens", "prefill_work", "prefill_blocks", "block_keys")


def draw_shapes(count: int, seed: int) -> list[IterationShape]:
    draw = random.Random(seed)
    shapes = []
    for index in range(count):
        prefill = index % 3 > 0
        decode_rows = draw.choice(MIXED_DECODE_ROWS if prefill else DECODE_ROWS)
        rows = draw.choice(ROWS) if prefill else decode_rows
        contexts = [draw.randint(16, 4000) for _ in range(decode_rows)]
        context = sum(contexts)
        chunks = [
            (draw.randint(0, 4000), draw.randint(1, rows // 2))
            for _ in range(draw.randint(1, SEGMENTS) if prefill else 0)
        ]
        shapes.append(
            IterationShape(
                Bucket(rows, decode_rows, prefill, prefill or draw.random() < 0.5),
                context,
                round(context * draw.uniform(1, GROUPS)),
                max(contexts, default=0),
                len(chunks),
                sum(length for _, length in chunks),
                sum(prefill_work(*chunk) for chunk in chunks),
            )
        )
    return shapes


@pytest.mark.parametrize(("k_d", "k_p"), [(1.0, 1.0), (0.3, 0.5), (0.0, 0.0)])
def test_recovers_a_known_model_through_noise(k_d: float, k_p: float):
    """2% of noise on each time, and every fifteenth one disturbed to twice what it should be: on
    other shapes the mean error is below the noise, and serial and overlapped are told apart."""
    known = replace(SERIAL, k_d=k_d, k_p=k_p)
    shapes, others = draw_shapes(240, 0), draw_shapes(120, 1)
    rng = np.random.default_rng(2)
    seconds = [known.predict_s(s) * max(0.5, rng.normal(1.0, 0.02)) for s in shapes]
    seconds[::15] = [2 * value for value in seconds[::15]]
    found = fit_latency(shapes, seconds, known.identity, GROUPS, SEGMENTS)
    errors = [abs(found.predict_s(s) / known.predict_s(s) - 1) for s in others]
    assert np.mean(errors) < 0.02
    assert np.quantile(errors, 0.95) < 0.05
    assert abs(found.k_d - k_d) < 0.15 and abs(found.k_p - k_p) < 0.15
    assert (found.identity, found.groups, found.segments) == (known.identity, GROUPS, SEGMENTS)


@pytest.mark.parametrize("lanes", [5.0, 13.0])
def test_finds_how_many_blocks_run_at_once(lanes: float):
    """A GPU's prefill attention: without lanes some shapes would be far off, with them all are as
    near as noise lets them."""
    known = replace(SERIAL, k_d=0.2, k_p=0.2, lanes=lanes, work_s=6e-8, read_s=0.0)
    draw = random.Random(9)
    shapes = []
    for shape in draw_shapes(300, 7):
        chunks = [(draw.randint(0, 4000), draw.randint(1, 1500)) for _ in range(shape.num_chunks)]
        drawn = iteration_shape(shape.bucket, (0,), 0, chunks, False)
        shapes.append(shape._replace(**{name: getattr(drawn, name) for name in PREFILL_NUMBERS}))
    rng = np.random.default_rng(2)
    seconds = [known.predict_s(s) * rng.normal(1.0, 0.02) for s in shapes[:200]]
    found = fit_latency(shapes[:200], seconds, {}, GROUPS, SEGMENTS)
    serial = fit_latency(shapes[:200], seconds, {}, GROUPS, SEGMENTS, serial=True)

    def errors(model: LatencyModel) -> list[float]:
        return [abs(model.predict_s(s) / known.predict_s(s) - 1) for s in shapes[200:]]

    assert np.mean(errors(found)) < 0.02 and np.quantile(errors(found), 0.95) < 0.06
    assert np.quantile(errors(serial), 0.95) > 2 * np.quantile(errors(found), 0.95)
    assert found.lanes == pytest.approx(lanes, rel=0.5) and serial.lanes == 1.0


def test_noise_is_no_overlap_where_there_can_be_none():
    shapes = draw_shapes(60, 5)
    rng = np.random.default_rng(6)
    seconds = [SERIAL.predict_s(s) * rng.uniform(0.8, 1.2) for s in shapes]
    found = fit_latency(shapes, seconds, {}, GROUPS, SEGMENTS, serial=True)
    assert (found.k_d, found.k_p) == (1.0, 1.0)
    errors = [abs(found.predict_s(s) / SERIAL.predict_s(s) - 1) for s in shapes]
    assert np.mean(errors) < 0.1  # the noise's own mean


def test_one_kind_of_iteration_is_enough():
    """An engine that only decodes, say; the parts that were never seen cost nothing."""
    shapes = [shape for shape in draw_shapes(90, 3) if not shape.bucket.prefill]
    found = fit_latency(shapes, [SERIAL.predict_s(s) for s in shapes], {}, GROUPS, SEGMENTS)
    assert [found.predict_s(s) for s in shapes] == pytest.approx(
        [SERIAL.predict_s(s) for s in shapes], rel=0.01
    )
    assert found.work_s == 0.0 and found.communication.seconds == (0.0,)


@pytest.mark.parametrize(
    ("seconds", "message"), [([], "0 times"), ([0.1, 0.0, 0.1], "positive"), ([0.1], "3 of them")]
)
def test_refuses_what_it_cannot_fit(seconds: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        fit_latency(draw_shapes(3, 4), seconds, {}, GROUPS, SEGMENTS)
