"""Iterations as events of a Chrome trace, which Perfetto (ui.perfetto.dev) shows; written as they
come, so that a long run needs no memory. Simulations and real engines write them alike.

Every group is a process with three tracks: what it does in turn (linear layers, head), its prefill
path (all-to-all, attention, all-to-all) and its decode path beside it. One more process, 0, is for
what concerns all groups. A stage is summed over the layers: a picture with every layer's would be
forty times as large and say nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

TRACKS = ("linear", "prefill path", "decode path")
LINEAR, PREFILL, DECODE = range(len(TRACKS))
PREFILL_PATH = ("all-to-all", "prefill attention", "all-to-all")


class Slice(NamedTuple):
    """On one track of a group."""

    track: int
    name: str
    start_s: float
    seconds: float


class Stages(NamedTuple):
    """Seconds of an iteration, in the order in which they run: `linear`, then `attention` with both
    paths in it, then `head`, then `rest`, which is called `rest_name`. prefill: the prefill path's
    attention, communication: what it sends; decode: the decode path's attention; each as if it ran
    alone, 0 where it does not run."""

    linear: float
    attention: float
    head: float
    rest: float
    rest_name: str
    prefill: float = 0.0
    communication: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head + self.rest


def stage_slices(stages: Stages, start_s: float, elapsed_s: float) -> list[Slice]:
    """What a group does in an iteration, stretched so that it takes `elapsed_s`. A path that ran
    alone would take no longer than the stage, so none sticks out of it."""
    after = stages.linear + stages.attention
    parts = [
        Slice(LINEAR, "linear", 0.0, stages.linear),
        Slice(LINEAR, "head", after, stages.head),
        Slice(LINEAR, stages.rest_name, after + stages.head, stages.rest),
    ]
    at, half = stages.linear, stages.communication / 2
    path = _fitted((half, stages.prefill, half), stages.attention)
    for name, seconds in zip(PREFILL_PATH, path, strict=True):
        parts.append(Slice(PREFILL, name, at, seconds))
        at += seconds
    (seconds,) = _fitted((stages.decode,), stages.attention)
    parts.append(Slice(DECODE, "decode attention", stages.linear, seconds))
    stretch = elapsed_s / stages.total if stages.total else 1.0
    return [
        Slice(track, name, start_s + stretch * at, stretch * seconds)
        for track, name, at, seconds in parts
        if seconds > 0
    ]


def _fitted(parts: Sequence[float], most: float) -> list[float]:
    """The parts as they are, or shrunk alike where their sum is more."""
    total = sum(parts)
    factor = min(1.0, most / total) if total else 0.0
    return [factor * part for part in parts]


class ChromeTrace:
    """Writes to an open text file, which stays its opener's to close. A context manager; the trace
    is whole once it is left."""

    def __init__(self, file: TextIO):
        self._file = file
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._events = self._groups = 0
        self._is_whole = False

    def group(self, group: int, slices: Iterable[Slice], details: dict[str, Any]) -> None:
        """What one group did in an iteration; details: of its first slice."""
        while self._groups <= group:
            self._groups += 1
            self.name_process(self._groups, f"group {self._groups - 1}", TRACKS)
        for part in slices:
            self.slice(group + 1, part, details)
            details = {}

    def slice(self, process: int, part: Slice, details: dict[str, Any]) -> None:
        self._write(
            name=part.name,
            ph="X",
            pid=process,
            tid=part.track + 1,
            ts=round(1e6 * part.start_s, 3),
            dur=round(1e6 * part.seconds, 3),
            **({"args": details} if details else {}),
        )

    def count(self, name: str, time_s: float, **counts: float) -> None:
        """Numbers of that moment, one graph each, in the process for all groups."""
        self._write(name=name, ph="C", pid=0, tid=0, ts=round(1e6 * time_s, 3), args=counts)

    def name_process(self, process: int, name: str, tracks: Sequence[str] = ()) -> None:
        self._write(name="process_name", ph="M", pid=process, tid=0, args={"name": name})
        for track, title in enumerate(tracks):
            args = {"name": title}
            self._write(name="thread_name", ph="M", pid=process, tid=track + 1, args=args)

    def close(self) -> None:
        if not self._is_whole:
            self._is_whole = True
            self._file.write("\n]}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, **event: Any) -> None:
        self._file.write((",\n" if self._events else "") + json.dumps(event))
        self._events += 1
