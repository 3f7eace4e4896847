"""A simulation's iterations as Chrome trace events, for Perfetto (ui.perfetto.dev) to show.

Every group is a process with three tracks: what it does in turn (linear layers, head), its prefill
path (all-to-all, attention, all-to-all) and its decode path beside it. One more process counts the
requests that wait and that run. A stage is summed over the layers: a picture with every layer's
would be forty times as large and say nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from conflux_jax.simulation.results import Results
from conflux_jax.simulation.system import Iteration

TRACKS = ("linear", "prefill path", "decode path")
_LINEAR, _PREFILL, _DECODE = range(len(TRACKS))
PREFILL_PATH = ("all-to-all", "prefill attention", "all-to-all")
QUEUE = "requests"


class Slice(NamedTuple):
    """On one track of a group."""

    track: int
    name: str
    start_s: float
    seconds: float


class Timeline:
    """Writes events as they come, so that a long run needs no memory. A context manager; the file
    is whole once it is closed."""

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._events = self._groups = 0

    def note(self, iteration: Iteration) -> None:
        """An `Observer`."""
        groups = len(iteration.work.decodes)
        while self._groups < groups:
            self._name_group(self._groups)
            self._groups += 1
        for group in range(groups):
            for part in slices(iteration, group):
                details = {"args": _details(iteration, group)} if part.name == "linear" else {}
                self._write(
                    name=part.name,
                    ph="X",
                    pid=group + 1,
                    tid=part.track + 1,
                    ts=round(1e6 * part.start_s, 3),
                    dur=round(1e6 * part.seconds, 3),
                    **details,
                )

    def count(self, results: Results) -> None:
        """Requests that wait for their first token, and those that have it and are not over, from
        their times."""
        changes: list[tuple[float, int, int]] = []
        for request in results.requests:
            at = request.number
            if at in results.refused:
                continue
            changes.append((request.arrival_s, 1, 0))
            if results.first_s[at] == results.first_s[at]:
                changes.append((results.first_s[at], -1, 1))
            if results.last_s[at] == results.last_s[at]:
                changes.append((results.last_s[at], 0, -1))
        waiting = running = 0
        self._write(name="process_name", ph="M", pid=0, tid=0, args={"name": QUEUE})
        for time_s, arrived, started in sorted(changes):
            waiting, running = waiting + arrived, running + started
            counts = {"waiting": waiting, "running": running}
            self._write(name=QUEUE, ph="C", pid=0, tid=0, ts=1e6 * time_s, args=counts)

    def close(self) -> None:
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _name_group(self, group: int) -> None:
        pid = group + 1
        self._write(name="process_name", ph="M", pid=pid, tid=0, args={"name": f"group {group}"})
        for track, name in enumerate(TRACKS):
            self._write(name="thread_name", ph="M", pid=pid, tid=track + 1, args={"name": name})

    def _write(self, **event: Any) -> None:
        self._file.write((",\n" if self._events else "") + json.dumps(event))
        self._events += 1


def slices(iteration: Iteration, group: int) -> list[Slice]:
    """What a group does in an iteration: linear layers, then both paths side by side, then the
    rest. Times are those of the group with most, stretched by what noise did to the iteration.
    A path that ran alone would take no longer than the stage, so none sticks out of it."""
    stages, work = iteration.stages, iteration.work
    after = stages.linear + stages.attention
    parts = [
        Slice(_LINEAR, "linear", 0.0, stages.linear),
        Slice(_LINEAR, "head", after, stages.head),
        Slice(_LINEAR, "overhead", after + stages.head, stages.overhead),
    ]
    if work.chunks:
        at, half = stages.linear, stages.communication / 2
        path = _fitted((half, stages.prefill_attention, half), stages.attention)
        for name, seconds in zip(PREFILL_PATH, path, strict=True):
            parts.append(Slice(_PREFILL, name, at, seconds))
            at += seconds
    if work.decodes[group]:
        (seconds,) = _fitted((stages.decode_attention,), stages.attention)
        parts.append(Slice(_DECODE, "decode attention", stages.linear, seconds))
    stretch = iteration.elapsed_s / stages.total if stages.total else 1.0
    return [
        Slice(track, name, iteration.start_s + stretch * at, stretch * seconds)
        for track, name, at, seconds in parts
        if seconds > 0
    ]


def _fitted(parts: Sequence[float], most: float) -> list[float]:
    """The parts as they are, or shrunk alike where their sum is more."""
    total = sum(parts)
    factor = min(1.0, most / total) if total else 0.0
    return [factor * part for part in parts]


def _details(iteration: Iteration, group: int) -> dict[str, int]:
    work = iteration.work
    return {
        "iteration": iteration.number,
        "rows": work.rows,
        "decodes": work.decodes[group],
        "context_tokens": work.contexts[group],
        "prefill_tokens": work.shares[group] if work.shares else 0,
    }
