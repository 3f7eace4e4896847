"""Request traces: when requests came, how long their prompts and outputs were, what they share.

Two public formats, recognised by their content:

- Mooncake, a JSON object a line: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`,
  one id for each BLOCK_TOKENS tokens of the prompt, the last block perhaps not full. `hash_ids` may
  be left out where nothing is known of shared prefixes.
- Azure, CSV with a header: TIMESTAMP (date and time), ContextTokens, GeneratedTokens.

Other fields are ignored, and so are blank lines.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

BLOCK_TOKENS = 512  # of a Mooncake hash
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """arrival_s: seconds after the trace's first request. prefix_hashes: ids of the prompt's blocks
    of BLOCK_TOKENS tokens, first to last; empty where the trace has none."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_hashes: tuple[int, ...] = ()


def read_trace(path: str | Path) -> Iterator[TraceRequest]:
    """The requests of a file in order of arrival, one line in memory at a time.

    Raises TraceError at the first line that cannot be right, for a time before that of the line
    above (a trace is not sorted here: that would need all of it), and where no request is found;
    OSError if the file cannot be opened.
    """
    first_s = latest_s = None
    for line, request in _requests(Path(path)):
        if first_s is None or latest_s is None:
            first_s = latest_s = request.arrival_s
        if request.arrival_s < latest_s:
            raise TraceError(
                f"{path}: line {line}: timestamp: {latest_s - request.arrival_s:g} s before that "
                "of the request above; sort the trace by time"
            )
        latest_s = request.arrival_s
        yield TraceRequest(
            request.arrival_s - first_s,
            request.prompt_tokens,
            request.output_tokens,
            request.prefix_hashes,
        )
    if first_s is None:
        raise TraceError(f"{path}: no requests in it")


def _requests(path: Path) -> Iterator[tuple[int, TraceRequest]]:
    """Line numbers and requests; arrivals in the file's own time."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        line = 1
        try:
            for line, request in _numbered(file):
                yield line, request
        except _BadLine as error:
            raise TraceError(f"{path}: line {error.line}: {error}") from error
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: after line {line}: not text in UTF-8") from error


class _BadLine(Exception):
    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


def _numbered(file: TextIO) -> Iterator[tuple[int, TraceRequest]]:
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    read = _mooncake if first[1].lstrip().startswith("{") else _azure
    yield from read(itertools.chain([first], lines))


def _mooncake(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, TraceRequest]]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise _BadLine(number, f"not JSON: {error}") from error
        if not isinstance(record, dict):
            raise _BadLine(number, f"must be a JSON object, got {line.strip()[:40]}")
        try:
            yield number, _from_record(record)
        except (ValueError, OverflowError) as error:
            raise _BadLine(number, str(error)) from error


def _from_record(record: dict[str, Any]) -> TraceRequest:
    """Raises ValueError that names the field."""
    for name in ("timestamp", "input_length", "output_length"):
        if name not in record:
            raise ValueError(f"{name}: missing")
    time_ms = record["timestamp"]
    if type(time_ms) not in (int, float) or not math.isfinite(time_ms):
        raise ValueError(f"timestamp: must be a number of milliseconds, got {time_ms!r}")
    prompt = _count("input_length", record["input_length"])
    output = _count("output_length", record["output_length"])
    hashes = record.get("hash_ids")
    if hashes is None:
        return TraceRequest(time_ms / 1000, prompt, output)
    if not isinstance(hashes, list) or any(type(item) is not int for item in hashes):
        raise ValueError(f"hash_ids: must be a list of integers, got {str(hashes)[:40]}")
    if len(hashes) != (blocks := -(-prompt // BLOCK_TOKENS)):
        raise ValueError(
            f"hash_ids: must have one id for each {BLOCK_TOKENS} tokens of input_length {prompt}, "
            f"which is {blocks}, got {len(hashes)}"
        )
    return TraceRequest(time_ms / 1000, prompt, output, tuple(hashes))


def _azure(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, TraceRequest]]:
    """Each line is a row: none of these fields may hold a line break."""
    columns: dict[str, int] = {}
    for number, line in lines:
        try:
            (row,) = csv.reader([line.rstrip("\r\n")], strict=True)
        except (csv.Error, ValueError) as error:
            raise _BadLine(number, f"not a line of CSV: {error}") from error
        if not columns:
            columns = {name.strip(): index for index, name in enumerate(row)}
            if missing := [name for name in AZURE_FIELDS if name not in columns]:
                raise _BadLine(
                    number,
                    "must be a JSON object (Mooncake) or a header with the columns "
                    f"{', '.join(AZURE_FIELDS)} (Azure); {missing[0]} is missing",
                )
            continue
        if len(row) != len(columns):
            raise _BadLine(number, f"has {len(row)} columns, the header {len(columns)}")
        try:
            yield number, _from_row(dict(zip(columns, row, strict=True)))
        except ValueError as error:
            raise _BadLine(number, str(error)) from error


def _from_row(row: dict[str, str]) -> TraceRequest:
    """Raises ValueError that names the column."""
    time = row["TIMESTAMP"].strip()
    try:
        moment = datetime.fromisoformat(time)
    except ValueError as error:
        raise ValueError(f"TIMESTAMP: must be a date and time, got {time!r}") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    counts = []
    for name in AZURE_FIELDS[1:]:
        text = row[name].strip()
        counts.append(_count(name, int(text) if text.isdecimal() else text))
    return TraceRequest(moment.timestamp(), *counts)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: must be an integer of at least 1, got {value!r}")
    return value
