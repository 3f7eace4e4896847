"""The latency model: monotone, never negative, priced by bucket; its file, and whose it is."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_jax.config import ConfigError
from conflux_jax.plan import Bucket
from conflux_jax.scheduler.latency_model import (
    Curve,
    IterationShape,
    LatencyModel,
    iteration_shape,
    padded_context,
    prefill_span,
    prefill_work,
)
from pallas_kernels import blockwise

IDENTITY = {"model": "tiny", "sp": 2, "rows_ladder": [16, 64]}
MODEL = LatencyModel(
    identity=IDENTITY,
    groups=2,
    segments=4,
    linear=Curve((1, 16, 64), (0.010, 0.012, 0.030)),
    head=Curve((1, 32), (0.0, 0.004)),
    handoff_s=0.002,
    communication=Curve((16, 64), (0.003, 0.005)),
    work_s=1e-8,
    read_s=0.0,
    chunk_s=1e-4,
    token_s=1e-6,
    decode_rows=Curve((1, 16), (0.001, 0.002)),
    context_s=1e-6,
    all_context_s=1e-7,
    padded_context_s=1e-7,
    k_d=0.4,
    k_p=0.6,
)


@st.composite
def models(draw: st.DrawFn) -> LatencyModel:
    amounts = st.one_of(st.just(0.0), st.floats(1e-9, 1.0))

    def curve() -> Curve:
        sizes = sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=5)))
        seconds = sorted(draw(st.lists(amounts, min_size=len(sizes), max_size=len(sizes))))
        return Curve(tuple(sizes), tuple(seconds))

    values = {}
    for item in fields(LatencyModel):
        if item.name in ("linear", "head", "communication", "decode_rows"):
            values[item.name] = curve()
        elif item.name in ("groups", "segments"):
            values[item.name] = draw(st.integers(1, 8))
        elif item.name.endswith("_s") or item.name.startswith("k_"):
            values[item.name] = draw(amounts)
    return LatencyModel(identity=IDENTITY, **values)


SHAPES = st.builds(
    IterationShape,
    st.builds(Bucket, st.integers(1, 900), st.integers(0, 900), st.booleans(), st.booleans()),
    *(st.integers(0, 200_000) for _ in range(3)),
    st.integers(0, 16),
    st.integers(0, 4_000),
    st.integers(0, 10**9),
)


@settings(max_examples=40)
@given(models(), SHAPES, st.data())
def test_no_number_of_a_shape_makes_it_faster_when_it_rises(
    model: LatencyModel, shape: IterationShape, data: st.DataObject
):
    """Also past the last knot of every curve, up to rounding in the last place."""
    more = []
    for name in shape._fields[1:]:
        more.append(
            shape._replace(**{name: getattr(shape, name) + data.draw(st.integers(1, 5000))})
        )
    bucket = shape.bucket
    more += [
        shape._replace(bucket=bucket._replace(rows=bucket.rows + data.draw(st.integers(1, 900)))),
        shape._replace(bucket=bucket._replace(decode_rows=bucket.decode_rows + 7)),
        shape._replace(bucket=bucket._replace(prefill=True)),
        shape._replace(bucket=bucket._replace(handoff=True)),
    ]
    seconds = model.predict_s(shape)
    assert seconds >= 0
    for larger in more:
        assert model.predict_s(larger) >= seconds * (1 - 1e-12)


@settings(max_examples=40)
@given(models(), SHAPES)
def test_parts_add_up(model: LatencyModel, shape: IterationShape):
    parts = model.parts(shape)
    assert min(parts) >= 0
    assert parts.total == pytest.approx(model.predict_s(shape), rel=1e-12)
    assert parts.stage >= max(parts.prefill, parts.decode)
    assert parts.communication <= parts.prefill


@settings(max_examples=40)
@given(models(), SHAPES)
def test_a_model_is_the_same_from_its_json(model: LatencyModel, shape: IterationShape):
    again = LatencyModel.from_json(model.to_json())
    assert again == model
    assert again.predict_s(shape) == model.predict_s(shape)


def test_worked_example():
    """64 rows with 16 decodes on each of two groups, and a chunk of 100 tokens after 300."""
    shape = IterationShape(Bucket(64, 16, True, True), 4_000, 6_000, 500, 1, 100, 100_000)
    parts = MODEL.parts(shape)
    assert parts.linear == 0.030
    assert parts.head == pytest.approx(0.004 * 19 / 31)  # 16 + 4 rows may sample
    assert parts.handoff == 0.002
    assert parts.prefill == pytest.approx(0.005 + 100_000 * 1e-8 / 2 + 1e-4 + 100 * 1e-6)
    assert parts.communication == 0.005
    assert parts.decode == pytest.approx(0.002 + 0.004 + 0.0006 + 16 * 512 * 1e-7)
    assert parts.stage == pytest.approx(parts.decode + 0.6 * parts.prefill)


def test_blocks_of_queries_side_by_side():
    """13 lanes. 10 blocks after 60,000 tokens: as long as one of them. 30 blocks: their mean. Two:
    each block's keys are shared out over six lanes."""
    bucket = Bucket(4096, 0, True, False)

    def span(*chunks: tuple[int, int]) -> float:
        return prefill_span(iteration_shape(bucket, (0,), 0, chunks, False), 13.0)

    assert span((60_000, 1280)) == 128 * 61_280
    assert span((60_000, 3840)) == prefill_work(60_000, 3840) / 13 > 128 * 63_840
    assert span((60_000, 200)) == max(128 * 60_200 / 6, prefill_work(60_000, 200) / 13)
    assert span((60_000, 1000), (0, 280)) == 128 * 61_000  # the longest of all blocks
    assert span() == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 3000)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 300),
    st.integers(0, 300),
    st.floats(1.0, 150.0),
)
def test_prefill_span_is_monotone(chunks, which, start, length, lanes):
    bucket, at = Bucket(16_384, 0, True, False), which % len(chunks)
    more = list(chunks)
    more[at] = chunks[at][0] + start, chunks[at][1] + length
    small, large = (iteration_shape(bucket, (0,), 0, c, False) for c in (chunks, more))
    assert prefill_span(small, lanes) <= prefill_span(large, lanes) * (1 + 1e-12)


