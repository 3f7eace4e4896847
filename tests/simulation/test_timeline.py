"""The timeline: JSON that a viewer can show, with what the iterations were."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from conflux_jax.simulation.simulator import simulate
from conflux_jax.simulation.system import Iteration
from conflux_jax.simulation.systems.conflux import ConfluxSystem
from conflux_jax.simulation.timeline import Timeline, slices
from conflux_jax.simulation.work import Stages, Work
from tests.simulation.blueprints import PlainCosts, blueprint, requests_of

WORK = Work(rows=8, decodes=(3, 0), contexts=(30, 0), chunks=((0, 5),), shares=(2, 3))
STAGES = Stages(
    linear=4.0,
    head=1.0,
    prefill_attention=2.0,
    decode_attention=1.0,
    communication=1.0,
    attention=3.0,
    overhead=2.0,
)


def test_slices_of_both_paths():
    """Noise made 10 s of stages 20."""
    iteration = Iteration(0, 100.0, 20.0, WORK, STAGES)
    assert [(s.name, s.start_s, s.seconds) for s in slices(iteration, 0)] == [
        ("linear", 100.0, 8.0),
        ("head", 114.0, 2.0),
        ("overhead", 116.0, 4.0),
        ("all-to-all", 108.0, 1.0),
        ("prefill attention", 109.0, 4.0),
        ("all-to-all", 113.0, 1.0),
        ("decode attention", 108.0, 2.0),
    ]
    names = [part.name for part in slices(iteration, 1)]
    assert "decode attention" not in names and "prefill attention" in names


def test_a_run_is_valid_json_whose_tracks_do_not_overlap(tmp_path: Path):
    path = tmp_path / "timeline.json"
    system = ConfluxSystem(blueprint(PlainCosts(), groups=2))
    rows = [(0.0, 100, 6), (0.5, 20, 9), (30.0, 70, 3), (30.5, 9, 1)]
    with Timeline(path) as timeline:
        system.observe(timeline.note)
        results = simulate(system, requests_of(*rows))
        timeline.count_requests(results)
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "requests"), (1, "group 0"), (2, "group 1")}
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    assert {pid for pid, _ in tracks} == {1, 2}
    for parts in tracks.values():
        parts.sort()
        for (start, length), (following, _) in itertools.pairwise(parts):
            assert start + length <= following + 2e-3  # microseconds, rounded to the third place
    last = max(start + length for parts in tracks.values() for start, length in parts)
    assert last == pytest.approx(1e6 * results.end_s)
    counts = [(e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert [ts for ts, _ in counts] == sorted(ts for ts, _ in counts)
    assert counts[0][1] == {"waiting": 1, "running": 0}
    assert counts[-1][1] == {"waiting": 0, "running": 0}
    assert max(args["waiting"] for _, args in counts) == 2


def test_an_empty_run_is_valid_json(tmp_path: Path):
    path = tmp_path / "timeline.json"
    with Timeline(path):
        pass
    assert json.loads(path.read_text())["traceEvents"] == []
