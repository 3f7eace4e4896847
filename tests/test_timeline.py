"""The timeline of a real engine: a record of iterations, a valid trace, a file when asked."""

from __future__ import annotations

import io
import itertools
import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from conflux_jax import llm
from conflux_jax.config import ConfigError
from conflux_jax.llm import LLM
from conflux_jax.plan import Bucket, DecodeRow, DecodeRows, Handoff, IterationPlan, PrefillChunk
from conflux_jax.recorder import IterationRecord, Recorder
from conflux_jax.request import SamplingParams
from conflux_jax.scheduler.latency_model import Parts
from conflux_jax.timeline import TimelineFile, group_slices, kind, write_timeline
from tests.fakes import make_fake, run, wait_until
from tests.serve.harness import running

PARTS = Parts(
    linear=4.0, head=1.0, handoff=2.0, prefill=3.0, decode=1.0, stage=3.0, communication=1.0
)
PLAN = IterationPlan(
    iteration=7,
    bucket=Bucket(8, 4, True, True),
    decodes=(DecodeRows.of([DecodeRow("a", 0, 5), DecodeRow("b", 1, 9)]), DecodeRows.of()),
    chunks=(PrefillChunk("c", 2, 0, 5, True),),
    prefill_shares=(2, 3),
    handoffs=(Handoff(2, 1, 0, 3, 5),),
    predicted_s=12.0,
    level=6,
    prefill_room=10,
)
RECORD = IterationRecord(
    number=7,
    end_s=120.0,
    elapsed_s=20.0,
    predicted_s=12.0,
    rows=8,
    level=6,
    room=10,
    decodes=(2, 0),
    contexts=(14, 0),
    shares=(2, 3),
    num_chunks=1,
    handoff_pages=3,
    parts=PARTS,
)


def test_a_plan_boiled_down():
    recorder = Recorder(2, lambda: 120.0, lambda plan: PARTS)
    recorder.collected(PLAN, 20.0)
    assert recorder.records() == [RECORD]
    assert RECORD.start_s == 100.0


def test_only_the_last_iterations_are_kept():
    recorder = Recorder(3, lambda: 0.0, lambda plan: None)
    for number in range(5):
        recorder.collected(IterationPlan(number, Bucket(1, 1, False, False), ()), 0.1)
    assert [record.number for record in recorder.records()] == [2, 3, 4]
    assert [record.number for record in recorder.records(after=3)] == [4]
    assert recorder.records(after=4) == []


def test_slices_are_the_models_stretched_to_what_was_measured():
    """20 s were measured, where the model has 4 + 3 + 1 + 2."""
    assert [(s.name, s.start_s, s.seconds) for s in group_slices(RECORD, 0, 100.0)] == [
        ("linear", 100.0, 8.0),
        ("head", 114.0, 2.0),
        ("hand-off", 116.0, 4.0),
        ("all-to-all", 108.0, 1.0),
        ("prefill attention", 109.0, 4.0),
        ("all-to-all", 113.0, 1.0),
        ("decode attention", 108.0, 2.0),
    ]
    names = [part.name for part in group_slices(RECORD, 1, 100.0)]
    assert "decode attention" not in names and "prefill attention" in names


def test_without_a_latency_model_an_iteration_is_whole():
    (whole,) = group_slices(RECORD._replace(parts=None), 1, 3.0)
    assert (whole.name, whole.start_s, whole.seconds) == ("iteration", 3.0, 20.0)


@pytest.mark.parametrize(
    ("decodes", "shares", "name"),
    [((1, 0), (0, 2), "mixed"), ((0,), (3,), "prefill"), ((0, 1), (0, 0), "decode"),
     ((0,), (0,), "hand-off")],
)  # fmt: skip
def test_kinds_of_iterations(decodes, shares, name):
    assert kind(RECORD._replace(decodes=decodes, shares=shares)) == name


def traced(document: str) -> list[dict[str, Any]]:
    parsed = json.loads(document)
    assert parsed["displayTimeUnit"] == "ms"
    return parsed["traceEvents"]


def test_an_empty_trace_is_valid():
    text = io.StringIO()
    write_timeline(text, [], "tiny")
    (name,) = [event for event in traced(text.getvalue()) if event["name"] == "process_name"]
    assert name["args"] == {"name": "engine, tiny"}


def test_a_run_has_every_iteration_and_tracks_do_not_overlap(tmp_path: Path):
    path = tmp_path / "timeline.json"
    with make_fake(groups=2, step_s=0.002) as fake:
        timeline = TimelineFile(path, 100, fake.engine)
        for prompt in ("abc", "x" * 90):
            run(fake, prompt, max_tokens=6)
        assert timeline.write() == len(fake.executor.plans)
        plans = fake.executor.plans
    events = traced(path.read_text())
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "engine, fake"), (1, "group 0"), (2, "group 1")}
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in tracks} == {0, 1, 2}
    for parts in tracks.values():
        assert [part["args"]["iteration"] for part in parts] == [p.iteration for p in plans]
        for part, following in itertools.pairwise(parts):
            # The clock of ends and that of durations are read some microseconds apart.
            assert part["ts"] + part["dur"] <= following["ts"] + 500
    rows = [e["args"] for e in events if e["ph"] == "C"]
    assert sum(row["prefill"] for row in rows) == 3 + 90
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "timeline.json"
    path.write_text("old")
    with make_fake() as fake:
        timeline = TimelineFile(path, 10, fake.engine)
        run(fake, max_tokens=3)
        monkeypatch.setattr(json, "dumps", lambda event: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            timeline.write()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_llm_leaves_its_timeline(tmp_path: Path, monkeypatch):
    path = tmp_path / "timeline.json"
    with make_fake() as fake:
        monkeypatch.setattr(llm, "build_engine", lambda config, progress: fake.engine)
        with LLM("tiny", timeline=str(path), timeline_iterations=3) as made:
            made.generate("abc", SamplingParams(max_tokens=9, ignore_eos=True))
        events = traced(path.read_text())
        assert len([e for e in events if e["ph"] == "X" and e["pid"] == 0]) == 3
        with pytest.raises(ConfigError, match=r"timeline: .* no directory"):
            LLM("tiny", timeline=str(tmp_path / "no" / "where.json"))


def test_a_server_writes_it_when_asked_and_at_the_end(tmp_path: Path):
    path = tmp_path / "timeline.json"
    with running("--timeline", str(path)) as server:
        server.send(signal.SIGUSR1)
        wait_until(path.exists)
        assert {event["ph"] for event in traced(path.read_text())} == {"M"}  # names only
        path.unlink()
        server.send(signal.SIGTERM)
        code, stderr = server.wait()
    assert code == 0
    assert f"timeline: 0 iterations in {path}" in stderr
    assert traced(path.read_text())
    with running("--timeline", str(tmp_path), ready=False) as refused:
        code, stderr = refused.wait()
    assert code == 1 and stderr == f"error: timeline: {tmp_path} is a directory\n"
