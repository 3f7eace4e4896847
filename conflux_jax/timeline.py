"""The last iterations of an engine as a Chrome trace, in a file that is written when asked and at
the end.

What an iteration took is measured. How it divides into linear layers and the two attention paths
nobody measures: that is the latency model's word, stretched to what was measured.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from conflux_jax.chrome_trace import LINEAR, ChromeTrace, Slice, Stages, stage_slices
from conflux_jax.config import ConfigError
from conflux_jax.engine import Engine
from conflux_jax.recorder import IterationRecord, Recorder

PROCESS, TRACK = "engine", "iterations"


def write_timeline(file: TextIO, records: Sequence[IterationRecord], model: str) -> None:
    """Times begin with the first iteration."""
    with ChromeTrace(file) as trace:
        trace.name_process(0, f"{PROCESS}, {model}", (TRACK,))
        first_s = records[0].start_s if records else 0.0
        for record in records:
            start_s = record.start_s - first_s
            whole = Slice(0, kind(record), start_s, record.elapsed_s)
            trace.slice(0, whole, _details(record))
            trace.count("rows", start_s, decode=sum(record.decodes), prefill=sum(record.shares))
            for group in range(len(record.decodes)):
                trace.group(group, group_slices(record, group, start_s), _group(record, group))


def kind(record: IterationRecord) -> str:
    """By what the iteration has rows of."""
    if any(record.shares):
        return "mixed" if any(record.decodes) else "prefill"
    return "decode" if any(record.decodes) else "hand-off"


def group_slices(record: IterationRecord, group: int, start_s: float) -> list[Slice]:
    """Without a latency model there is one, for the whole iteration."""
    parts = record.parts
    if parts is None:
        return [Slice(LINEAR, "iteration", start_s, record.elapsed_s)]
    stages = Stages(
        linear=parts.linear,
        attention=parts.stage,
        head=parts.head,
        rest=parts.handoff,
        rest_name="hand-off",
        prefill=parts.prefill - parts.communication,
        communication=parts.communication,
        decode=parts.decode if record.decodes[group] else 0.0,
    )
    return stage_slices(stages, start_s, record.elapsed_s)


def _details(record: IterationRecord) -> dict[str, float]:
    return {
        "iteration": record.number,
        "predicted_ms": round(1e3 * record.predicted_s, 3),
        "level": record.level,
        "prefill_room": record.room,
        "chunks": record.num_chunks,
        "handoff_pages": record.handoff_pages,
    }


def _group(record: IterationRecord, group: int) -> dict[str, int]:
    return {
        "iteration": record.number,
        "rows": record.rows,
        "decodes": record.decodes[group],
        "context_tokens": record.contexts[group],
        "prefill_tokens": record.shares[group],
    }


class TimelineFile:
    """Records from now on, and writes `path` when asked, whole or not at all. most: iterations that
    are kept."""

    def __init__(self, path: str | Path, most: int, engine: Engine):
        self.path = Path(path)
        self._engine = engine
        self._lock = threading.Lock()
        self._recorder = Recorder(most, lambda: engine.now_s, engine.modelled)
        engine.observe(self._recorder)

    def write(self) -> int:
        """How many iterations are in the file now. Raises OSError. On any thread."""
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        with self._lock:
            records = self._recorder.records()
            try:
                with beside.open("w", encoding="utf-8") as file:
                    write_timeline(file, records, self._engine.info.name)
                beside.replace(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise
        return len(records)


def check_path(path: str | Path) -> None:
    """Raises ConfigError where no such file can be made: better before a model is loaded than when
    its run is over."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"timeline: {path} is a directory")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"timeline: {path.parent} is no directory that can be written to")