def test_the_slower_path_counts_whole():
    hidden = replace(MODEL, k_d=0.0, k_p=0.0)
    serial = replace(MODEL, k_d=1.0, k_p=1.0)
    shape = IterationShape(Bucket(64, 16, True, False), 10_000, 10_000, 900, 2, 90, 10**6)
    parts = MODEL.parts(shape)
    assert hidden.parts(shape).stage == max(parts.prefill, parts.decode)
    assert serial.parts(shape).stage == parts.prefill + parts.decode


def test_static_parts_are_priced_by_the_bucket():
    small = IterationShape(Bucket(16, 16, False, False), 100, 100, 10)
    padded = IterationShape(Bucket(64, 64, False, False), 100, 100, 10)
    assert MODEL.parts(padded).linear == 0.030
    assert MODEL.predict_s(padded) > MODEL.predict_s(small)
    idle = IterationShape(Bucket(64, 0, True, False))
    assert MODEL.parts(idle).prefill == 0.005
    assert MODEL.parts(idle).decode == 0.0


@given(st.integers(1, 600), st.integers(0, 9_000))
def test_padded_context_counts_the_blocks_of_the_kernel(rows: int, longest: int):
    trips = -(-longest // blockwise.DECODE_BLOCK_KEYS)
    shape = IterationShape(Bucket(rows, rows, False, False), longest_context=longest)
    assert padded_context(shape) == rows * trips * blockwise.DECODE_BLOCK_KEYS


def computed_pairs(start: int, length: int) -> int:
    """Counted block by block, as prefill attention's loops run."""
    queries, keys = blockwise.PREFILL_BLOCK_QUERIES, blockwise.PREFILL_BLOCK_KEYS
    pairs = 0
    for first in range(0, length, queries):
        last = min(first + queries, length)
        pairs += queries * keys * (-(-start // keys) + -(-last // keys))
    return pairs


@given(st.integers(0, 9_000), st.integers(1, 5_000))
def test_prefill_work_counts_the_blocks_of_the_kernel(start: int, length: int):
    assert prefill_work(start, length) == computed_pairs(start, length)


@given(st.integers(0, 9_000), st.integers(1, 5_000), st.integers(1, 500))
def test_prefill_work_is_monotone(start: int, length: int, more: int):
    work = prefill_work(start, length)
    assert work >= length * start + length * (length + 1) // 2
    assert prefill_work(start + more, length) >= work
    assert prefill_work(start, length + more) >= work


def test_a_file_is_for_the_engine_that_it_was_measured_on(tmp_path: Path):
    path = tmp_path / "profile.json"
    MODEL.save(path)
    assert LatencyModel.load(path, IDENTITY) == MODEL
    # A tuple is a list in the file.
    assert LatencyModel.load(path, IDENTITY | {"rows_ladder": (16, 64)}) == MODEL
    with pytest.raises(ConfigError) as refused:
        LatencyModel.load(path, IDENTITY | {"sp": 4, "rows_ladder": (16, 32)})
    message = str(refused.value)
    assert "sp is 4, the profile's 2" in message
    assert "rows_ladder is [16, 32], the profile's [16, 64]" in message
    assert "model" not in message.split("another engine:")[1]
    assert str(path) in message
    with pytest.raises(ConfigError, match='dtype is "float32", the profile\'s null'):
        LatencyModel.load(path, IDENTITY | {"dtype": "float32"})
    with pytest.raises(ConfigError, match="sp is null, the profile's 2"):
        LatencyModel.load(path, {key: value for key, value in IDENTITY.items() if key != "sp"})


def changed(name: str, value: object) -> str:
    document = json.loads(MODEL.to_json())
    document["model"][name] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "format"),
        ('{"format": 0}', "format"),
        ('{"format": 2, "identity": {}}', "identity and model"),
        ('{"format": 2, "identity": {}, "model": {}}', r"model\.all_context_s: missing"),
        (changed("speed", 1), r"model\.speed: no such number"),
        (changed("work_s", -1e-9), r"model\.work_s: must be a number of at least 0"),
        (changed("work_s", float("nan")), r"model\.work_s"),
        (changed("token_s", "1"), r"model\.token_s"),
        (changed("k_d", 1.5), r"model\.k_d: must be at most 1"),
        (changed("groups", 0), r"model\.groups: must be an integer of at least 1"),
        (changed("linear", 1.0), r"model\.linear: must be a curve"),
        (changed("linear", {"sizes": [1]}), r"model\.linear: must have lists"),
        (changed("linear", {"sizes": [1], "seconds": []}), r"model\.linear: must have as many"),
        (changed("head", {"sizes": [2, 2], "seconds": [1, 1]}), r"model\.head\.sizes"),
        (changed("head", {"sizes": [1, 2], "seconds": [2, 1]}), r"model\.head\.seconds"),
    ],
)
def test_a_malformed_file_is_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        LatencyModel.load(path, IDENTITY)
    assert str(path) in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        LatencyModel.load(tmp_path / "nowhere.json", IDENTITY)


def test_a_file_says_how_multiprocessors_were_divided(tmp_path: Path):
    path = tmp_path / "profile.json"
    divided = replace(MODEL, decode_sms=48)
    divided.save(path)
    assert LatencyModel.read(path) == divided
    assert "decode_sms" not in json.loads(MODEL.to_json())
    for wrong in (0, 4.5, "48", True):
        path.write_text(json.dumps(json.loads(divided.to_json()) | {"decode_sms": wrong}))
        with pytest.raises(ConfigError, match="decode_sms: must be an integer") as refused:
            LatencyModel.read(path)
        assert str(path) in str(refused.value)
